// Outer products, used by the expert matmul for large batches, and packing of their right side. A tile of sums stays in
// registers while the inner dimension is traversed. Rows of the left side are read in place, each by its own pointer,
// so nothing is gathered. The right side comes in panels as wide as a tile.
#pragma once

#include <cstdint>

#include "rows.h"

namespace rbm::cpu {

// Sums, one row of the right side and one number of the left fill the registers: 6 x 4 + 4 + 1 of 32, or 6 x 2 + 2 + 1
// of 16.
constexpr int kTileRows = 6;
template <int kBytes>
constexpr int tile_vectors() {
#if defined(__x86_64__)
  return kBytes == 64 ? 4 : 2;
#else
  return 4;
#endif
}

template <typename Acc, int kBytes>
constexpr int64_t panel_width() {
  return tile_vectors<kBytes>() * Lanes<Acc, kBytes>::kCount;
}

// Calls act.template operator()<kVectors>() for the last panel of a matrix, which is `vectors` vectors wide, fewer than
// a tile. Without such a panel it is 0, and nothing is called. Only widths that are possible are compiled.
template <int kBytes, typename Act>
RBM_INLINE void with_last_vectors(int64_t vectors, const Act& act) {
  if constexpr (tile_vectors<kBytes>() == 4) {
    if (vectors == 3) return act.template operator()<3>();
    if (vectors == 2) return act.template operator()<2>();
  }
  if (vectors == 1) act.template operator()<1>();
}

// The right side comes from the L2 cache, and hardware prefetching is too late.
constexpr int64_t kPrefetchRows = 16;

// The inner dimension from its first place to its last.
struct EveryPlace {
  int64_t operator[](int64_t i) const { return i; }
};

// sums[r][p * kVectors + v] += the sum of left[r][i * left_stride] * panels[p][i][v] over the first `count` places i,
// for vectors v. panels[p][i] is at `panels[p] + i * right_stride`. A list of places has kPrefetchRows more than count.
template <int kBytes, int kRows, int kVectors, int kPanels, typename Acc, typename Stored, typename Places = EveryPlace>
RBM_INLINE void outer_tile(
    const Acc* const* left, int64_t left_stride, const Stored* const* panels, int64_t right_stride, int64_t count,
    typename Lanes<Acc, kBytes>::Vector (&sums)[kRows][kPanels * kVectors], const Places& places = {}) {
  using L = Lanes<Acc, kBytes>;
  constexpr int kAll = kPanels * kVectors;
  for (int64_t place = 0; place < count; ++place) {
    const int64_t i = places[place], ahead = places[place + kPrefetchRows];
    typename L::Vector columns[kAll];
    const auto at = [&](int v, int64_t row) {
      return panels[v / kVectors] + row * right_stride + v % kVectors * L::kCount;
    };
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) __builtin_prefetch(at(v, ahead));
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) L::load(columns[v], at(v, i));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Acc number = left[r][i * left_stride];
#pragma GCC unroll 8
      for (int v = 0; v < kAll; ++v) sums[r][v] += number * columns[v];
    }
  }
}

// target[i][j] = rows[j][i], a square as wide as a vector. Interleaving the two halves of a sequence of rows, lane by
// lane, log2(lanes) times is a transposition. Clang does not parse a declaration in which `rows` comes first.
template <int kBytes, typename Acc>
RBM_INLINE void store_transposed(
    Acc* target, int64_t target_stride, typename Lanes<Acc, kBytes>::Vector (&rows)[Lanes<Acc, kBytes>::kCount]) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector mixed[L::kCount];
#pragma GCC unroll 4
  for (int step = 1; step < L::kCount; step *= 2) {
    for (int i = 0; i < L::kCount / 2; ++i) {
      L::interleave(mixed[2 * i], mixed[2 * i + 1], rows[i], rows[i + L::kCount / 2]);
    }
    for (int i = 0; i < L::kCount; ++i) rows[i] = mixed[i];
  }
  for (int i = 0; i < L::kCount; ++i) L::store(target + i * target_stride, rows[i]);
}

template <int kBytes, typename T, typename Acc>
RBM_INLINE void transpose(const T* source, int64_t source_stride, Acc* target, int64_t target_stride) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector rows[L::kCount];
  for (int i = 0; i < L::kCount; ++i) L::load(rows[i], source + i * source_stride);
  store_transposed<kBytes>(target, target_stride, rows);
}

// One matrix [K, N] per expert, whose rows or columns are contiguous. It is packed in panels of tile width with all K
// rows; the last panel is as wide as the remaining whole vectors.
template <typename T>
struct Unpacked {
  const T* values;
  int64_t matrices, rows, columns, matrix_stride, row_stride, column_stride;
};

// Whether the bias of each column, [matrices, columns] or zeros, is packed in front of the rows.
template <typename T>
struct Bias {
  bool is_packed = false;
  const T* values = nullptr;
};

