// The order of rows by their set of experts. Its CUDA kernels are written in Triton.
#pragma once

#include <tuple>

#include "checks.h"

namespace rbm::cpu {
std::tuple<Tensor, Tensor, Tensor> expert_order(const Tensor& experts, int64_t num_experts, int64_t block_m);
}  // namespace rbm::cpu
