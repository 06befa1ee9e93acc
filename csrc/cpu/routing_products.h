// Inner products of rows with all memory vectors, and the rows' inverse norms. Included by routing.cpp alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "dot_tile.h"
#include "routing.h"
#include "row_panel.h"

namespace rbm::cpu {

// Rows and memory vectors with more features than this are multiplied in parts of kFeaturesOfPart, which stay in the
// first cache (32 KiB): eight memory vectors with four rows at a time, and the sums of all rows.
constexpr int64_t kLongFeatures = 1024;
constexpr int kGroups = 2;

// With fewer experts, copying rows to panels takes longer than it saves. Vectors of AVX-512 leave so few loads without
// panels that these only pay if the memory vectors do not stay in the second cache.
constexpr int64_t kExpertsForPanels = 64, kExpertsForWidePanels = 128;
// Then several panels use a memory vector before the next is loaded, as many as stay there with their products.
constexpr int64_t kMostPanels = 4;
constexpr int64_t kBytesOfMemory = 1 << 20, kBytesOfPanels = 1 << 19, kBytesOfProducts = 1 << 20;

// Panels that are filled at once to route this many rows; 0 for none.
template <typename T>
int64_t panels_for(const Routing<T>& r, int64_t rows) {
  using Acc = Accumulation<T>;
  constexpr int64_t kRows = kRowVectors * kMostLanes, kBytes = kRows * sizeof(Acc);
  const bool is_wide = vector_bytes() == 64;
  if (vector_bytes() == 16 || rows < kRows || r.features == 0) return 0;
  if (r.num_experts < (is_wide ? kExpertsForWidePanels : kExpertsForPanels)) return 0;
  if (r.num_experts * r.features * static_cast<int64_t>(sizeof(Acc)) <= kBytesOfMemory) return is_wide ? 0 : 1;
  const int64_t fitting = std::min(kBytesOfPanels / (kBytes * r.features), kBytesOfProducts / (kBytes * r.num_experts));
  return std::clamp<int64_t>(fitting, 1, kMostPanels);
}

// Vectors of rows whose products are computed at once, with so many panels.
constexpr int64_t vectors_at_once(int64_t panels) { return std::max<int64_t>(1, panels * kRowVectors); }

template <typename Acc>
RBM_INLINE Acc inverse_norm(Acc square) {
  return 1 / std::max(std::sqrt(square), static_cast<Acc>(kNormEps));
}

// products[(expert + c) * kStride + i] = the sum of the lanes of totals[c * kRows + i]
template <int kBytes, int kRows, int kColumns, int kStride, typename Acc, typename Vector>
RBM_INLINE void store_products(Vector (&totals)[kRows * kColumns], int64_t expert, Acc* products) {
  Acc sums[kRows * kColumns];
  Lanes<Acc, kBytes>::template sum_lanes<kRows * kColumns>(totals, sums);
  for (int c = 0; c < kColumns; ++c) std::copy_n(sums + c * kRows, kRows, products + (expert + c) * kStride);
}

// products[(expert + c) * kStride + i] = <rows[i], memory[expert + c]>, for `count` rows, kTile at a time.
template <int kBytes, int kTile, int kColumns, int kStride, typename T, typename Row>
RBM_INLINE void multiply(
    const Routing<T>& r, const Row* const* rows, int64_t count, int64_t expert, Accumulation<T>* products) {
  using Acc = Accumulation<T>;
  const auto tile = [&]<int kRows>(int64_t i) __attribute__((always_inline)) {
    typename Lanes<Acc, kBytes>::Vector totals[kRows * kColumns] = {};
    const Acc* const memory = r.memory + expert * r.features;
    add_tile<kBytes, kRows, kColumns>(rows + i, memory, r.features, 0, r.features, totals);
    store_products<kBytes, kRows, kColumns, kStride>(totals, expert, products + i);
  };
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) tile.template operator()<kTile>(i);
  for (; i < count; ++i) tile.template operator()<1>(i);
}

// The same for kStride rows and kGroups times as many memory vectors, in parts of the features.
template <int kBytes, int kTile, int kColumns, int kStride, typename T, typename Row>
RBM_INLINE void multiply_long(const Routing<T>& r, const Row* const* rows, int64_t expert, Accumulation<T>* products) {
  using Acc = Accumulation<T>;
  constexpr int kTiles = kStride / kTile;
  const Acc* const memory = r.memory + expert * r.features;
  typename Lanes<Acc, kBytes>::Vector totals[kTiles][kGroups][kTile * kColumns] = {};
  for (int64_t begin = 0; begin < r.features; begin += kFeaturesOfPart) {
    const int64_t end = std::min(begin + kFeaturesOfPart, r.features);
    for (int i = 0; i < kTiles; ++i) {
      for (int g = 0; g < kGroups; ++g) {
        const Acc* const columns = memory + g * kColumns * r.features;
        typename Lanes<Acc, kBytes>::Vector own[kTile * kColumns];  // in registers
        std::copy_n(totals[i][g], kTile * kColumns, own);
        add_tile<kBytes, kTile, kColumns>(rows + i * kTile, columns, r.features, begin, end, own);
        std::copy_n(own, kTile * kColumns, totals[i][g]);
      }
    }
  }
  for (int i = 0; i < kTiles; ++i) {
    for (int g = 0; g < kGroups; ++g) {
      store_products<kBytes, kTile, kColumns, kStride>(totals[i][g], expert + g * kColumns, products + i * kTile);
    }
  }
}

