// The gradients of some of an expert's weights: tiles of sums in vector registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bfloat16_pairs.h"
#include "pairs.h"

namespace rbm::cpu {

// Rows processed at once, an even number: the part of them that a tile multiplies stays in the L1 cache.
constexpr int64_t kPieceRows = 128;

// The sums of gradients of experts: grad_weight_e = sum_b gate_be grad_b x_b^T, grad_bias_e = sum_b gate_be grad_b.
template <typename T>
struct WeightGrad {
  using Acc = Accumulation<T>;
  const T* x;
  int64_t x_stride;
  const T* grad;
  int64_t grad_stride;
  const Acc* gates;
  const PairsByExpert* pairs;
  int64_t in_features, out_features;
  T* grad_weight;  // [E, N, D]
  T* grad_bias;    // [E, N]
};

// Output features [begin, end) of one expert. Sums of the gradients' own type are the gradients.
template <typename T>
struct Slice {
  int64_t expert, begin, end;
  T *grad_weight, *grad_bias;     // [end - begin, D] and [end - begin]
  Accumulation<T>*weight, *bias;  // likewise, the sums
};

// For kRows output features, of which `valid` exist, and one panel of input features: grad_weight is set to, or
// increased by, the contribution of `steps` operands (rows or pairs of rows). `gated` and `panel` start at the first of
// those features, in the first row.
template <int kBytes, int kRows, int kVectors, typename Operand, typename Acc>
RBM_INLINE void sum_tile(
    const Operand* gated, int64_t gated_stride, const Operand* panel, int64_t steps, bool first, int64_t valid,
    int64_t width, Acc* grad_weight, int64_t features) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector sums[kRows][kVectors] = {};
  const Operand* left[kRows];
  for (int r = 0; r < kRows; ++r) left[r] = gated + std::min<int64_t>(r, valid - 1);
  product_tile<kBytes, kRows, kVectors, 1>(left, gated_stride, &panel, kVectors * L::kCount, steps, sums);
  alignas(kBytes) Acc numbers[kRows][kVectors * L::kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) L::store(numbers[r] + v * L::kCount, sums[r][v]);
  }
  for (int64_t r = 0; r < valid; ++r) {
    Acc* const target = grad_weight + r * features;
    if (first) {
      for (int64_t d = 0; d < width; ++d) target[d] = numbers[r][d];
    } else {
      for (int64_t d = 0; d < width; ++d) target[d] += numbers[r][d];
    }
  }
}

// The same for the panels of `columns` input features.
template <int kBytes, int kRows, typename Operand, typename Acc>
RBM_INLINE void sum_tiles(
    const Operand* gated, int64_t gated_stride, const Operand* panels, int64_t steps, bool first, int64_t valid,
    int64_t columns, Acc* grad_weight, int64_t features) {
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const int64_t padded = padded_columns<Acc, kBytes>(columns);
  int64_t d = 0;
  const auto sum = [&]<int kVectors>() __attribute__((always_inline)) {
    const int64_t width = std::min<int64_t>(kVectors * kCount, columns - d);
    sum_tile<kBytes, kRows, kVectors>(
        gated, gated_stride, panels + d * kPieceRows, steps, first, valid, width, grad_weight + d, features);
  };
  for (; d + kWidth <= padded; d += kWidth) sum.template operator()<tile_vectors<kBytes>()>();
  with_last_vectors<kBytes>((padded - d) / kCount, sum);
}

// pairs[n] = (gate grad[n], next_gate next[n]), or (gate grad[n], 0) if `next` is null; adds both to `bias_sum`.
template <int kBytes>
RBM_INLINE void gate_pairs(
    const BFloat16* grad, const BFloat16* next, float gate, float next_gate, int64_t count, float* bias_sum,
    BFloat16Pair* pairs) {
  using L = Lanes<float, kBytes>;
  int64_t n = 0;
  for (; n + L::kCount <= count; n += L::kCount) {
    typename L::Vector first, second{}, sum;
    L::load(first, grad + n);
    L::load(sum, bias_sum + n);
    first *= gate;
    if (next != nullptr) {
      L::load(second, next + n);
      second *= next_gate;
    }
    L::store(bias_sum + n, sum + first + second);
    const Words<kBytes> bits = rounded_bits<kBytes>(first) | rounded_bits<kBytes>(second) << 16;
    std::memcpy(pairs + n, &bits, sizeof(bits));
  }
  for (; n < count; ++n) {
    const float first = gate * static_cast<float>(grad[n]);
    const float second = next == nullptr ? 0 : next_gate * static_cast<float>(next[n]);
    bias_sum[n] = bias_sum[n] + first + second;
    pairs[n].bits = bfloat16_bits(first) | static_cast<uint32_t>(bfloat16_bits(second)) << 16;
  }
}

