// Products of bfloat16 on processors with AVX512-BF16. One instruction multiplies two pairs of bfloat16 numbers per lane and
// adds both products, which are exact, to a float32 sum: twice the multiplications of float32 vectors, and rows are read as
// they are. The inner dimension is therefore taken two numbers at a time; an odd one ends with a zero.
#pragma once

#include <cstdint>
#include <cstring>

#include "outer_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RBM_AVX512_BF16 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")))
#endif

namespace rbm::cpu {

// Two neighbours of the inner dimension, the first in the lower half. Rows begin at any even address.
struct __attribute__((packed, aligned(2))) BFloat16Pair {
  uint32_t bits;
};

// How many numbers of the inner dimension one left operand of a tile holds.
template <typename Operand>
constexpr int64_t kNumbersOf = std::is_same_v<Operand, BFloat16Pair> ? 2 : 1;

template <typename Operand>
constexpr int64_t operands_of(int64_t numbers) {
  return (numbers + kNumbersOf<Operand> - 1) / kNumbersOf<Operand>;
}

// A build with RBM_MOST_VECTOR_BYTES takes the code that other processors take.
inline bool has_bfloat16_products() {
#if defined(__x86_64__) && !defined(RBM_MOST_VECTOR_BYTES)
  static const bool has = vector_bytes() == 64 && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

// The upper half of a float32, rounded to nearest, to even between two, as PyTorch rounds. In integers, which the compiler
// turns into vectors.
RBM_INLINE uint16_t bfloat16_bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// pairs[i] = (first[i], second[i]), or (first[i], 0) where there is no second row.
RBM_INLINE void pair_rows(const BFloat16* first, const BFloat16* second, int64_t count, BFloat16Pair* pairs) {
  if (second == nullptr) {
    for (int64_t i = 0; i < count; ++i) pairs[i].bits = first[i].x;
  } else {
    for (int64_t i = 0; i < count; ++i) pairs[i].bits = first[i].x | static_cast<uint32_t>(second[i].x) << 16;
  }
}

// Row `row` as pairs, with a zero behind an odd number of entries.
RBM_INLINE void pair_neighbours(const BFloat16* row, int64_t count, BFloat16Pair* pairs) {
  std::memcpy(pairs, row, count * sizeof(BFloat16));
  if (count % 2 != 0) pairs[count / 2].bits = row[count - 1].x;
}

// pack_lanes without biases for pairs: every two rows of a matrix become one.
template <int kBytes>
RBM_INLINE void pack_pairs_lanes(const Unpacked<BFloat16>& m, int64_t matrix, int64_t panel, BFloat16Pair* packed) {
  constexpr int64_t kWidth = panel_width<float, kBytes>(), kCount = Lanes<float, kBytes>::kCount;
  const int64_t padded = padded_columns<float, kBytes>(m.columns), first = panel * kWidth;
  const int64_t width = std::min(kWidth, padded - first), filled = std::min(kWidth, m.columns - first);
  const int64_t whole = m.rows / 2, steps = operands_of<BFloat16Pair>(m.rows);
  const BFloat16* const source = m.values + matrix * m.matrix_stride + first * m.column_stride;
  BFloat16Pair* const target = packed + (matrix * padded + first) * steps;
  if (m.column_stride == 1) {
    for (int64_t k = 0; k < steps; ++k) {
      const BFloat16* const row = source + 2 * k * m.row_stride;
      pair_rows(row, k < whole ? row + m.row_stride : nullptr, filled, target + k * width);
    }
  } else {
    // Neighbours are adjacent: a pair is a number of 32 bits, and packing a transposition.
    const bool are_aligned = m.column_stride % 2 == 0 && reinterpret_cast<uintptr_t>(source) % sizeof(float) == 0;
    int64_t c = 0;
    for (; are_aligned && c + kCount <= filled; c += kCount) {
      int64_t k = 0;
      for (; k + kCount <= whole; k += kCount) {
        transpose<kBytes>(
            reinterpret_cast<const float*>(source + 2 * k + c * m.column_stride), m.column_stride / 2,
            reinterpret_cast<float*>(target + k * width + c), width);
      }
      for (; k < steps; ++k) {
        for (int64_t i = c; i < c + kCount; ++i) {
          pair_neighbours(source + 2 * k + i * m.column_stride, k < whole ? 2 : 1, target + k * width + i);
        }
      }
    }
    for (; c < filled; ++c) {
      for (int64_t k = 0; k < steps; ++k) {
        pair_neighbours(source + 2 * k + c * m.column_stride, k < whole ? 2 : 1, target + k * width + c);
      }
    }
  }
  for (int64_t k = 0; k < steps; ++k) std::memset(target + k * width + filled, 0, (width - filled) * sizeof(BFloat16Pair));
}
RBM_DISPATCH(pack_pairs)

// All panels of all matrices.
inline std::unique_ptr<BFloat16Pair[]> pack_all_pairs(const Unpacked<BFloat16>& m) {
  const PackedSizes sizes = PackedSizes::of<float>();
  const int64_t panels = sizes.panels(m.columns), steps = operands_of<BFloat16Pair>(m.rows);
  auto packed = scratch<BFloat16Pair>(m.matrices * steps * sizes.padded(m.columns));
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplications / std::max<int64_t>(1, m.rows * sizes.width));
  parallel_for(0, m.matrices * panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_pairs(m, i / panels, i % panels, packed.get());
  });
  return packed;
}

#if defined(__x86_64__)

// outer_tile for pairs, compiled for its own kind of processor: sums[r * kVectors + v], vectors of 16 float32.
template <int kRows, int kVectors>
RBM_AVX512_BF16 __attribute__((noinline)) void pair_tile(
    const BFloat16Pair* const* left, int64_t left_stride, const BFloat16Pair* right, int64_t right_stride, int64_t count,
    float* sums) {
  __m512 totals[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < count; ++i) {
    __m512bh columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(right + (i + kPrefetchRows) * right_stride + v * 16);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = reinterpret_cast<__m512bh>(_mm512_loadu_ps(reinterpret_cast<const float*>(right + i * right_stride + v * 16)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto numbers = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left[r][i * left_stride].bits)));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm512_dpbf16_ps(totals[r][v], numbers, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + (r * kVectors + v) * 16, totals[r][v]);
  }
}

#endif

// outer_tile for operands of either kind.
template <int kBytes, int kRows, int kVectors, typename Operand, typename Vector>
RBM_INLINE void product_tile(
    const Operand* const* left, int64_t left_stride, const Operand* right, int64_t right_stride, int64_t count,
    Vector (&sums)[kRows][kVectors]) {
  if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
#if defined(__x86_64__)
    pair_tile<kRows, kVectors>(left, left_stride, right, right_stride, count, reinterpret_cast<float*>(sums));
#endif
  } else {
    outer_tile<kBytes, kRows, kVectors>(left, left_stride, right, right_stride, count, sums);
  }
}

}  // namespace rbm::cpu
