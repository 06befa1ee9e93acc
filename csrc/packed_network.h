// All layers of a network of packed weights in one call. On the CPU alone.
#pragma once

#include "checks.h"

namespace rbm::cpu {
Tensor packed_network(const Tensor& x, const Tensor& network, int64_t out_features);
}  // namespace rbm::cpu
