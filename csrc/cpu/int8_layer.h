// A layer of 8-bit integer experts, and its answers for any number of rows. Used once by routed_matmul_int8, and by
// packed_network for each of its layers.
#pragma once

#include <cstdint>

#include "routing.h"

namespace rbm::cpu {

struct Int8Layer {
  const float* x;  // [B, D]
  int64_t x_stride, features;
  Routing<float> routing;  // of all rows, by x or by other rows; gates, experts and cosines are each thread's own
  bool is_routed;          // otherwise there is one expert with gate 1
  const int8_t* experts;   // result of quantize_experts
  int64_t outputs;
  float* y;  // [B, y_stride]; if a row has room for whole panels, these are written past the last output
  int64_t y_stride;
};

// Defined in routed_matmul_int8.cpp.
void answer(const Int8Layer& layer, int64_t rows);

}  // namespace rbm::cpu
