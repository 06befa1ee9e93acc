// Experts packed once for many products, and their product with the pairs of a batch.
//
// A tile of sums, some pairs of one expert by a panel of columns, stays in registers while the features are traversed.
// Each number of a row is multiplied with a whole vector of columns, so nothing is summed over lanes, and a tile of one
// row reads the weights at full bandwidth. With the weights as the layer learns them, [N, D], the alternatives are
// packing at every call, or inner products, which spend time on sums over lanes and on two loads per product.
#pragma once

#include <cstdint>

#include "bfloat16_pairs.h"
#include "feature_list.h"
#include "pairs.h"

namespace rbm::cpu {

// [E, packed_rows(D), padded]. Each expert's matrix is divided into panels as wide as a tile (the last as wide as its
// whole vectors). Each panel is stored row by row: first the bias, then one row of weights per feature, or per two
// features as pairs. Columns past the last are zero.
template <typename T>
struct PackedExperts {
  const T* values;
  int64_t num_experts, features, outputs;
};

template <typename Operand>
constexpr int64_t packed_rows(int64_t features) {
  return 1 + kNumbersOf<Operand> * operands_of<Operand>(features);
}

// Maximum size of a panel that several tiles use one after the other, so that it stays in the L1 cache.
constexpr int64_t kHotPanelBytes = 24576;
// With vectors wider than those of AVX2, panels do not fit in the L1 cache. With more features than this they would
// exceed L2.
constexpr int64_t kMostInnerRows = 1024;

// y[pairs[r].row] += gate * (bias + W x[pairs[r].row]) for pairs and panels of columns. Rows and weights are multiplied
// as Operand: the type that rows of T are summed in, or pairs of bfloat16.
template <typename T, typename Operand>
struct PackedProduct {
  using Acc = Accumulation<T>;
  static constexpr bool kPairs = std::is_same_v<Operand, BFloat16Pair>;
  using Row = std::conditional_t<kPairs, T, Acc>;
  using Weight = std::conditional_t<kPairs, Operand, T>;
  const Row* rows;  // [n, D], of pairs with an even D
  int64_t row_stride;
  PackedExperts<T> experts;
  const Acc* gates;  // [n, k]
  const PairsByExpert* pairs;
  int64_t count;  // n
  Acc* sums;      // [n, at least padded columns]
  int64_t sum_stride;
  int64_t first_expert, last_expert;  // those that are multiplied
  bool own_rows = false;              // whether rows are [n k, D]: one for each pair, by its index
  const Pair* own_sums = nullptr;     // the first of the pairs that have a row of sums each; otherwise, rows have
  const FeatureList* list = nullptr;  // of rows that are mostly zero

  const Row* row_of(const Pair& pair) const { return rows + (own_rows ? pair.index : pair.row) * row_stride; }
  Acc* sums_of(const Pair& pair) const { return sums + (own_sums ? &pair - own_sums : pair.row) * sum_stride; }
  // Clears the columns [begin, end) of all sums.
  void clear(int64_t begin, int64_t end) const {
    const int64_t all = own_sums ? pairs->count(first_expert) : count;
    for (int64_t row = 0; row < all; ++row) std::fill_n(sums + row * sum_stride + begin, end - begin, Acc(0));
  }
};

template <typename T, typename Operand>
inline constexpr int kVectorBytesFor<PackedProduct<T, Operand>> = kVectorBytesFor<Operand*>;

// totals[v] = the biases of panels of kVectors vectors, or zeros if the tile starts at a later feature than the first.
template <int kBytes, int kVectors, int kAll, typename T, typename Vector>
RBM_INLINE void load_biases(const T* const* panels, bool begins, Vector (&totals)[kAll]) {
  using L = Lanes<Accumulation<T>, kBytes>;
#pragma GCC unroll 8
  for (int v = 0; v < kAll; ++v) {
    if (begins) {
      L::load(totals[v], panels[v / kVectors] + v % kVectors * L::kCount);
    } else {
      totals[v] = Vector{};
    }
  }
}

// A tile: kRows pairs, kPanels panels that are `panel_stride` numbers apart, each of kVectors vectors; `inner` operands
// of the features from operand `first` on, at these places.
template <int kBytes, int kRows, int kVectors, int kPanels, typename T, typename Operand, typename Places>
RBM_INLINE void packed_tile(
    const Operand* const* rows, const T* panel, int64_t panel_stride, int64_t first, int64_t inner,
    const Accumulation<T>* gates, Accumulation<T>* const* sums, const Places& places) {
  using L = Lanes<Accumulation<T>, kBytes>;
  using Weight = typename PackedProduct<T, Operand>::Weight;
  constexpr int kAll = kVectors * kPanels;
  constexpr int64_t kWidth = kVectors * L::kCount;
  const T* panels[kPanels];
  const Weight* weights[kPanels];
#pragma GCC unroll 4
  for (int i = 0; i < kPanels; ++i) {
    panels[i] = panel + i * panel_stride;
    weights[i] = reinterpret_cast<const Weight*>(panels[i] + kWidth) + first * kWidth;
  }
  typename L::Vector totals[kRows][kAll], biases[kAll];
  load_biases<kBytes, kVectors>(panels, first == 0, biases);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) totals[r][v] = biases[v];
  }
  product_tile<kBytes, kRows, kVectors, kPanels>(rows, 1, weights, kWidth, inner, totals, places);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) {
      typename L::Vector sum;
      L::load(sum, sums[r] + v * L::kCount);
      sum += gates[r] * totals[r][v];
      L::store(sums[r] + v * L::kCount, sum);
    }
  }
}