// Inner products of `count` rows with all memory vectors, `products` [E, kStride]. All rows use a memory vector before
// the next one is loaded: together, memory vectors may be larger than a core's cache.
template <int kBytes, int kStride, typename T, typename Row>
RBM_INLINE void products_of(const Routing<T>& r, const Row* const* rows, int64_t count, Accumulation<T>* products) {
  constexpr int kColumns = 4;
  // 4 x 4 sums and their operands take 21 of the 32 registers of AVX-512; other processors have 16 registers.
  constexpr int kTile = kStride < 4 ? 1 : kBytes == 64 ? 4 : 2;
  int64_t e = 0;
  if (count == kStride && r.features > kLongFeatures) {
    for (; e + kGroups * kColumns <= r.num_experts; e += kGroups * kColumns) {
      multiply_long<kBytes, kTile, kColumns, kStride>(r, rows, e, products);
    }
  }
  for (; e + kColumns <= r.num_experts; e += kColumns) {
    multiply<kBytes, kTile, kColumns, kStride>(r, rows, count, e, products);
  }
  for (; e < r.num_experts; ++e) multiply<kBytes, kTile, 1, kStride>(r, rows, count, e, products);
}

// squares[i] = the squared length of the row at first + i * stride
template <int kBytes, typename Row, typename Acc>
RBM_INLINE void squares_of(const Row* first, int64_t stride, int64_t count, int64_t features, Acc* squares) {
  constexpr int64_t kRows = 4;
  const Row* rows[kRows];
  int64_t i = 0;
  for (; i + kRows <= count; i += kRows) {
    for (int64_t r = 0; r < kRows; ++r) rows[r] = first + (i + r) * stride;
    square_tile<kBytes, kRows>(rows, features, squares + i);
  }
  for (; i < count; ++i) {
    rows[0] = first + i * stride;
    square_tile<kBytes, 1>(rows, features, squares + i);
  }
}

// Turns the squared lengths of the rows starting at row b into inverse norms. Rows whose squares overflow are shrunk,
// and their products computed anew.
template <int kBytes, int kStride, typename T>
RBM_INLINE void invert_squares(
    const Routing<T>& r, int64_t b, int64_t count, Accumulation<T>* products, Accumulation<T>* squares) {
  using Acc = Accumulation<T>;
  for (int64_t i = 0; i < count; ++i) {
    if (!square_is_safe(squares[i])) {
      const auto copy = shrunk(r.h + (b + i) * r.row_stride, r.features);
      const Acc* const row = copy.get();
      square_tile<kBytes, 1>(&row, r.features, squares + i);
      products_of<kBytes, kStride>(r, &row, 1, products + i);
    }
    squares[i] = inverse_norm(squares[i]);
  }
}

// Inner products of the rows of `panels` panels, starting at row b: [vectors of rows, E, lanes]. `numbers` has room for
// the panels.
template <int kBytes, typename T>
RBM_INLINE void products_of_panels(
    const Routing<T>& r, int64_t b, int64_t panels, Accumulation<T>* numbers, Accumulation<T>* products) {
  using Panel = RowPanel<kBytes, Accumulation<T>>;
  const int64_t stride = r.num_experts * Panel::kLanes;
  const auto panel = [&](int64_t p) { return Panel{numbers + p * Panel::size(r.features), r.features}; };
  for (int64_t p = 0; p < panels; ++p) panel(p).fill(r.h + (b + p * Panel::kRows) * r.row_stride, r.row_stride);
  const auto multiply = [&]<int kColumns>(int64_t e) __attribute__((always_inline)) {
    for (int64_t p = 0; p < panels; ++p) {
      panel(p).template multiply<kColumns>(
          r.memory + e * r.features, products + p * kRowVectors * stride + e * Panel::kLanes, stride);
    }
  };
  constexpr int kColumns = kColumnsAtOnce<kBytes>;
  int64_t e = 0;
  for (; e + kColumns <= r.num_experts; e += kColumns) multiply.template operator()<kColumns>(e);
  for (; e < r.num_experts; ++e) multiply.template operator()<1>(e);
}

}  // namespace rbm::cpu
