// A layer of packed experts, and its answers for any number of rows. Used once by routed_matmul_packed, and by
// packed_network for each of its layers.
#pragma once

#include <cstdint>

#include "packed_experts.h"
#include "routing.h"

namespace rbm::cpu {

template <typename T>
struct PackedLayer {
  const T* x;  // [B, D]
  int64_t x_stride;
  Routing<T> routing;  // of all rows, by x or by other rows; gates, experts and cosines are each thread's own
  bool is_routed;      // otherwise there is one expert with gate 1
  PackedExperts<T> experts;
  T* y;  // [B, y_stride]; if a row has room for whole vectors, these are written past the last output
  int64_t y_stride;
};

// Instantiated in packed_experts.cpp, for T of float64, float32 and bfloat16.
template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows);

}  // namespace rbm::cpu