// Panels that a tile of so few rows processes at once: enough sums to hide the latency of a multiplication, if
// registers suffice.
template <int kBytes, int kRows>
constexpr int panels_at_once() {
#if defined(__x86_64__)
  if (kBytes == 64) return kRows <= 2 ? 2 : 1;
  return kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;
#else
  return kRows <= 2 ? 2 : 1;
#endif
}

// kRows pairs of an expert, `inner` operands of the features from operand `first` on, the columns [column, last).
template <int kBytes, int kRows, typename T, typename Operand, typename Places>
RBM_INLINE void multiply_packed_rows(
    const PackedProduct<T, Operand>& p, int64_t expert, const Pair* pairs, int64_t first, int64_t inner, int64_t column,
    int64_t last, const Places& places) {
  using Acc = Accumulation<T>;
  constexpr int kVectors = tile_vectors<kBytes>(), kPanels = panels_at_once<kBytes, kRows>();
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const int64_t height = packed_rows<Operand>(p.experts.features);
  const T* const matrix = p.experts.values + expert * height * padded_columns<Acc, kBytes>(p.experts.outputs);
  const Operand* rows[kRows];
  Acc* sums[kRows];
  Acc gates[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    rows[r] = reinterpret_cast<const Operand*>(p.row_of(pairs[r])) + first;
    gates[r] = p.gates[pairs[r].index];
    sums[r] = p.sums_of(pairs[r]) + column;
  }
  const auto step = [&](int64_t columns) {
    column += columns;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r] += columns;
  };
  const int64_t stride = height * kWidth;
  if constexpr (kPanels > 1) {
    for (; column + kPanels * kWidth <= last; step(kPanels * kWidth)) {
      packed_tile<kBytes, kRows, kVectors, kPanels>(
          rows, matrix + column * height, stride, first, inner, gates, sums, places);
    }
  }
  for (; column + kWidth <= last; step(kWidth)) {
    packed_tile<kBytes, kRows, kVectors, 1>(rows, matrix + column * height, stride, first, inner, gates, sums, places);
  }
  with_last_vectors<kBytes>((last - column) / kCount, [&]<int kVectors>() __attribute__((always_inline)) {
    packed_tile<kBytes, kRows, kVectors, 1>(rows, matrix + column * height, 0, first, inner, gates, sums, places);
  });
}

template <int kBytes, typename T, typename Operand, typename Places = EveryPlace>
RBM_INLINE void packed_tile_of(
    const PackedProduct<T, Operand>& p, int64_t expert, const Pair* pairs, int64_t rows, int64_t first, int64_t inner,
    int64_t column, int64_t last, const Places& places = {}) {
  static_assert(kTileRows == 6);
  switch (rows) {
    case 6: return multiply_packed_rows<kBytes, 6>(p, expert, pairs, first, inner, column, last, places);
    case 5: return multiply_packed_rows<kBytes, 5>(p, expert, pairs, first, inner, column, last, places);
    case 4: return multiply_packed_rows<kBytes, 4>(p, expert, pairs, first, inner, column, last, places);
    case 3: return multiply_packed_rows<kBytes, 3>(p, expert, pairs, first, inner, column, last, places);
    case 2: return multiply_packed_rows<kBytes, 2>(p, expert, pairs, first, inner, column, last, places);
    default: return multiply_packed_rows<kBytes, 1>(p, expert, pairs, first, inner, column, last, places);
  }
}

// One row, one panel of kVectors vectors, all features, and kExperts experts at once, because the sums of a single
// expert would wait for each other. They are added in the order of multiply_packed.
template <int kBytes, int kExperts, int kVectors, typename T, typename Operand>
RBM_INLINE void packed_row(
    const Operand* row, const T* const* panels, int64_t features, const Accumulation<T>* gates, Accumulation<T>* sums) {
  using L = Lanes<Accumulation<T>, kBytes>;
  using Weight = typename PackedProduct<T, Operand>::Weight;
  constexpr int64_t kWidth = kVectors * L::kCount;
  const Weight* weights[kExperts];
#pragma GCC unroll 4
  for (int e = 0; e < kExperts; ++e) weights[e] = reinterpret_cast<const Weight*>(panels[e] + kWidth);
  typename L::Vector totals[1][kExperts * kVectors];
  load_biases<kBytes, kVectors>(panels, true, totals[0]);
  product_tile<kBytes, 1, kVectors, kExperts>(&row, 1, weights, kWidth, operands_of<Operand>(features), totals);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    typename L::Vector sum;
    L::load(sum, sums + v * L::kCount);
#pragma GCC unroll 4
    for (int e = 0; e < kExperts; ++e) sum += gates[e] * totals[0][e * kVectors + v];
    L::store(sums + v * L::kCount, sum);
  }
}

