// The products of packed_experts.h with the tile registers of AMX.
#pragma once

#include "activation.h"
#include "amx.h"
#include "packed_experts.h"

namespace rbm::cpu {

// Operands of the features that are multiplied together: a block of rows stays in the L1 cache.
constexpr int64_t kAmxInner = 256;
// Numbers of weights that stay in the L2 cache, of 2 MiB. If there are more, blocks of rows are multiplied with so many
// columns (512 KiB) in turn.
constexpr int64_t kAmxCached = 1 << 20, kAmxColumns = 8 * kBlockColumns;

// Bytes of weights that are requested ahead at most: they share the L2 cache with those that are multiplied.
constexpr int64_t kMostUpcoming = 1 << 19;

// The matrix of an expert. A panel has kBlockColumns columns, the last one perhaps fewer: its biases, then its weights.
struct PackedMatrix {
  const BFloat16* values;
  int64_t height;  // packed rows

  template <int kBytes>
  static RBM_INLINE PackedMatrix of(const PackedExperts<BFloat16>& experts, int64_t expert) {
    const int64_t height = packed_rows<BFloat16Pair>(experts.features);
    return {experts.values + expert * height * padded_columns<float, kBytes>(experts.outputs), height};
  }

  // The weights of the panel from `column` on, of `width` columns.
  RBM_INLINE const BFloat16Pair* panel(int64_t column, int64_t width) const {
    return reinterpret_cast<const BFloat16Pair*>(values + column * height + width);
  }
  // The biases from `column` on, to the end of its panel.
  RBM_INLINE const BFloat16* biases(int64_t column) const {
    const int64_t inside = column % kBlockColumns;
    return values + (column - inside) * height + inside;
  }
};

// Whether the experts exceed the L2 cache.
template <int kBytes>
RBM_INLINE bool are_large(const PackedExperts<BFloat16>& experts) {
  return experts.num_experts * experts.features * padded_columns<float, kBytes>(experts.outputs) > kAmxCached;
}

// The columns [begin, end) of the expert after `expert` that has pairs, and as many `apart` columns after them unless
// it is 0, to be requested while `expert` is multiplied with them.
template <int kBytes>
RBM_INLINE Upcoming upcoming_weights(
    const PackedProduct<BFloat16, BFloat16Pair>& p, int64_t expert, int64_t begin, int64_t end, int64_t apart) {
  int64_t next = expert + 1;
  while (next < p.last_expert && p.pairs->count(next) == 0) ++next;
  if (next >= p.last_expert) return {};
  const PackedMatrix matrix = PackedMatrix::of<kBytes>(p.experts, next);
  constexpr int64_t kBytesOf = sizeof(BFloat16);
  const int64_t blocks = ceil_div(p.pairs->count(expert), kBlockRows), columns = (apart == 0 ? 1 : 2) * (end - begin);
  const int64_t steps = blocks * ceil_div(columns, kBlockColumns / 2) * ceil_div(matrix.height, 2 * kRegisterRows);
  const int64_t bytes = (end - begin) * matrix.height * kBytesOf;
  if (bytes > kMostUpcoming) return {};
  return {matrix.values + begin * matrix.height, bytes, apart * matrix.height * kBytesOf, steps};
}

// Which sums nothing has been added to yet, so that they are set and need not be cleared before.
class NewSums {
 public:
  NewSums(int64_t rows, int64_t most_pairs, int64_t columns)
      : has_sums_(scratch<bool>(rows)), are_new_(scratch<bool>(most_pairs)), zeros_(scratch<float>(columns)) {
    std::fill_n(has_sums_.get(), rows, false);
    std::fill_n(zeros_.get(), columns, 0.0f);
  }

  // To be called once for each expert, in the order in which products are added.
  void begin(const Pair* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      are_new_[i] = !has_sums_[pairs[i].row];
      has_sums_[pairs[i].row] = true;
    }
  }
  void begin_own(int64_t count) { std::fill_n(are_new_.get(), count, true); }

  // What the products of pair i of the expert are added to: `sums`, or zeros.
  const float* before(int64_t i, const float* sums) const { return are_new_[i] ? zeros_.get() : sums; }

