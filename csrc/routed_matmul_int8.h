// Routing and grouped matmul with experts of 8-bit integers. On the CPU alone.
#pragma once

#include <optional>

#include "checks.h"

namespace rbm::cpu {
Tensor routed_matmul_int8(
    const Tensor& x, const std::optional<Tensor>& memory, const Tensor& experts, int64_t out_features, int64_t k,
    double temperature);
}  // namespace rbm::cpu
