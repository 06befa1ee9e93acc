// The products of one thread's rows with their experts: tiles of sums in vector registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bfloat16_pairs.h"
#include "pairs.h"

namespace rbm::cpu {

// Block of the inner dimension: this part of one expert's weights stays in a core's own cache.
constexpr int64_t kInnerBlock = 512;

// out_b = sum_j gate_bj (A_e rows_b + bias_e), e = experts[b, j]. Forward: rows are x, A_e is W_e. Backward: rows are
// grad, A_e is the transpose of W_e, and the gradient of the gates is optional:
// <A_e rows_b, x_b> + <rows_b, bias_e>. Tiles read rows and weights as Operand: the type that rows of T are summed in,
// or pairs of bfloat16.
template <typename T, typename Operand = Accumulation<T>>
struct Product {
  using Acc = Accumulation<T>;
  const T* rows;
  int64_t row_stride;
  const Operand* packed;  // A_e transposed, [E] matrices [from, to]
  const T* bias;          // [E, N], or null
  const Acc* gates;
  const int32_t* experts;
  int64_t count, from, to, num_experts, top_k;
  bool with_gates;  // whether to compute the gradient of the gates, and the three members below are set
  const T* x;
  int64_t x_stride;
  Acc* grad_gates;  // [B, k]
  T* out;           // [B, to], contiguous
};

template <typename T, typename Operand>
inline constexpr int kVectorBytesFor<Product<T, Operand>> = kVectorBytesFor<Operand*>;

// Adds the products of one pair with `width` columns to `out`, and to the gradient of its gate.
template <typename T, typename Operand>
RBM_INLINE void add_products(
    const Product<T, Operand>& p, const Pair& pair, const Accumulation<T>* products, Accumulation<T>* out,
    int64_t column, int64_t width) {
  using Acc = Accumulation<T>;
  const Acc gate = p.gates[pair.index];
  for (int64_t c = 0; c < width; ++c) out[column + c] += gate * products[c];
  if (!p.with_gates) return;
  const T* const x = p.x + pair.row * p.x_stride + column;
  Acc total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t c = 0; c < width; ++c) total += products[c] * static_cast<Acc>(x[c]);
  p.grad_gates[pair.index] += total;
}

// As the end of multiply_tile, for a panel that is wider than the remaining columns. Products are read back from
// memory, so that these loops are compiled once for all rows of a tile: one copy per row takes long to compile.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand, typename Vector>
RBM_INLINE void add_narrow(
    const Product<T, Operand>& p, const Pair* pairs, int64_t valid, const Vector (&products)[kRows][kVectors],
    Accumulation<T>* const* outs, int64_t column) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  alignas(kBytes) Acc numbers[kRows][kVectors * L::kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) L::store(numbers[r] + v * L::kCount, products[r][v]);
  }
  for (int64_t r = 0; r < valid; ++r) add_products(p, pairs[r], numbers[r], outs[r], column, p.to - column);
}

// Adds the products of kRows rows and one panel of columns to `outs`, starting at `column`, and to the gradients of
// their gates.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand>
RBM_INLINE void multiply_tile(
    const Product<T, Operand>& p, const Pair* pairs, int64_t valid, const Operand* const* rows,
    Accumulation<T>* const* outs, const Operand* panel, int64_t column, int64_t steps) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  constexpr int64_t kWidth = kVectors * L::kCount;
  typename L::Vector products[kRows][kVectors] = {};
  product_tile<kBytes, kRows, kVectors, 1>(rows, 1, &panel, kWidth, steps, products);
  if (p.to - column < kWidth) return add_narrow<kBytes>(p, pairs, valid, products, outs, column);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r < valid) {
      const Acc gate = p.gates[pairs[r].index];
      Acc* const out = outs[r] + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename L::Vector sum;
        L::load(sum, out + v * L::kCount);
        sum += gate * products[r][v];
        L::store(out + v * L::kCount, sum);
      }
    }
  }
  if (!p.with_gates) return;
  typename L::Vector totals[8] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r < valid) {
      const T* const x = p.x + pairs[r].row * p.x_stride + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename L::Vector part;
        L::load(part, x + v * L::kCount);
        totals[r] += products[r][v] * part;
      }
    }
  }
  Acc sums[8];
  L::template sum_lanes<8>(totals, sums);
  for (int r = 0; r < valid; ++r) p.grad_gates[pairs[r].index] += sums[r];
}

