// A layer of packed experts, and its answers for any number of rows. Used once by routed_matmul_packed, for each
// product by packed_feed_forward, and by packed_network for each of its layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "activation.h"
#include "packed_experts.h"
#include "routing.h"

namespace rbm::cpu {

// One of the two products of feed-forward experts, for rows that are routed already.
template <typename T>
struct GivenPairs {
  const Accumulation<T>* gates;      // [B, k], or null: all of them are 1
  const int32_t* experts;            // [B, k]
  std::byte* hidden;                 // [B k, hidden_bytes], a row of activated numbers for each choice
  int64_t features;                  // of such a row
  std::optional<Activation> writes;  // of the first product, which writes `hidden`; the second one reads it
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
  bool leaves_out_zeros = false;         // of rows that are mostly zero; only if all weights are finite

  bool reads_hidden() const { return given && !given->writes; }
  bool writes_hidden() const { return given && given->writes; }
};

// Instantiated in packed_experts.cpp, for T of float64, float32 and bfloat16.
template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows);

// The same in the calling thread alone.
template <typename T>
void answer_alone(const PackedLayer<T>& layer, int64_t rows);

// Rows of packed experts on this processor.
template <typename T>
int64_t packed_rows_of(int64_t features) {
  int64_t rows = 0;
  with_operand<T>([&]<typename Operand>(Operand) { rows = packed_rows<Operand>(features); });
  return rows;
}

// Bytes of a row of hidden features, as the second product multiplies it on this processor.
template <typename T>
int64_t hidden_bytes(int64_t features) {
  int64_t bytes = 0;
  with_operand<T>([&]<typename Operand>(Operand) {
    using Row = PackedProduct<T, Operand>::Row;
    bytes = round_up((packed_rows<Operand>(features) - 1) * sizeof(Row), 64);
  });
  return bytes;
}

// Raises unless `packed` is what pack_experts returned for these sizes, in the dtype of x.
inline void check_packed(
    const Checks& check, const char* name, const Tensor& packed, const Tensor& x, int64_t num_experts, int64_t features,
    int64_t out_features) {
  const ScalarType dtype = x.scalar_type();
  check.dtype(name, packed, {dtype});
  const PackedSizes sizes = dtype == ScalarType::Double ? PackedSizes::of<double>() : PackedSizes::of<float>();
  const int64_t rows = with_type(dtype, [&]<typename T>(T) { return packed_rows_of<T>(features); });
  check.shape(
      name, packed, {num_experts, rows, sizes.padded(out_features)},
      "what pack_experts returned on this processor for these sizes");
  check.same_device(name, packed, "x", x);
  if (!packed.is_contiguous()) check.fail(name, " is not contiguous, expected what pack_experts returned");
}

}  // namespace rbm::cpu
