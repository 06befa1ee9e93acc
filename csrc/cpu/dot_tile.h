// Inner products of a few rows with a few others, all with adjacent features. Used by routing and by the expert matmul
// for small batches. Nothing is packed, transposed or copied beforehand.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace rbm::cpu {

// Adds products of features [begin, end) to the lanes of totals[c * kRows + r], for rows[r] and the column at
// first_column + c * column_stride. `begin` must be a multiple of the number of lanes.
template <int kBytes, int kRows, int kColumns, typename Row, typename Column, typename Acc = Accumulation<Row>>
RBM_INLINE void add_tile(
    const Row* const* rows, const Column* first_column, int64_t column_stride, int64_t begin, int64_t end,
    typename Lanes<Acc, kBytes>::Vector (&totals)[kRows * kColumns]) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector row[kRows], column;
  const int64_t whole = end - end % L::kCount;
  for (int64_t d = begin; d < whole; d += L::kCount) {
    for (int r = 0; r < kRows; ++r) L::load(row[r], rows[r] + d);
    for (int c = 0; c < kColumns; ++c) {
      L::load(column, first_column + c * column_stride + d);
      for (int r = 0; r < kRows; ++r) totals[c * kRows + r] += row[r] * column;
    }
  }
  // Runs at most once. It is a loop because a compiler may or may not fuse multiplication and addition here, and equal
  // rows need equal arithmetic in tiles of every size: GCC fuses in loops, but did not in a branch of the smallest
  // tile.
  for (int64_t d = whole; d < end; d += L::kCount) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) L::load_first(row[r], rows[r] + d, end - d);
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      L::load_first(column, first_column + c * column_stride + d, end - d);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) totals[c * kRows + r] += row[r] * column;
    }
  }
}

// sums[c * kRows + r] = <rows[r], columns[c]>, where columns[c] = first_column + c * column_stride. The number of
// sums must be a power of two.
template <int kBytes, int kRows, int kColumns, typename Row, typename Column, typename Acc>
RBM_INLINE void dot_tile(
    const Row* const* rows, const Column* first_column, int64_t column_stride, int64_t features, Acc* sums) {
  typename Lanes<Acc, kBytes>::Vector totals[kRows * kColumns] = {};
  add_tile<kBytes, kRows, kColumns>(rows, first_column, column_stride, 0, features, totals);
  Lanes<Acc, kBytes>::template sum_lanes<kRows * kColumns>(totals, sums);
}

// sums[r] = <rows[r], rows[r]>. The number of sums must be a power of two.
template <int kBytes, int kRows, typename Row, typename Acc>
RBM_INLINE void square_tile(const Row* const* rows, int64_t features, Acc* sums) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector totals[kRows] = {};
  typename L::Vector row;
  const int64_t whole = features - features % L::kCount;
  for (int64_t d = 0; d < whole; d += L::kCount) {
    for (int r = 0; r < kRows; ++r) {
      L::load(row, rows[r] + d);
      totals[r] += row * row;
    }
  }
  for (int64_t d = whole; d < features; d += L::kCount) {
    for (int r = 0; r < kRows; ++r) {
      L::load_first(row, rows[r] + d, features - d);
      totals[r] += row * row;
    }
  }
  L::template sum_lanes<kRows>(totals, sums);
}

}  // namespace rbm::cpu
