// All layers of a network with packed weights in one call. CPU only.
#pragma once

#include "checks.h"

namespace rbm::cpu {
Tensor packed_network(const Tensor& x, const Tensor& network, int64_t out_features);
}  // namespace rbm::cpu
