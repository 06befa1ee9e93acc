// The products of expert_panel.h with the tile registers of AMX.
#pragma once

#include "amx.h"
#include "expert_panel.h"

namespace rbm::cpu {

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
          left->multiply(
              tiles, valid, panel, width, steps, width,
              [&](int64_t offset, int64_t columns, const float* numbers) __attribute__((always_inline)) {
                const int64_t from = column + offset, filled = std::min(columns, p.to - from);
                for (int64_t r = 0; r < valid; ++r) {
                  float* const out = sums + (pairs[r].row - first_row) * p.to;
                  add_products(p, pairs[r], numbers + r * columns, out, from, filled);
                }
              });
        }
      }
    }
  }
}
RBM_DISPATCH(multiply_panel_amx)

}  // namespace rbm::cpu