 private:
  Scratch<bool> has_sums_, are_new_;
  Scratch<float> zeros_;
};

// The pairs of an expert, kAmxInner operands of the features from operand `first` on, the columns [begin, end).
// `is_large` tells that these weights are probably in no cache.
template <int kBytes, typename Tiles>
RBM_INLINE void multiply_columns(
    Tiles tiles, const PackedProduct<BFloat16, BFloat16Pair>& p, int64_t expert, int64_t first, int64_t begin,
    int64_t end, bool is_large, const NewSums& new_sums, LeftBlock* left) {
  using L = Lanes<float, kBytes>;
  const PackedMatrix matrix = PackedMatrix::of<kBytes>(p.experts, expert);
  const int64_t inner = std::min(2 * kAmxInner, p.experts.features - 2 * first);
  const int64_t steps = operands_of<BFloat16Pair>(inner);
  const int64_t count = p.pairs->count(expert);
  for (int64_t i = 0; i < count; i += kBlockRows) {
    const Pair* const pairs = p.pairs->of(expert) + i;
    const int64_t valid = std::min(kBlockRows, count - i);
    float* sums_of[kBlockRows];
    const float* before[kBlockRows];
    float gates[kBlockRows];
    for (int64_t r = 0; r < valid; ++r) {
      left->set(r, p.row_of(pairs[r]) + 2 * first, inner);
      sums_of[r] = p.sums_of(pairs[r]);
      before[r] = first == 0 ? new_sums.before(i + r, sums_of[r]) : sums_of[r];
      gates[r] = p.gates[pairs[r].index];
    }
    const auto panel = [&](int64_t column, int64_t width) { return matrix.panel(column, width) + first * width; };
    const auto add = [&]<int kColumns>(const Products<kColumns>& of) __attribute__((always_inline)) {
      constexpr int kVectors = kColumns / L::kCount;
      const BFloat16* const biases = matrix.biases(of.column);
      typename L::Vector bias[kVectors] = {};
      for (int v = 0; v < kVectors && first == 0; ++v) L::load(bias[v], biases + v * L::kCount);
      for (int64_t r = of.first; r < of.last; ++r) {
        const float* const numbers = of.numbers + r * kColumns;
        const float* const added_to = before[r] + of.column;
        float* const sums = sums_of[r] + of.column;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          typename L::Vector product, sum;
          L::load(product, numbers + v * L::kCount);
          L::load(sum, added_to + v * L::kCount);
          // The only use of the product with the gate, so that both are one instruction wherever this is compiled.
          sum += gates[r] * (product + bias[v]);
          L::store(sums + v * L::kCount, sum);
        }
      }
    };
    left->multiply(tiles, valid, begin, end, steps, is_large && i == 0, panel, add);
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
  const bool is_large = are_large<kBytes>(p.experts);
  NewSums new_sums(p.own_sums ? 0 : p.count, p.pairs->all(), end);
  for (int64_t e = p.first_expert; e < p.last_expert; ++e) {
    const int64_t count = p.pairs->count(e), columns = is_large && count > kBlockRows ? kAmxColumns : end - begin;
    if (count == 0) continue;
    left->upcoming = upcoming_weights<kBytes>(p, e, begin, end, 0);
    if (p.own_sums) {
      new_sums.begin_own(count);
    } else {
      new_sums.begin(p.pairs->of(e), count);
    }
    for (int64_t first = 0; first == 0 || 2 * first < features; first += kAmxInner) {
      for (int64_t column = begin; column < end; column += columns) {
        const int64_t last = std::min(column + columns, end);
        multiply_columns<kBytes>(tiles, p, e, first, column, last, is_large, new_sums, left);
      }
    }
  }
}
RBM_DISPATCH(multiply_packed_amx)

// Where the first product of feed-forward experts writes: a row of activated numbers for each pair, by its index.
struct HiddenRows {
  std::byte* numbers;
  int64_t bytes, features;  // of a row
  Activation activation;
};