// The left side of a tile: `count` elements of a row, in place if possible, otherwise converted into `copy`.
template <typename Operand, typename T>
RBM_INLINE const Operand* left_side(const T* source, int64_t count, Operand* copy) {
  if constexpr (std::is_same_v<T, Operand>) {
    return source;
  } else if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
    if (count % 2 == 0) return reinterpret_cast<const BFloat16Pair*>(source);
    pair_neighbours(source, count, copy);
  } else {
    for (int64_t i = 0; i < count; ++i) copy[i] = static_cast<Operand>(source[i]);
  }
  return copy;
}

// The first `valid` of kRows pairs of one expert; `inner` elements of the inner dimension starting at `first`; all
// columns.
template <int kBytes, int kRows, typename T, typename Operand>
RBM_INLINE void multiply_rows(
    const Product<T, Operand>& p, int64_t expert, const Pair* pairs, int64_t valid, int64_t first, int64_t inner,
    int64_t first_row, Accumulation<T>* sums, Operand* converted) {
  using Acc = Accumulation<T>;
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const Operand* rows[kRows];
  Acc* outs[kRows];
  for (int r = 0; r < kRows; ++r) {
    // A partial tile repeats its last row, whose extra sums are discarded.
    const int64_t row = pairs[std::min<int64_t>(r, valid - 1)].row;
    rows[r] = left_side(p.rows + row * p.row_stride + first, inner, converted + r * kInnerBlock);
    outs[r] = sums + (row - first_row) * p.to;
  }
  const int64_t padded = padded_columns<Acc, kBytes>(p.to);
  const int64_t all_steps = operands_of<Operand>(p.from), first_step = first / kNumbersOf<Operand>;
  const int64_t steps = operands_of<Operand>(inner);
  const Operand* const matrix = p.packed + expert * all_steps * padded;
  int64_t column = 0;
  for (; column + kWidth <= padded; column += kWidth) {
    const Operand* const panel = matrix + column * all_steps + first_step * kWidth;
    multiply_tile<kBytes, kRows, tile_vectors<kBytes>()>(p, pairs, valid, rows, outs, panel, column, steps);
  }
  const Operand* const panel = matrix + column * all_steps + first_step * (padded - column);
  with_last_vectors<kBytes>((padded - column) / kCount, [&]<int kVectors>() __attribute__((always_inline)) {
    multiply_tile<kBytes, kRows, kVectors>(p, pairs, valid, rows, outs, panel, column, steps);
  });
}

// Adds the contribution of the bias to the rows, or to the gradient of their gates.
template <typename T, typename Operand>
RBM_INLINE void add_bias(const Product<T, Operand>& p, int64_t expert, const Pair& pair, Accumulation<T>* out) {
  using Acc = Accumulation<T>;
  if (p.bias == nullptr) return;
  if (!p.with_gates) {
    const T* const bias = p.bias + expert * p.to;
    const Acc gate = p.gates[pair.index];
    for (int64_t n = 0; n < p.to; ++n) out[n] += gate * static_cast<Acc>(bias[n]);
  } else {
    const T* const bias = p.bias + expert * p.from;
    const T* const grad = p.rows + pair.row * p.row_stride;
    Acc total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t n = 0; n < p.from; ++n) total += static_cast<Acc>(grad[n]) * static_cast<Acc>(bias[n]);
    p.grad_gates[pair.index] += total;
  }
}

// Adds the products of the pairs of a panel, whose first row is `first_row`, to its sums, and their biases.
template <int kBytes, typename T, typename Operand>
RBM_INLINE void multiply_panel_lanes(
    const Product<T, Operand>& p, int64_t first_row, const PairsByExpert& by_expert, Accumulation<T>* sums,
    Operand* converted) {
  constexpr int kRows = kTileRows;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const Pair* const pairs = by_expert.of(e);
    const int64_t count = by_expert.count(e);
    for (int64_t i = 0; i < count; ++i) add_bias(p, e, pairs[i], sums + (pairs[i].row - first_row) * p.to);
    for (int64_t first = 0; first < p.from; first += kInnerBlock) {
      const int64_t inner = std::min(kInnerBlock, p.from - first);
      int64_t i = 0;
      for (; i + kRows / 2 < count; i += kRows) {
        multiply_rows<kBytes, kRows>(
            p, e, pairs + i, std::min<int64_t>(kRows, count - i), first, inner, first_row, sums, converted);
      }
      if (i < count) {
        multiply_rows<kBytes, kRows / 2>(p, e, pairs + i, count - i, first, inner, first_row, sums, converted);
      }
    }
  }
}
RBM_DISPATCH(multiply_panel)

}  // namespace rbm::cpu