template <typename Acc, int kBytes>
constexpr int64_t padded_columns(int64_t columns) {
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount;
  return round_up(columns, kCount);
}

// target[c] = the bias of column `first` + c, or zero past the last one and without biases.
template <typename T, typename Stored>
RBM_INLINE void pack_bias(const Bias<T>& bias, int64_t first, int64_t filled, int64_t width, Stored* target) {
  for (int64_t c = 0; c < width; ++c) {
    const bool is_zero = bias.values == nullptr || c >= filled;
    target[c] = is_zero ? Stored(Accumulation<T>(0)) : static_cast<Stored>(bias.values[first + c]);
  }
}

// Loads `count` numbers of a row into a cache. A panel has too few bytes of each row for the processor to load them
// ahead.
template <typename T>
RBM_INLINE void prefetch(const T* numbers, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t c = 0; c < count; c += kLine) __builtin_prefetch(numbers + c);
}

// Packs panel `panel` of matrix `matrix`, with zeros past its last column. With `bias`, the expert's bias precedes the
// rows, or zeros if the pointer in it is null.
template <int kBytes, typename T, typename Stored>
RBM_INLINE void pack_lanes(const Unpacked<T>& m, int64_t matrix, int64_t panel, const Bias<T>& bias, Stored* packed) {
  using Acc = Accumulation<T>;
  constexpr int64_t kWidth = panel_width<Acc, kBytes>();
  const int64_t padded = padded_columns<Acc, kBytes>(m.columns), first = panel * kWidth;
  const int64_t width = std::min(kWidth, padded - first), filled = std::min(kWidth, m.columns - first);
  const T* const source = m.values + matrix * m.matrix_stride + first * m.column_stride;
  Stored* target = packed + (matrix * padded + first) * (m.rows + bias.is_packed);
  if (bias.is_packed) {
    pack_bias(bias, matrix * m.columns + first, filled, width, target);
    target += width;
  }
  if (m.column_stride == 1) {
    for (int64_t k = 0; k < m.rows; ++k) {
      if (k + kPrefetchRows < m.rows) prefetch(source + (k + kPrefetchRows) * m.row_stride, filled);
      for (int64_t c = 0; c < filled; ++c) target[k * width + c] = static_cast<Stored>(source[k * m.row_stride + c]);
    }
  } else {
    constexpr int kCount = Lanes<Acc, kBytes>::kCount;
    int64_t c = 0;
    for (; c + kCount <= filled; c += kCount) {
      int64_t k = 0;
      if constexpr (std::is_same_v<Stored, Acc>) {
        for (; k + kCount <= m.rows; k += kCount) {
          transpose<kBytes>(source + k + c * m.column_stride, m.column_stride, target + k * width + c, width);
        }
      }
      for (; k < m.rows; ++k) {
        for (int64_t i = c; i < c + kCount; ++i) {
          target[k * width + i] = static_cast<Stored>(source[k + i * m.column_stride]);
        }
      }
    }
    for (; c < filled; ++c) {
      for (int64_t k = 0; k < m.rows; ++k) target[k * width + c] = static_cast<Stored>(source[k + c * m.column_stride]);
    }
  }
  for (int64_t k = 0; k < m.rows; ++k) std::fill_n(target + k * width + filled, width - filled, Stored(Acc(0)));
}
RBM_DISPATCH(pack)

// The part of the packed layout that depends on this processor.
struct PackedSizes {
  int64_t lanes, width;

  template <typename Acc>
  static PackedSizes of() {
    const int64_t lanes = vector_bytes() / static_cast<int64_t>(sizeof(Acc));
    return {lanes, (vector_bytes() == 64 ? tile_vectors<64>() : tile_vectors<16>()) * lanes};
  }

  int64_t padded(int64_t columns) const { return round_up(columns, lanes); }
  int64_t panels(int64_t columns) const { return ceil_div(padded(columns), width); }
};

// Calls pack_panel(matrix, panel) for all panels of all matrices, in parallel.
template <typename T, typename PackPanel>
void pack_panels(const Unpacked<T>& m, const PackPanel& pack_panel) {
  const PackedSizes sizes = PackedSizes::of<Accumulation<T>>();
  const int64_t panels = sizes.panels(m.columns);
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplications / std::max<int64_t>(1, m.rows * sizes.width));
  parallel_for(0, m.matrices * panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_panel(i / panels, i % panels);
  });
}

// All panels of all matrices, packed for this processor's vectors.
template <typename T, typename Stored>
void pack_into(const Unpacked<T>& m, const Bias<T>& bias, Stored* packed) {
  pack_panels(m, [&](int64_t matrix, int64_t panel) { pack(m, matrix, panel, bias, packed); });
}

}  // namespace rbm::cpu
