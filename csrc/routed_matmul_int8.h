// Routing and grouped matmul with 8-bit integer experts. CPU only.
#pragma once

#include <optional>

#include "checks.h"

namespace rbm::cpu {
Tensor routed_matmul_int8(
    const Tensor& x, const std::optional<Tensor>& memory, const Tensor& experts, int64_t out_features, int64_t k,
    double temperature);
}  // namespace rbm::cpu
