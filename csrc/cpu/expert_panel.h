// The products of one thread's rows and columns with their experts: tiles of sums in vector registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bfloat16_pairs.h"
#include "pairs.h"

namespace rbm::cpu {

// Block of the inner dimension: this part of one expert's weights stays in a core's own cache.
constexpr int64_t kInnerBlock = 512;
// Operands that are packed together, just before they are multiplied: 512 KiB.
constexpr int64_t kPackedTogether = 1 << 17;

// out_b = sum_j gate_bj (A_e rows_b + bias_e), e = experts[b, j]. Forward: rows are x, A_e is W_e. Backward: rows are
// grad, A_e is the transpose of W_e, and the gradient of the gates is optional:
// <A_e rows_b, x_b> + <rows_b, bias_e>. Tiles read rows and weights as Operand: the type that rows of T are summed in,
// or pairs of bfloat16.
//
// Either all matrices were packed before, or each thread packs what it multiplies next.
template <typename T, typename Operand = Accumulation<T>>
struct Product {
  using Acc = Accumulation<T>;
  const T* rows;
  int64_t row_stride;
  Unpacked<T> matrices;   // A_e transposed, [E] matrices [from, to]
  const Operand* packed;  // the same packed, or null
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

// What a thread computes at once: some rows, and the columns [begin, end), which start at a panel.
template <typename Acc, typename Operand>
struct Task {
  const PairsByExpert* pairs;
  int64_t first_row, begin, end;
  Acc* sums;  // [rows, end - begin], at distance `stride`
  int64_t stride;
  Acc* gate_sums;  // [B, k]: the gradients of the gates, or the parts of them from these columns
  Operand* room;   // for kPackedTogether operands, unless all are packed

  RBM_INLINE Acc* sums_of(const Pair& pair) const { return sums + (pair.row - first_row) * stride; }
};

// `inner` elements of the inner dimension, and the columns [begin, end), of one expert's matrix.
template <typename Operand>
struct Part {
  int64_t begin, end, first, inner;
  const Operand* packed;     // the panel at `begin`
  int64_t height, position;  // rows of the packed panels, and the one of element `first`

  RBM_INLINE const Operand* panel(int64_t column, int64_t width) const {
    return packed + (column - begin) * height + position * width;
  }
};

template <typename T, typename Operand>
inline constexpr int kVectorBytesFor<Product<T, Operand>> = kVectorBytesFor<Operand*>;

// Adds the products of one pair with `width` columns from `column` on to its sums, and to the sum for its gate.
template <typename T, typename Operand>
RBM_INLINE void add_products(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, const Pair& pair,
    const Accumulation<T>* products, int64_t column, int64_t width) {
  using Acc = Accumulation<T>;
  const Acc gate = p.gates[pair.index];
  Acc* const out = task.sums_of(pair) + column - task.begin;
  for (int64_t c = 0; c < width; ++c) out[c] += gate * products[c];
  if (!p.with_gates) return;
  const T* const x = p.x + pair.row * p.x_stride + column;
  Acc total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t c = 0; c < width; ++c) total += products[c] * static_cast<Acc>(x[c]);
  task.gate_sums[pair.index] += total;
}

// As the end of multiply_tile, for a panel that is wider than the remaining columns. Products are read back from
// memory, so that these loops are compiled once for all rows of a tile: one copy per row takes long to compile.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand, typename Vector>
RBM_INLINE void add_narrow(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, const Pair* pairs, int64_t valid,
    const Vector (&products)[kRows][kVectors], int64_t column) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  alignas(kBytes) Acc numbers[kRows][kVectors * L::kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) L::store(numbers[r] + v * L::kCount, products[r][v]);
  }
  for (int64_t r = 0; r < valid; ++r) add_products(p, task, pairs[r], numbers[r], column, p.to - column);
}

// Adds the products of kRows rows and the panel of columns at `column` to `outs`, whose first column is that of the
// task, and to the sums for their gates.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand>
RBM_INLINE void multiply_tile(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, const Part<Operand>& part,
    const Pair* pairs, int64_t valid, const Operand* const* rows, Accumulation<T>* const* outs, int64_t column) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  constexpr int64_t kWidth = kVectors * L::kCount;
  const Operand* const panel = part.panel(column, kWidth);
  typename L::Vector products[kRows][kVectors] = {};
  product_tile<kBytes, kRows, kVectors, 1>(rows, 1, &panel, kWidth, operands_of<Operand>(part.inner), products);
  if (p.to - column < kWidth) return add_narrow<kBytes>(p, task, pairs, valid, products, column);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r < valid) {
      const Acc gate = p.gates[pairs[r].index];
      Acc* const out = outs[r] + column - task.begin;
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
        typename L::Vector numbers;
        L::load(numbers, x + v * L::kCount);
        totals[r] += products[r][v] * numbers;
      }
    }
  }
  Acc sums[8];
  L::template sum_lanes<8>(totals, sums);
  for (int r = 0; r < valid; ++r) task.gate_sums[pairs[r].index] += sums[r];
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

