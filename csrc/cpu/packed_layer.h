// A layer of packed experts, and its answers for any number of rows: what routed_matmul_packed does once, and packed_network
// for each of its layers.
#pragma once

#include <cstdint>

#include "packed_experts.h"
#include "routing.h"

namespace rbm::cpu {

template <typename T>
struct PackedLayer {
  const T* x;  // [B, D]
  int64_t x_stride;
  Routing<T> routing;  // of all rows, by x or by others; gates, experts and cosines are each thread's own
  bool is_routed;      // else there is one expert, and its gate is 1
  PackedExperts<T> experts;
  T* y;  // [B, y_stride]; where a row has room for whole vectors, they are written beyond the last output
  int64_t y_stride;
};

// Instantiated in packed_experts.cpp, for T of float64, float32 and bfloat16.
template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows);

}  // namespace rbm::cpu
