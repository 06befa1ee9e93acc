// The sums of weight_gradient.h with the tile registers of AMX.
#pragma once

#include <vector>

#include "amx.h"
#include "weight_gradient.h"

namespace rbm::cpu {

// Rows of a piece; pieces whose gated gradients are kept together; output features of a slice; features that are
// multiplied together. The gradients that are kept (1 MiB), the rows with these features (128 KiB) and the sums (256
// KiB) stay in the L2 cache, of 2 MiB.
constexpr int64_t kAmxPieceRows = 512, kAmxPieceSteps = kAmxPieceRows / 2, kAmxPieces = 2;
constexpr int64_t kAmxMostOutputs = 16 * kBlockRows, kAmxFeatures = 2 * kBlockColumns;

// What a thread needs for slices of at most `outputs` output features.
struct AmxRoom {
  explicit AmxRoom(int64_t outputs)
      : blocks(ceil_div(outputs, kBlockRows)),
        gated(scratch<BFloat16Pair>(kAmxPieceSteps * round_up(outputs, kRegisterRows))),
        panels(scratch<BFloat16Pair>(kAmxPieceSteps * kAmxFeatures)),
        sums(scratch<float>(outputs * kAmxFeatures)),
        bias_sum(scratch<float>(outputs)) {
    left.reserve(kAmxPieces * blocks);
    for (int64_t i = 0; i < kAmxPieces * blocks; ++i) left.emplace_back(kAmxPieceSteps);
  }

  LeftBlock* left_of(int64_t piece) { return left.data() + piece * blocks; }

