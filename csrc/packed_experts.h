// Experts packed for the processor, and routing and grouped matmul with them in one call. CPU only.
#pragma once

#include <optional>

#include "checks.h"

namespace rbm::cpu {
Tensor pack_experts(const Tensor& weight, const std::optional<Tensor>& bias);
Tensor routed_matmul_packed(
    const Tensor& x, const Tensor& memory, const Tensor& packed, int64_t out_features, int64_t k, double temperature);
}  // namespace rbm::cpu
