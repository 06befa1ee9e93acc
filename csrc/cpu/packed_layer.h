// A layer of packed experts, and its answers for any number of rows. Used once by routed_matmul_packed and by
// expert_matmul_packed, and by packed_network for each of its layers.
#pragma once

#include <cstdint>

#include "packed_experts.h"
#include "routing.h"

namespace rbm::cpu {

// The experts of rows that are routed already.
template <typename T>
struct GivenPairs {
  const Accumulation<T>* gates;  // [B, k], or null: all of them are 1
  const int32_t* experts;        // [B, k]
  bool own_rows;                 // whether each choice of a row multiplies a row of its own: x is [B k, D]
  bool own_results;              // whether the results of the choices are not summed: y is [B k, y_stride]
};

template <typename T>
struct PackedLayer {
  const T* x;  // [B, D]
  int64_t x_stride;
  Routing<T> routing;  // of all rows, by x or by other rows; gates, experts and cosines are each thread's own
  bool is_routed;      // otherwise the pairs are given, or there is one expert with gate 1
  PackedExperts<T> experts;
  T* y;  // [B, y_stride]; if a row has room for whole vectors, these are written past the last output
  int64_t y_stride;
  const GivenPairs<T>* given = nullptr;  // of the routing's members, num_experts and top_k are used then

  int64_t inputs_of_row() const { return given && given->own_rows ? routing.top_k : 1; }
  int64_t results_of_row() const { return given && given->own_results ? routing.top_k : 1; }
};

// Instantiated in packed_experts.cpp, for T of float64, float32 and bfloat16.
template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows);

}  // namespace rbm::cpu
