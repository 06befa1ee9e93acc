// A layer of experts of 8-bit integers, and its answers for any number of rows: what routed_matmul_int8 does once, and
// packed_network for each of its layers.
#pragma once

#include <cstdint>

#include "routing.h"

namespace rbm::cpu {

struct Int8Layer {
  const float* x;  // [B, D]
  int64_t x_stride, features;
  Routing<float> routing;  // of all rows, by x or by others; gates, experts and cosines are each thread's own
  bool is_routed;          // else there is one expert, and its gate is 1
  const int8_t* experts;   // what quantize_experts returned
  int64_t outputs;
  float* y;  // [B, y_stride]; where a row has room for whole panels, they are written beyond the last output
  int64_t y_stride;
};

// Defined in routed_matmul_int8.cpp.
void answer(const Int8Layer& layer, int64_t rows);

}  // namespace rbm::cpu