// A single row with outputs in one panel.
template <int kBytes, int kVectors, typename T, typename Operand>
RBM_INLINE void packed_row_of(const PackedProduct<T, Operand>& p) {
  constexpr int kMost = 3;
  const int64_t features = p.experts.features;
  const int64_t matrix = packed_rows<Operand>(features) * kVectors * Lanes<Accumulation<T>, kBytes>::kCount;
  const auto* const row = reinterpret_cast<const Operand*>(p.rows);
  const T* panels[kMost];
  Accumulation<T> gates[kMost];
  int found = 0;
  for (int64_t expert = 0; expert < p.experts.num_experts; ++expert) {
    if (p.pairs->count(expert) == 0) continue;
    panels[found] = p.experts.values + expert * matrix;
    gates[found++] = p.gates[p.pairs->of(expert)->index];
    if (found < kMost) continue;
    packed_row<kBytes, kMost, kVectors>(row, panels, features, gates, p.sums);
    found = 0;
  }
  if (found == 2) packed_row<kBytes, 2, kVectors>(row, panels, features, gates, p.sums);
  if (found == 1) packed_row<kBytes, 1, kVectors>(row, panels, features, gates, p.sums);
}

// packed_tile_of for rows that are mostly zero, with the features that at least one of them has, if these are at most
// half of all: weights in the order of a list take longer than in that of memory. Returns whether it was done.
template <int kBytes, typename T, typename Operand>
RBM_INLINE bool multiply_listed(
    const PackedProduct<T, Operand>& p, int64_t expert, const Pair* pairs, int64_t rows, int64_t first, int64_t inner,
    int64_t column, int64_t last) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Operand, float>) {
    if (p.list == nullptr) return false;
    const float* of_tile[kTileRows];
    for (int64_t r = 0; r < rows; ++r) of_tile[r] = p.row_of(pairs[r]) + first;
    const int64_t found = p.list->list(of_tile, rows, inner);
    if (2 * found > inner) return false;
    packed_tile_of<kBytes>(p, expert, pairs, rows, first, found, column, last, p.list->places());
    return true;
  }
  return false;
}

// All pairs, panels [first_panel, last_panel). The order in which products are added depends on neither of them, so a
// row's result is the same, bit for bit, in every batch.
template <int kBytes, typename T, typename Operand>
RBM_INLINE void multiply_packed_lanes(const PackedProduct<T, Operand>& p, int64_t first_panel, int64_t last_panel) {
  using Acc = Accumulation<T>;
  constexpr int64_t kWidth = panel_width<Acc, kBytes>();
  constexpr int64_t kHotRows = std::max<int64_t>(kHotPanelBytes / (kWidth * static_cast<int64_t>(sizeof(T))), 1);
  constexpr int64_t kMostInner = kBytes == 64 ? kMostInnerRows : kHotRows;
  const int64_t begin = first_panel * kWidth;
  const int64_t end = std::min(last_panel * kWidth, padded_columns<Acc, kBytes>(p.experts.outputs));
  p.clear(begin, end);
  const int64_t steps = operands_of<Operand>(p.experts.features);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(steps, kMostInner)), block = ceil_div(steps, blocks);
  if (p.count == 1 && !p.own_rows && !p.own_sums && !p.list && begin == 0 && end <= kWidth && blocks == 1) {
    if (end == kWidth) return packed_row_of<kBytes, tile_vectors<kBytes>()>(p);
    const int64_t vectors = end / Lanes<Acc, kBytes>::kCount;
    return with_last_vectors<kBytes>(
        vectors, [&]<int kVectors>() __attribute__((always_inline)) { packed_row_of<kBytes, kVectors>(p); });
  }
  for (int64_t expert = p.first_expert; expert < p.last_expert; ++expert) {
    const Pair* const pairs = p.pairs->of(expert);
    const int64_t count = p.pairs->count(expert), tiles = ceil_div(count, kTileRows);
    if (count == 0) continue;
    // Tiles of nearly equal height: a tile of a single row would take as long as a tile of four.
    const int64_t height = count / tiles, higher = count % tiles;
    const int64_t columns = tiles == 1 || p.list ? end - begin : kWidth;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = i * block, inner = std::min(block, steps - first);
      for (int64_t column = begin; column < end; column += columns) {
        const int64_t last = std::min(column + columns, end);
        const Pair* of_tile = pairs;
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t rows = height + (tile < higher);
          if (!multiply_listed<kBytes>(p, expert, of_tile, rows, first, inner, column, last)) {
            packed_tile_of<kBytes>(p, expert, of_tile, rows, first, inner, column, last);
          }
          of_tile += rows;
        }
      }
    }
  }
}
RBM_DISPATCH(multiply_packed)

}  // namespace rbm::cpu
