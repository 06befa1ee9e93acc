// Routing and grouped matmul in one call. Its CUDA kernel is written in Triton.
#pragma once

#include <optional>

#include "checks.h"

namespace rbm::cpu {
Tensor routed_matmul(
    const Tensor& x, const Tensor& memory, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k,
    double temperature);
}  // namespace rbm::cpu