  int64_t blocks;
  Scratch<BFloat16Pair> gated, panels;
  Scratch<float> sums;          // [outputs, kAmxFeatures]
  Scratch<float> bias_sum;      // [outputs], of a piece
  std::vector<LeftBlock> left;  // [kAmxPieces, blocks]
};

template <>
inline constexpr int kVectorBytesFor<AmxRoom*> = 64;

// Multiplies the gradients of a piece by their gates and sets its left blocks, whose rows are output features.
template <int kBytes>
RBM_INLINE void set_left(
    const WeightGrad<BFloat16>& w, const Slice<BFloat16>& slice, const Pair* pairs, int64_t count, AmxRoom* room,
    LeftBlock* blocks) {
  const int64_t outputs = slice.end - slice.begin, stride = round_up(outputs, kRegisterRows);
  const int64_t steps = operands_of<BFloat16Pair>(count), whole_steps = round_up(steps, kRegisterWidth);
  BFloat16Pair* const gated = room->gated.get();
  gate_rows<kBytes>(w, slice, pairs, count, stride, room->bias_sum.get(), gated);
  // Zeros up to a whole register: the left side multiplies them.
  std::fill_n(gated + steps * stride, (whole_steps - steps) * stride, BFloat16Pair{});
  for (int64_t n = 0; n < outputs; n += kRegisterRows) {
    LeftBlock& block = blocks[n / kBlockRows];
    BFloat16Pair* const row = block.row(n % kBlockRows);
    for (int64_t k = 0; k < whole_steps; k += kRegisterWidth) {
      const auto* const source = reinterpret_cast<const float*>(gated + k * stride + n);
      transpose<kBytes>(source, stride, reinterpret_cast<float*>(row + k), block.stride());
    }
  }
}

// target[i] = numbers[i], added to what it is unless `is_first`.
template <int kBytes>
RBM_INLINE void add_row(const float* numbers, int64_t count, bool is_first, float* target) {
  using L = Lanes<float, kBytes>;
  int64_t i = 0;
  for (; i + L::kCount <= count; i += L::kCount) {
    typename L::Vector number, sum{};
    L::load(number, numbers + i);
    if (!is_first) L::load(sum, target + i);
    L::store(target + i, sum + number);
  }
  for (; i < count; ++i) target[i] = (is_first ? 0 : target[i]) + numbers[i];
}

// room->sums = the products of the pairs [begin, end) of an expert, whose left blocks are set, with the features
// [first_feature, first_feature + kAmxFeatures).
template <int kBytes, typename Tiles>
RBM_INLINE void sum_features(
    Tiles tiles, const WeightGrad<BFloat16>& w, const Pair* pairs, int64_t begin, int64_t end, int64_t outputs,
    int64_t first_feature, AmxRoom* room) {
  const int64_t padded = padded_columns<float, kBytes>(w.in_features) - first_feature;
  const int64_t columns = std::min(kAmxFeatures, padded);
  for (int64_t first = begin; first < end; first += kAmxPieceRows) {
    const int64_t count = std::min(kAmxPieceRows, end - first), steps = operands_of<BFloat16Pair>(count);
    const auto panel_at = [&](int64_t column, int64_t) { return room->panels.get() + column * kAmxPieceSteps; };
    for (int64_t column = 0; column < columns; column += kBlockColumns) {
      const int64_t feature = first_feature + column, width = std::min(kBlockColumns, columns - column);
      panel_of_rows(
          w, pairs + first, count, feature, std::min(width, w.in_features - feature), width, panel_at(column, width));
    }
    LeftBlock* const blocks = room->left_of((first - begin) / kAmxPieceRows);
    for (int64_t n = 0; n < outputs; n += kBlockRows) {
      const int64_t valid = std::min(kBlockRows, outputs - n);
      const auto add = [&]<int kColumns>(const Products<kColumns>& of) __attribute__((always_inline)) {
        float* const target = room->sums.get() + n * kAmxFeatures + of.column;
        for (int64_t r = of.first; r < of.last; ++r) {
          add_row<kBytes>(of.numbers + r * kColumns, kColumns, first == begin, target + r * kAmxFeatures);
        }
      };
      blocks[n / kBlockRows].multiply(tiles, valid, 0, columns, steps, false, panel_at, add);
    }
  }
}

// The gradients of a slice. If an expert has more pairs than are kept together, `slice.weight` adds up their sums.
template <int kBytes, typename Tiles>
RBM_INLINE void sum_slice_amx_lanes(
    Tiles tiles, const WeightGrad<BFloat16>& w, const Slice<BFloat16>& slice, AmxRoom* room) {
  const int64_t outputs = slice.end - slice.begin, features = w.in_features, count = w.pairs->count(slice.expert);
  const Pair* const pairs = w.pairs->of(slice.expert);
  constexpr int64_t kTogether = kAmxPieces * kAmxPieceRows;
  std::fill_n(slice.bias, outputs, 0.0f);
  if (count == 0) std::fill_n(slice.grad_weight, outputs * features, BFloat16(0.0f));
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t end = std::min(begin + kTogether, count);
    for (int64_t first = begin; first < end; first += kAmxPieceRows) {
      LeftBlock* const blocks = room->left_of((first - begin) / kAmxPieceRows);
      set_left<kBytes>(w, slice, pairs + first, std::min(kAmxPieceRows, end - first), room, blocks);
    }
    for (int64_t d = 0; d < features; d += kAmxFeatures) {
      sum_features<kBytes>(tiles, w, pairs, begin, end, outputs, d, room);
      const int64_t filled = std::min(kAmxFeatures, features - d);
      for (int64_t n = 0; n < outputs; ++n) {
        const float* const sums = room->sums.get() + n * kAmxFeatures;
        if (count <= kTogether) {
          round_all_lanes<kBytes>(sums, filled, slice.grad_weight + n * features + d);
        } else {
          add_row<kBytes>(sums, filled, begin == 0, slice.weight + n * features + d);
        }
      }
    }
  }
  if (count > kTogether) round_all_lanes<kBytes>(slice.weight, outputs * features, slice.grad_weight);
  round_all_lanes<kBytes>(slice.bias, outputs, slice.grad_bias);
}
RBM_DISPATCH(sum_slice_amx)

}  // namespace rbm::cpu