// Multiplies the gradients of a piece by their gates, into `gated` [steps, the slice's outputs, `stride` apart], and
// adds them to the slice's biases. `bias_sum` has room for those of the piece: a sum of all rows in their order would
// have an error that grows with their number.
template <int kBytes, typename T, typename Operand>
RBM_INLINE void gate_rows(
    const WeightGrad<T>& w, const Slice<T>& slice, const Pair* pairs, int64_t count, int64_t stride,
    Accumulation<T>* bias_sum, Operand* gated) {
  using Acc = Accumulation<T>;
  const int64_t outputs = slice.end - slice.begin;
  const auto grad_of = [&](int64_t i) { return w.grad + pairs[i].row * w.grad_stride + slice.begin; };
  std::fill_n(bias_sum, outputs, Acc(0));
  for (int64_t i = 0; i < count; i += kNumbersOf<Operand>) {
    const Acc gate = w.gates[pairs[i].index];
    const T* const grad = grad_of(i);
    Operand* const row = gated + i / kNumbersOf<Operand> * stride;
    if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
      // The products are rounded to bfloat16 for the tile; the bias sums them before rounding.
      const bool has_next = i + 1 < count;
      const Acc next_gate = has_next ? w.gates[pairs[i + 1].index] : Acc(0);
      gate_pairs<kBytes>(grad, has_next ? grad_of(i + 1) : nullptr, gate, next_gate, outputs, bias_sum, row);
    } else {
      for (int64_t n = 0; n < outputs; ++n) {
        row[n] = gate * static_cast<Acc>(grad[n]);
        bias_sum[n] += row[n];
      }
    }
  }
  for (int64_t n = 0; n < outputs; ++n) slice.bias[n] += bias_sum[n];
}

// Copies features [first, first + filled) of `count` rows into a panel of `width` columns, with zeros past the last
// one.
template <typename T, typename Operand>
RBM_INLINE void panel_of_rows(
    const WeightGrad<T>& w, const Pair* pairs, int64_t count, int64_t first, int64_t filled, int64_t width,
    Operand* panel) {
  constexpr int64_t kNumbers = kNumbersOf<Operand>;
  for (int64_t i = 0; i < count; i += kNumbers) {
    const T* const x = w.x + pairs[i].row * w.x_stride + first;
    Operand* const row = panel + i / kNumbers * width;
    for (int64_t next = i + kPrefetchRows; next < std::min(i + kPrefetchRows + kNumbers, count); ++next) {
      prefetch(w.x + pairs[next].row * w.x_stride + first, filled);
    }
    if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
      pair_rows(x, i + 1 < count ? w.x + pairs[i + 1].row * w.x_stride + first : nullptr, filled, row);
    } else {
      for (int64_t c = 0; c < filled; ++c) row[c] = static_cast<Operand>(x[c]);
    }
    std::fill_n(row + filled, width - filled, Operand{});
  }
}

// The sums of a slice. `gated` has room for [kPieceRows, outputs of the slice], `bias_sum` for those outputs, and
// `panels` for [kPieceRows, features, padded to whole vectors].
template <int kBytes, typename T, typename Operand>
RBM_INLINE void sum_slice_lanes(
    const WeightGrad<T>& w, const Slice<T>& slice, Operand* gated, Accumulation<T>* bias_sum, Operand* panels) {
  using Acc = Accumulation<T>;
  constexpr int64_t kWidth = panel_width<Acc, kBytes>();
  const int64_t outputs = slice.end - slice.begin, features = w.in_features;
  const int64_t padded = padded_columns<Acc, kBytes>(features), pairs = w.pairs->count(slice.expert);
  std::fill_n(slice.bias, outputs, Acc(0));
  if (pairs == 0) std::fill_n(slice.weight, outputs * features, Acc(0));

  for (int64_t first = 0; first < pairs; first += kPieceRows) {
    const int64_t count = std::min(kPieceRows, pairs - first), steps = operands_of<Operand>(count);
    const Pair* const piece = w.pairs->of(slice.expert) + first;
    gate_rows<kBytes>(w, slice, piece, count, outputs, bias_sum, gated);
    for (int64_t d = 0; d < padded; d += kWidth) {
      const int64_t width = std::min(kWidth, padded - d);
      panel_of_rows(w, piece, count, d, std::min(width, features - d), width, panels + d * kPieceRows);
    }
    // As many panels as fill the L1 cache. Each row of a gradient is written in pieces of their width.
    const int64_t together = kPieceRows / steps * kWidth;
    for (int64_t d = 0; d < features; d += together) {
      const int64_t columns = std::min(together, features - d);
      const auto sum = [&]<int kRows>(int64_t n) __attribute__((always_inline)) {
        sum_tiles<kBytes, kRows>(
            gated + n, outputs, panels + d * kPieceRows, steps, first == 0, std::min<int64_t>(kRows, outputs - n),
            columns, slice.weight + n * features + d, features);
      };
      int64_t n = 0;
      for (; n + kTileRows / 2 < outputs; n += kTileRows) sum.template operator()<kTileRows>(n);
      if (n < outputs) sum.template operator()<kTileRows / 2>(n);
    }
  }
}
RBM_DISPATCH(sum_slice)

}  // namespace rbm::cpu
