// Feed-forward experts, packed for the processor, with their routing in one call. CPU only.
#pragma once

#include <string>

#include "checks.h"

namespace rbm::cpu {
Tensor packed_feed_forward(
    const Tensor& x, const Tensor& memory, const Tensor& packed_in, const Tensor& packed_out, int64_t hidden_features,
    int64_t out_features, int64_t k, std::string activation, double temperature);
}  // namespace rbm::cpu
