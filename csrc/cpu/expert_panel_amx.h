// The products of expert_panel.h with the tile registers of AMX.
#pragma once

#include "amx.h"
#include "expert_panel.h"

namespace rbm::cpu {

// Adds the products of `valid` pairs with kColumns columns from `column` on to their sums, and to the gradients of
// their gates.
template <int kBytes, int kColumns>
RBM_INLINE void add_block(
    const Product<BFloat16, BFloat16Pair>& p, const Pair* pairs, int64_t valid, int64_t first_row, int64_t column,
    const float* numbers, float* sums) {
  using L = Lanes<float, kBytes>;
  constexpr int kVectors = kColumns / L::kCount, kTogether = 8;
  const auto out_of = [&](int64_t r) { return sums + (pairs[r].row - first_row) * p.to; };
  if (column + kColumns > p.to) {
    for (int64_t r = 0; r < valid; ++r) {
      add_products(p, pairs[r], numbers + r * kColumns, out_of(r), column, p.to - column);
    }
    return;
  }
  for (int64_t r = 0; r < valid; ++r) {
    const float gate = p.gates[pairs[r].index];
    float* const out = out_of(r) + column;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      typename L::Vector product, sum;
      L::load(product, numbers + r * kColumns + v * L::kCount);
      L::load(sum, out + v * L::kCount);
      sum += gate * product;
      L::store(out + v * L::kCount, sum);
    }
  }
  if (!p.with_gates) return;
  for (int64_t r = 0; r < valid; r += kTogether) {
    typename L::Vector totals[kTogether] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kTogether; ++i) {
      // Past the last row, its products again, which are not added.
      const int64_t row = std::min(r + i, valid - 1);
      const BFloat16* const x = p.x + pairs[row].row * p.x_stride + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename L::Vector product, number;
        L::load(product, numbers + row * kColumns + v * L::kCount);
        L::load(number, x + v * L::kCount);
        totals[i] += product * number;
      }
    }
    float of_rows[kTogether];
    L::template sum_lanes<kTogether>(totals, of_rows);
    const int64_t rows = std::min<int64_t>(kTogether, valid - r);
    for (int64_t i = 0; i < rows; ++i) p.grad_gates[pairs[r + i].index] += of_rows[i];
  }
}

// As multiply_panel.
template <int kBytes, typename Tiles>
RBM_INLINE void multiply_panel_amx_lanes(
    Tiles tiles, const Product<BFloat16, BFloat16Pair>& p, int64_t first_row, const PairsByExpert& by_expert,
    float* sums, LeftBlock* left) {
  const int64_t padded = padded_columns<float, kBytes>(p.to), all_steps = operands_of<BFloat16Pair>(p.from);
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const BFloat16Pair* const matrix = p.packed + e * all_steps * padded;
    const Pair* const all_pairs = by_expert.of(e);
    const int64_t count = by_expert.count(e);
    for (int64_t i = 0; i < count; ++i) add_bias(p, e, all_pairs[i], sums + (all_pairs[i].row - first_row) * p.to);
    for (int64_t first = 0; first < p.from; first += kInnerBlock) {
      const int64_t inner = std::min(kInnerBlock, p.from - first), steps = operands_of<BFloat16Pair>(inner);
      for (int64_t i = 0; i < count; i += kBlockRows) {
        const Pair* const pairs = all_pairs + i;
        const int64_t valid = std::min(kBlockRows, count - i);
        for (int64_t r = 0; r < valid; ++r) left->set(r, p.rows + pairs[r].row * p.row_stride + first, inner);
        for (int64_t column = 0; column < padded; column += kBlockColumns) {
          const int64_t width = std::min(kBlockColumns, padded - column);
          const BFloat16Pair* const panel = matrix + column * all_steps + first / 2 * width;
          const auto add = [&]<int kColumns>(int64_t offset, const float* numbers) __attribute__((always_inline)) {
            add_block<kBytes, kColumns>(p, pairs, valid, first_row, column + offset, numbers, sums);
          };
          left->multiply(tiles, valid, panel, width, steps, width, false, add);
        }
      }
    }
  }
}
RBM_DISPATCH(multiply_panel_amx)

}  // namespace rbm::cpu