// The first `valid` of kRows pairs of an expert, with a part of its matrix.
template <int kBytes, int kRows, typename T, typename Operand>
RBM_INLINE void multiply_rows(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, const Part<Operand>& part,
    const Pair* pairs, int64_t valid, Operand* converted) {
  using Acc = Accumulation<T>;
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const Operand* rows[kRows];
  Acc* outs[kRows];
  for (int r = 0; r < kRows; ++r) {
    // A partial tile repeats its last row, whose extra sums are discarded.
    const Pair& pair = pairs[std::min<int64_t>(r, valid - 1)];
    rows[r] = left_side(p.rows + pair.row * p.row_stride + part.first, part.inner, converted + r * kInnerBlock);
    outs[r] = task.sums_of(pair);
  }
  const int64_t end = part.begin + padded_columns<Acc, kBytes>(part.end - part.begin);
  int64_t column = part.begin;
  for (; column + kWidth <= end; column += kWidth) {
    multiply_tile<kBytes, kRows, tile_vectors<kBytes>()>(p, task, part, pairs, valid, rows, outs, column);
  }
  with_last_vectors<kBytes>((end - column) / kCount, [&]<int kVectors>() __attribute__((always_inline)) {
    multiply_tile<kBytes, kRows, kVectors>(p, task, part, pairs, valid, rows, outs, column);
  });
}

// out[i] += factor * numbers[i].
template <int kBytes, typename T>
RBM_INLINE void add_multiple(Accumulation<T> factor, const T* numbers, int64_t count, Accumulation<T>* out) {
  using L = Lanes<Accumulation<T>, kBytes>;
  int64_t i = 0;
  for (; i + L::kCount <= count; i += L::kCount) {
    typename L::Vector number, sum;
    L::load(number, numbers + i);
    L::load(sum, out + i);
    L::store(out + i, sum + factor * number);
  }
  for (; i < count; ++i) out[i] += factor * static_cast<Accumulation<T>>(numbers[i]);
}

// The inner product of a and b. Four sums at once, because a sum has to wait for its last product.
template <int kBytes, typename T>
RBM_INLINE Accumulation<T> inner_product(const T* a, const T* b, int64_t count) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  constexpr int kSums = 4;
  typename L::Vector sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * L::kCount <= count; i += kSums * L::kCount) {
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      typename L::Vector left, right;
      L::load(left, a + i + s * L::kCount);
      L::load(right, b + i + s * L::kCount);
      sums[s] += left * right;
    }
  }
  Acc totals[kSums], total = 0;
  L::template sum_lanes<kSums>(sums, totals);
  for (; i < count; ++i) total += static_cast<Acc>(a[i]) * static_cast<Acc>(b[i]);
  for (const Acc sum : totals) total += sum;
  return total;
}

// Adds the contribution of the bias to the rows, or to the gradient of their gates.
template <int kBytes, typename T, typename Operand>
RBM_INLINE void add_bias(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, int64_t expert, const Pair& pair) {
  if (p.bias == nullptr) return;
  if (!p.with_gates) {
    const T* const bias = p.bias + expert * p.to + task.begin;
    add_multiple<kBytes>(p.gates[pair.index], bias, task.end - task.begin, task.sums_of(pair));
  } else if (task.begin == 0) {
    const T* const grad = p.rows + pair.row * p.row_stride;
    task.gate_sums[pair.index] += inner_product<kBytes>(grad, p.bias + expert * p.from, p.from);
  }
}

// Calls multiply(part) for all parts of an expert's matrix that a task needs.
template <int kBytes, typename T, typename Operand, typename Multiply>
RBM_INLINE void each_part(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, int64_t expert,
    const Multiply& multiply) {
  using Acc = Accumulation<T>;
  constexpr int64_t kWidth = panel_width<Acc, kBytes>(), kNumbers = kNumbersOf<Operand>;
  const int64_t height = operands_of<Operand>(p.from), padded = padded_columns<Acc, kBytes>(p.to);
  const bool is_packed = p.packed != nullptr;
  const int64_t columns = is_packed
                              ? task.end - task.begin
                              : kPackedTogether / operands_of<Operand>(std::min(kInnerBlock, p.from)) / kWidth * kWidth;
  for (int64_t begin = task.begin; begin < task.end; begin += columns) {
    const int64_t end = std::min(begin + columns, task.end);
    for (int64_t first = 0; first < p.from; first += kInnerBlock) {
      const int64_t inner = std::min(kInnerBlock, p.from - first);
      if (is_packed) {
        const Operand* const matrix = p.packed + expert * height * padded;
        multiply(Part<Operand>{begin, end, first, inner, matrix + begin * height, height, first / kNumbers});
      } else {
        const Unpacked<T>& m = p.matrices;
        const T* const values = m.values + expert * m.matrix_stride + first * m.row_stride + begin * m.column_stride;
        pack_matrix(
            Unpacked<T>{values, 1, inner, end - begin, m.matrix_stride, m.row_stride, m.column_stride}, task.room);
        multiply(Part<Operand>{begin, end, first, inner, task.room, operands_of<Operand>(inner), 0});
      }
    }
  }
}

// Adds the products of a task's pairs to its sums, and their biases.
template <int kBytes, typename T, typename Operand>
RBM_INLINE void multiply_panel_lanes(
    const Product<T, Operand>& p, const Task<Accumulation<T>, Operand>& task, Operand* converted) {
  constexpr int kRows = kTileRows;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const Pair* const pairs = task.pairs->of(e);
    const int64_t count = task.pairs->count(e);
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) add_bias<kBytes>(p, task, e, pairs[i]);
    each_part<kBytes>(p, task, e, [&](const Part<Operand>& part) __attribute__((always_inline)) {
      int64_t i = 0;
      for (; i + kRows / 2 < count; i += kRows) {
        multiply_rows<kBytes, kRows>(p, task, part, pairs + i, std::min<int64_t>(kRows, count - i), converted);
      }
      if (i < count) multiply_rows<kBytes, kRows / 2>(p, task, part, pairs + i, count - i, converted);
    });
  }
}
RBM_DISPATCH(multiply_panel)

}  // namespace rbm::cpu
