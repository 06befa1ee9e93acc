// The expert matmul for few rows: inner products directly from x and weight. Nothing is gathered, and the only
// temporaries are the sums of a few columns. Each thread has its own columns, and an expert's weights are read once for
// all rows that use it.
#pragma once

#include <cstdint>

#include "bfloat16_pairs.h"
#include "pairs.h"

namespace rbm::cpu {

// Average number of pairs per expert up to which inner products are faster than packing the weights and multiplying
// tiles. Packing an expert takes as long as inner products lose to tiles over this many pairs.
constexpr int64_t kFewPairs = 16;
// The same for tiles of bfloat16 pairs, which are faster; measured on an EPYC (Zen 4).
constexpr int64_t kFewBFloat16Pairs = 2;

template <typename T>
bool are_few(int64_t rows, int64_t top_k, int64_t num_experts) {
  const bool has_pairs = std::is_same_v<T, BFloat16> && has_bfloat16_products();
  return rows * top_k <= (has_pairs ? kFewBFloat16Pairs : kFewPairs) * num_experts;
}

template <typename T>
struct FewRows {
  using Acc = Accumulation<T>;
  const T* x;
  int64_t row_stride;
  const T* weight;   // [E, N, D], contiguous
  const T* bias;     // [E, N], contiguous, or null
  const Acc* gates;  // [B, k]
  const PairsByExpert* pairs;
  int64_t rows, top_k, in_features, out_features, num_experts;
  T* y;  // [B, N], contiguous
};

template <typename T>
void multiply_few_rows(const FewRows<T>& f);

}  // namespace rbm::cpu
