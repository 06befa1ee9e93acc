// Rows of which most numbers are zero, such as bags of words: a product with packed experts then reads the weights of
// the other features alone. If all weights are finite, this changes no result: the products that are left out are zero,
// and the others are added in the same order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "outer_tile.h"

namespace rbm::cpu {

// The inverse of the largest share of numbers other than zero.
constexpr int64_t kMostlyZero = 8;

// Whether a sample of the rows is mostly zero.
template <typename T>
bool are_mostly_zero(const T* x, int64_t stride, int64_t rows, int64_t features) {
  constexpr int64_t kSample = 4, kLeastFeatures = 64;
  if (features < kLeastFeatures || rows == 0) return false;
  const int64_t sample = std::min(kSample, rows);
  int64_t others = 0;
  for (int64_t i = 0; i < sample; ++i) {
    const T* const row = x + i * rows / sample * stride;
    for (int64_t d = 0; d < features; ++d) others += row[d] != 0;
  }
  return others * kMostlyZero <= sample * features;
}

// The features that at least one row of a tile has; of one thread.
class FeatureList {
 public:
  explicit FeatureList(int64_t features)
      : marks_(scratch<uint8_t>(round_up(features, kMarks))),
        places_(scratch<int32_t>(features + kMarks + kPrefetchRows)) {}

  // Lists them for some rows, of which `features` numbers are looked at. Returns how many there are.
  template <typename T>
  RBM_INLINE int64_t list(const T* const* rows, int64_t count, int64_t features) const {
    uint8_t* const marks = marks_.get();
    int32_t* const places = places_.get();
    for (int64_t d = 0; d < features; ++d) marks[d] = rows[0][d] != 0;
    for (int64_t r = 1; r < count; ++r) {
      for (int64_t d = 0; d < features; ++d) marks[d] |= rows[r][d] != 0;
    }
    std::fill(marks + features, marks + round_up(features, kMarks), uint8_t(0));
    int64_t found = 0;
    for (int64_t d = 0; d < features; d += kMarks) {
      uint64_t marked;
      std::memcpy(&marked, marks + d, sizeof(marked));
      if (marked == 0) continue;
      for (int64_t i = 0; i < kMarks; ++i) {
        places[found] = static_cast<int32_t>(d + i);
        found += marks[d + i];
      }
    }
    std::fill_n(places + found, kPrefetchRows, 0);
    return found;
  }

  // In ascending order, and then kPrefetchRows times the first feature of all.
  const int32_t* places() const { return places_.get(); }

 private:
  static constexpr int64_t kMarks = sizeof(uint64_t);
  Scratch<uint8_t> marks_;
  Scratch<int32_t> places_;
};

}  // namespace rbm::cpu