// Whether activate_packed_amx can compute these rows: a block's products are complete, and each panel of gates has a
// panel of values.
inline bool are_whole_blocks(int64_t features, int64_t hidden_features) {
  return operands_of<BFloat16Pair>(features) <= kAmxInner && hidden_features % kBlockColumns == 0;
}

// The first product, whose gates are 1: columns [begin, end) of the hidden rows. They are activated as they come from
// the registers, so no sums are written.
template <int kBytes, typename Tiles>
RBM_INLINE void activate_packed_amx_lanes(
    Tiles tiles, const PackedProduct<BFloat16, BFloat16Pair>& p, const HiddenRows& hidden, int64_t begin, int64_t end,
    LeftBlock* left) {
  using L = Lanes<float, kBytes>;
  using Vector = typename L::Vector;
  const int64_t features = p.experts.features, steps = operands_of<BFloat16Pair>(features);
  const bool is_gated = hidden.activation == Activation::kSwiglu, is_large = are_large<kBytes>(p.experts);
  // Pairs of the expert, columns [from, to).
  const auto activate = [&]<bool kGated>(int64_t expert, int64_t from, int64_t to) __attribute__((always_inline)) {
    const PackedMatrix matrix = PackedMatrix::of<kBytes>(p.experts, expert);
    const int64_t count = p.pairs->count(expert), apart = hidden.features * matrix.height / 2;  // of gates and values
    for (int64_t i = 0; i < count; i += kBlockRows) {
      const Pair* const pairs = p.pairs->of(expert) + i;
      const int64_t valid = std::min(kBlockRows, count - i);
      BFloat16* rows[kBlockRows];
      for (int64_t r = 0; r < valid; ++r) {
        left->set(r, p.row_of(pairs[r]), features);
        rows[r] = reinterpret_cast<BFloat16*>(hidden.numbers + pairs[r].index * hidden.bytes);
      }
      const auto panel = [&](int64_t column, int64_t width) { return matrix.panel(column, width); };
      const auto write = [&]<int kColumns>(const Products<kColumns>& of) __attribute__((always_inline)) {
        constexpr int kVectors = kColumns / L::kCount / (kGated ? 2 : 1);
        const BFloat16* const biases = matrix.biases(of.column);
        Vector bias[kVectors], value_bias[kVectors] = {};
        for (int v = 0; v < kVectors; ++v) {
          L::load(bias[v], biases + v * L::kCount);
          if constexpr (kGated) L::load(value_bias[v], biases + 2 * apart + v * L::kCount);
        }
        for (int64_t r = of.first; r < of.last; ++r) {
          const float* const numbers = of.numbers + r * kColumns;
          BFloat16* const row = rows[r] + of.column;
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            Vector number, value{};
            L::load(number, numbers + v * L::kCount);
            number += bias[v];
            if constexpr (kGated) {
              L::load(value, numbers + (kVectors + v) * L::kCount);
              silu_of_bfloat16(number);
              number *= value + value_bias[v];
            } else {
              activate_vector<kBytes, float>(hidden.activation, value, number);
            }
            store_bfloat16(row + v * L::kCount, number);
          }
        }
      };
      const bool is_new = is_large && i == 0;
      if constexpr (kGated) {
        left->multiply_both(tiles, valid, from, to, apart, steps, is_new, panel, write);
      } else {
        left->multiply(tiles, valid, from, to, steps, is_new, panel, write);
      }
    }
  };
  for (int64_t e = p.first_expert; e < p.last_expert; ++e) {
    if (p.pairs->count(e) == 0) continue;
    const int64_t columns = is_large && p.pairs->count(e) > kBlockRows ? kAmxColumns / 2 : end - begin;
    left->upcoming = upcoming_weights<kBytes>(p, e, begin, end, is_gated ? hidden.features : 0);
    for (int64_t column = begin; column < end; column += columns) {
      const int64_t last = std::min(column + columns, end);
      if (is_gated) {
        activate.template operator()<true>(e, column, last);
      } else {
        activate.template operator()<false>(e, column, last);
      }
    }
  }
}
RBM_DISPATCH(activate_packed_amx)

}  // namespace rbm::cpu
