// Inner products of a block of rows with many vectors, for routing to many experts. The block is transposed: a lane
// has a row, so that nothing is added across lanes, and all sums of a tile share the loads of its operands. A sum is
// still the same as in dot_tile.h, bit for bit: the products of the features of one lane there are summed one after
// another, and then these sums in the order of sum_lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "outer_tile.h"

namespace rbm::cpu {

// Vectors of rows in a panel, and columns that are multiplied with them at a time: 2 x 8 sums, 2 rows and a number are
// in registers, or 2 x 6 if there are only 16. More columns would have more addresses than there are registers.
constexpr int kRowVectors = 2;
template <int kBytes>
constexpr int kColumnsAtOnce = kBytes == 64 ? 8 : 6;
// A part of the features is multiplied before the next one, so that these parts of the columns stay in the first cache.
constexpr int64_t kFeaturesOfPart = 512;

template <int kBytes, typename Acc>
struct RowPanel {
  using L = Lanes<Acc, kBytes>;
  using Vector = typename L::Vector;
  static constexpr int64_t kLanes = L::kCount, kRows = kRowVectors * kLanes;

  Acc* numbers;  // of each part of the features: [lanes of dot_tile.h, steps, kRows]
  int64_t features;

  static constexpr int64_t size(int64_t features) { return round_up(features, kLanes) * kRows; }

  // Copies the rows first, first + stride, ...
  template <typename Row>
  RBM_INLINE void fill(const Row* first, int64_t stride) const {
    for (int64_t begin = 0; begin < features; begin += kFeaturesOfPart) {
      const int64_t steps = steps_from(begin);
      for (int64_t v = 0; v < kRowVectors; ++v) {
        const Row* rows = first + v * kLanes * stride + begin;
        Acc* target = numbers + begin * kRows + v * kLanes;
        Vector square[kLanes];
        int64_t count = std::min(kFeaturesOfPart, features - begin);
        for (; count >= kLanes; count -= kLanes, rows += kLanes, target += kRows) {
          for (int64_t i = 0; i < kLanes; ++i) L::load(square[i], rows + i * stride);
          store_transposed<kBytes>(target, steps * kRows, square);
        }
        if (count > 0) {
          for (int64_t i = 0; i < kLanes; ++i) L::load_first(square[i], rows + i * stride, count);
          store_transposed<kBytes>(target, steps * kRows, square);
        }
      }
    }
  }

  // products[v * stride + c * kLanes + i] = <row v * kLanes + i, the column at first_column + c * features>
  template <int kColumns>
  RBM_INLINE void multiply(const Acc* first_column, Acc* products, int64_t stride) const {
    constexpr int kSums = kColumns * kRowVectors;
    Vector kept[kLanes][kSums];
    for (int64_t begin = 0; begin < features; begin += kFeaturesOfPart) {
      const int64_t steps = steps_from(begin), end = std::min(begin + kFeaturesOfPart, features);
      for (int i = 0; i < kLanes; ++i) {
        const int64_t lane = L::lane_at(i), first = begin + lane;
        Vector sums[kSums] = {};
        if (begin > 0) std::copy_n(kept[i], kSums, sums);
        add(numbers + begin * kRows + lane * steps * kRows, first_column + first, ceil_div(end - first, kLanes), sums);
        // After a pair of places, the last one keeps the sum of both; after two pairs, the sum of the four, and so on.
        for (int size = 1; end == features && (i & size) != 0; size *= 2) {
          for (int s = 0; s < kSums; ++s) sums[s] += kept[i - size][s];
        }
        std::copy_n(sums, kSums, kept[i]);
      }
    }
    for (int s = 0; s < kSums; ++s) {
      L::store(products + s % kRowVectors * stride + s / kRowVectors * kLanes, kept[kLanes - 1][s]);
    }
  }

 private:
  // Features of one lane in the part that begins here.
  RBM_INLINE int64_t steps_from(int64_t begin) const {
    return ceil_div(std::min(kFeaturesOfPart, features - begin), kLanes);
  }

  template <int kSums>
  RBM_INLINE void add(const Acc* rows, const Acc* first_column, int64_t steps, Vector (&sums)[kSums]) const {
#pragma GCC unroll 4
    for (int64_t j = 0; j < steps; ++j) {
      Vector row[kRowVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kRowVectors; ++v) L::load(row[v], rows + j * kRows + v * kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kSums / kRowVectors; ++c) {
        const Acc number = first_column[c * features + j * kLanes];
#pragma GCC unroll 2
        for (int v = 0; v < kRowVectors; ++v) sums[c * kRowVectors + v] += row[v] * number;
      }
    }
  }
};

}  // namespace rbm::cpu
