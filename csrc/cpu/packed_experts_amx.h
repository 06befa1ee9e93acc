// The products of packed_experts.h with the tile registers of AMX.
#pragma once

#include "amx.h"
#include "packed_experts.h"

namespace rbm::cpu {

// Operands of the features that are multiplied together: a block of rows stays in the L1 cache.
constexpr int64_t kAmxInner = 256;
// Numbers of weights that stay in the L2 cache, of 2 MiB. If there are more, blocks of rows are multiplied with so many
// columns (512 KiB) in turn.
constexpr int64_t kAmxCached = 1 << 20, kAmxColumns = 8 * kBlockColumns;

// The pairs of an expert, kAmxInner operands of the features from operand `first` on, the columns [begin, end).
// `is_new` tells that these weights are probably in no cache.
template <int kBytes, typename Tiles>
RBM_INLINE void multiply_columns(
    Tiles tiles, const PackedProduct<BFloat16, BFloat16Pair>& p, int64_t expert, int64_t first, int64_t begin,
    int64_t end, bool is_new, LeftBlock* left) {
  using L = Lanes<float, kBytes>;
  const int64_t features = p.experts.features, height = packed_rows<BFloat16Pair>(features);
  const BFloat16* const matrix = p.experts.values + expert * height * padded_columns<float, kBytes>(p.experts.outputs);
  const int64_t inner = std::min(2 * kAmxInner, features - 2 * first), steps = operands_of<BFloat16Pair>(inner);
  const int64_t count = p.pairs->count(expert);
  const bool begins = p.own_sums && first == 0;  // nothing else is added to these sums
  for (int64_t i = 0; i < count; i += kBlockRows) {
    const Pair* const pairs = p.pairs->of(expert) + i;
    const int64_t valid = std::min(kBlockRows, count - i);
    for (int64_t r = 0; r < valid; ++r) left->set(r, p.row_of(pairs[r]) + 2 * first, inner);
    for (int64_t column = begin; column < end; column += kBlockColumns) {
      const int64_t width = std::min(kBlockColumns, end - column);
      const BFloat16* const biases = matrix + column * height;
      const auto* const panel = reinterpret_cast<const BFloat16Pair*>(biases + width) + first * width;
      const auto add = [&]<int kColumns>(const Products<kColumns>& of) __attribute__((always_inline)) {
        constexpr int kVectors = kColumns / L::kCount;
        typename L::Vector bias[kVectors] = {};
        for (int v = 0; v < kVectors && first == 0; ++v) L::load(bias[v], biases + of.column + v * L::kCount);
        for (int64_t r = 0; r < valid; ++r) {
          const float gate = p.gates[pairs[r].index];
          const float* const numbers = of.numbers + r * kColumns;
          float* const sums = p.sums_of(pairs[r]) + column + of.column;
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            typename L::Vector product, sum;
            L::load(product, numbers + v * L::kCount);
            if (begins) {
              sum = gate * (product + bias[v]);
            } else {
              L::load(sum, sums + v * L::kCount);
              sum += gate * (product + bias[v]);
            }
            L::store(sums + v * L::kCount, sum);
          }
        }
      };
      left->multiply(tiles, valid, panel, width, steps, width, is_new && i == 0, add);
    }
  }
}

// As multiply_packed. All numbers of rows are multiplied so, because the instruction adds in another order than
// multiply_packed.
template <int kBytes, typename Tiles>
RBM_INLINE void multiply_packed_amx_lanes(
    Tiles tiles, const PackedProduct<BFloat16, BFloat16Pair>& p, int64_t first_panel, int64_t last_panel,
    LeftBlock* left) {
  const int64_t features = p.experts.features, padded = padded_columns<float, kBytes>(p.experts.outputs);
  const int64_t begin = first_panel * kBlockColumns, end = std::min(last_panel * kBlockColumns, padded);
  const bool is_large = p.experts.num_experts * features * padded > kAmxCached;
  if (!p.own_sums) p.clear(begin, end);
  for (int64_t e = p.first_expert; e < p.last_expert; ++e) {
    const int64_t columns = is_large && p.pairs->count(e) > kBlockRows ? kAmxColumns : end - begin;
    for (int64_t first = 0; first == 0 || 2 * first < features; first += kAmxInner) {
      for (int64_t column = begin; column < end; column += columns) {
        multiply_columns<kBytes>(tiles, p, e, first, column, std::min(column + columns, end), is_large, left);
      }
    }
  }
}
RBM_DISPATCH(multiply_packed_amx)

}  // namespace rbm::cpu
