// Experts packed for the processor, and grouped matmul with them, also with the routing in one call. CPU only.
#pragma once

#include <optional>

#include "checks.h"

namespace rbm::cpu {
Tensor pack_experts(const Tensor& weight, const std::optional<Tensor>& bias);
Tensor routed_matmul_packed(
    const Tensor& x, const Tensor& memory, const Tensor& packed, int64_t out_features, int64_t k, double temperature);
Tensor expert_matmul_packed(
    const Tensor& x, const std::optional<Tensor>& gates, const Tensor& experts, const Tensor& packed,
    int64_t out_features);
}  // namespace rbm::cpu
