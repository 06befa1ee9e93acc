// The products of expert_panel.h with the tile registers of AMX.
#pragma once

#include "amx.h"
#include "expert_panel.h"

namespace rbm::cpu {

// Sums for the gates of a block of rows, per lane.
template <int kBytes>
using GateLanes = typename Lanes<float, kBytes>::Vector[kBlockRows];

// Adds products of pairs to their sums, and to those for their gates.
template <int kBytes, int kColumns, bool kWithGates>
RBM_INLINE void add_block(
    const Product<BFloat16, BFloat16Pair>& p, const Task<float, BFloat16Pair>& task, const Pair* pairs,
    const Products<kColumns>& of, typename Lanes<float, kBytes>::Vector* gate_lanes) {
  using L = Lanes<float, kBytes>;
  constexpr int kVectors = kColumns / L::kCount;
  if (of.column + kColumns > p.to) {
    for (int64_t r = of.first; r < of.last; ++r) {
      add_products(p, task, pairs[r], of.numbers + r * kColumns, of.column, p.to - of.column);
    }
    return;
  }
  for (int64_t r = of.first; r < of.last; ++r) {
    const float gate = p.gates[pairs[r].index];
    float* const out = task.sums_of(pairs[r]) + of.column - task.begin;
    const BFloat16* const x = p.x + pairs[r].row * p.x_stride + of.column;
    typename L::Vector total{};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      typename L::Vector product, sum;
      L::load(product, of.numbers + r * kColumns + v * L::kCount);
      L::load(sum, out + v * L::kCount);
      sum += gate * product;
      L::store(out + v * L::kCount, sum);
      if constexpr (kWithGates) {
        typename L::Vector number;
        L::load(number, x + v * L::kCount);
        total += product * number;
      }
    }
    if constexpr (kWithGates) gate_lanes[r] += total;
  }
}

// Adds the lanes' sums of `valid` pairs to those for their gates, and clears them.
template <int kBytes>
RBM_INLINE void add_gate_lanes(
    const Task<float, BFloat16Pair>& task, const Pair* pairs, int64_t valid, GateLanes<kBytes>& gate_lanes) {
  constexpr int64_t kTogether = 8;
  for (int64_t r = 0; r < valid; r += kTogether) {
    typename Lanes<float, kBytes>::Vector totals[kTogether];
    for (int64_t i = 0; i < kTogether; ++i) {
      totals[i] = gate_lanes[r + i];
      gate_lanes[r + i] = typename Lanes<float, kBytes>::Vector{};
    }
    float of_rows[kTogether];
    Lanes<float, kBytes>::template sum_lanes<kTogether>(totals, of_rows);
    for (int64_t i = 0; i < std::min(kTogether, valid - r); ++i) task.gate_sums[pairs[r + i].index] += of_rows[i];
  }
}

// As multiply_panel.
template <int kBytes, typename Tiles>
RBM_INLINE void multiply_panel_amx_lanes(
    Tiles tiles, const Product<BFloat16, BFloat16Pair>& p, const Task<float, BFloat16Pair>& task, LeftBlock* left) {
  GateLanes<kBytes> gate_lanes = {};
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const Pair* const all_pairs = task.pairs->of(e);
    const int64_t count = task.pairs->count(e);
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) add_bias<kBytes>(p, task, e, all_pairs[i]);
    each_part<kBytes>(p, task, e, [&](const Part<BFloat16Pair>& part) __attribute__((always_inline)) {
      const int64_t end = part.begin + padded_columns<float, kBytes>(part.end - part.begin);
      const int64_t steps = operands_of<BFloat16Pair>(part.inner);
      for (int64_t i = 0; i < count; i += kBlockRows) {
        const Pair* const pairs = all_pairs + i;
        const int64_t valid = std::min(kBlockRows, count - i);
        for (int64_t r = 0; r < valid; ++r) {
          left->set(r, p.rows + pairs[r].row * p.row_stride + part.first, part.inner);
        }
        const auto panel = [&](int64_t column, int64_t width) { return part.panel(column, width); };
        const auto add = [&]<int kColumns>(const Products<kColumns>& of) __attribute__((always_inline)) {
          if (p.with_gates) {
            add_block<kBytes, kColumns, true>(p, task, pairs, of, gate_lanes);
          } else {
            add_block<kBytes, kColumns, false>(p, task, pairs, of, gate_lanes);
          }
        };
        left->multiply(tiles, valid, part.begin, end, steps, false, panel, add);
        if (p.with_gates) add_gate_lanes<kBytes>(task, pairs, valid, gate_lanes);
      }
    });
  }
}
RBM_DISPATCH(multiply_panel_amx)

}  // namespace rbm::cpu
