// Products of bfloat16 on processors with AVX512-BF16. One instruction multiplies two bfloat16 pairs per lane and adds
// both exact products to a float32 sum: twice the multiplications of a float32 vector, and rows need no conversion. So
// the inner dimension is processed two elements at a time; an odd one is padded with a zero. The instruction treats
// subnormal numbers, below 1.2e-38, as zero.
#pragma once

#include <cstdint>
#include <cstring>

#include "outer_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RBM_AVX512_BF16 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")))
#endif

namespace rbm::cpu {

// Two neighbouring elements of the inner dimension, the first in the lower half. A row may start at any even address.
struct __attribute__((packed, aligned(2))) BFloat16Pair {
  uint32_t bits;
};

// Only processors with AVX-512 multiply pairs.
template <>
inline constexpr int kVectorBytesFor<BFloat16Pair*> = 64;

// Elements of the inner dimension per operand of a tile.
template <typename Operand>
constexpr int64_t kNumbersOf = std::is_same_v<Operand, BFloat16Pair> ? 2 : 1;

template <typename Operand>
constexpr int64_t operands_of(int64_t numbers) {
  return ceil_div(numbers, kNumbersOf<Operand>);
}

// Builds with RBM_MOST_VECTOR_BYTES run the code of other processors.
inline bool has_bfloat16_products() {
#if defined(__x86_64__) && !defined(RBM_MOST_VECTOR_BYTES)
  static const bool has = vector_bytes() == 64 && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

// The bits of a float32 rounded to bfloat16: to nearest, ties to even, as in PyTorch. Integer operations, so that the
// compiler vectorises them.
RBM_INLINE uint16_t bfloat16_bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// The same for a vector, in its lower halves. Compilers unroll a loop over its lanes before they could vectorise it.
template <int kBytes>
using Words __attribute__((vector_size(kBytes))) = uint32_t;

template <int kBytes>
RBM_INLINE Words<kBytes> rounded_bits(const typename Lanes<float, kBytes>::Vector& numbers) {
  Words<kBytes> bits;
  std::memcpy(&bits, &numbers, sizeof(bits));
  const auto is_nan = reinterpret_cast<Words<kBytes>>((bits & 0x7fffffff) > 0x7f800000);
  const Words<kBytes> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (is_nan & 0x7fc0) | (~is_nan & rounded);
}

template <int kBytes>
RBM_INLINE void store_rounded(BFloat16* target, const typename Lanes<float, kBytes>::Vector& numbers) {
  const Words<kBytes> bits = rounded_bits<kBytes>(numbers);
  constexpr int kCount = Lanes<float, kBytes>::kCount;
  uint32_t words[kCount];
  uint16_t halves[kCount];
  std::memcpy(words, &bits, sizeof(words));
  for (int lane = 0; lane < kCount; ++lane) halves[lane] = static_cast<uint16_t>(words[lane]);
  std::memcpy(target, halves, sizeof(halves));
}

#if defined(__x86_64__)

// The same by an instruction of AVX512-BF16, for which subnormal numbers are zero.
RBM_INLINE void store_bfloat16(BFloat16* target, const Lanes<float, 64>::Vector& numbers) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float LooseHalf __attribute__((vector_size(32), aligned(2), may_alias));
  Half rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(numbers));
  *reinterpret_cast<LooseHalf*>(target) = rounded;
}

#endif

// out[i] = numbers[i], rounded to bfloat16.
template <int kBytes>
RBM_INLINE void round_all_lanes(const float* numbers, int64_t count, BFloat16* out) {
  for (int64_t i = 0; i < count; ++i) out[i].x = bfloat16_bits(numbers[i]);
}
RBM_DISPATCH(round_all)

// pairs[i] = (first[i], second[i]), or (first[i], 0) if `second` is null.
RBM_INLINE void pair_rows(const BFloat16* first, const BFloat16* second, int64_t count, BFloat16Pair* pairs) {
  if (second == nullptr) {
    for (int64_t i = 0; i < count; ++i) pairs[i].bits = first[i].x;
  } else {
    for (int64_t i = 0; i < count; ++i) pairs[i].bits = first[i].x | static_cast<uint32_t>(second[i].x) << 16;
  }
}

// The pairs of `count` elements of a row; an odd element is paired with zero.
RBM_INLINE void pair_neighbours(const BFloat16* row, int64_t count, BFloat16Pair* pairs) {
  std::memcpy(pairs, row, count * sizeof(BFloat16));
  if (count % 2 != 0) pairs[count / 2].bits = row[count - 1].x;
}

// Packed rows from `step` on of one column, whose `count` elements are adjacent.
RBM_INLINE void pair_column(const BFloat16* column, int64_t step, int64_t count, int64_t width, BFloat16Pair* packed) {
  for (; 2 * step < count; ++step) {
    pair_neighbours(column + 2 * step, std::min<int64_t>(2, count - 2 * step), packed + step * width);
  }
}

// As pack_lanes, for pairs: two rows of the matrix become one packed row. A bias takes half of one.
template <int kBytes>
RBM_INLINE void pack_pairs_lanes(
    const Unpacked<BFloat16>& m, int64_t matrix, int64_t panel, const Bias<BFloat16>& bias, BFloat16Pair* packed) {
  constexpr int64_t kWidth = panel_width<float, kBytes>(), kCount = Lanes<float, kBytes>::kCount;
  const int64_t padded = padded_columns<float, kBytes>(m.columns), first = panel * kWidth;
  const int64_t width = std::min(kWidth, padded - first), filled = std::min(kWidth, m.columns - first);
  const int64_t whole = m.rows / 2, steps = operands_of<BFloat16Pair>(m.rows);
  const BFloat16* const source = m.values + matrix * m.matrix_stride + first * m.column_stride;
  BFloat16Pair* target = packed + (matrix * padded + first) * (2 * steps + bias.is_packed) / 2;
  if (bias.is_packed) {
    pack_bias(bias, matrix * m.columns + first, filled, width, reinterpret_cast<BFloat16*>(target));
    target += width / 2;
  }
  if (m.column_stride == 1) {
    for (int64_t k = 0; k < steps; ++k) {
      const BFloat16* const row = source + 2 * k * m.row_stride;
      for (int64_t next = 2 * k + kPrefetchRows; next < std::min(2 * k + kPrefetchRows + 2, m.rows); ++next) {
        prefetch(source + next * m.row_stride, filled);
      }
      pair_rows(row, k < whole ? row + m.row_stride : nullptr, filled, target + k * width);
    }
  } else {
    // The elements of a pair are adjacent in memory, so packing is a transposition of 32-bit numbers.
    typename Lanes<float, kBytes>::Vector rows[kCount];
    int64_t c = 0;
    for (; c + kCount <= filled; c += kCount) {
      int64_t k = 0;
      for (; k + kCount <= whole; k += kCount) {
        for (int64_t i = 0; i < kCount; ++i) std::memcpy(&rows[i], source + 2 * k + (c + i) * m.column_stride, kBytes);
        store_transposed<kBytes>(reinterpret_cast<float*>(target + k * width + c), width, rows);
      }
      for (int64_t i = c; i < c + kCount; ++i) pair_column(source + i * m.column_stride, k, m.rows, width, target + i);
    }
    for (; c < filled; ++c) pair_column(source + c * m.column_stride, 0, m.rows, width, target + c);
  }
  for (int64_t k = 0; k < steps; ++k) std::fill_n(target + k * width + filled, width - filled, BFloat16Pair{});
}
RBM_DISPATCH(pack_pairs)

// As pack_into for other numbers: all panels of all matrices.
inline void pack_into(const Unpacked<BFloat16>& m, const Bias<BFloat16>& bias, BFloat16Pair* packed) {
  pack_panels(m, [&](int64_t matrix, int64_t panel) { pack_pairs(m, matrix, panel, bias, packed); });
}

// All panels of one matrix without biases, packed by this thread.
template <typename T, typename Operand>
void pack_matrix(const Unpacked<T>& m, Operand* packed) {
  const int64_t panels = PackedSizes::of<Accumulation<T>>().panels(m.columns);
  for (int64_t panel = 0; panel < panels; ++panel) {
    if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
      pack_pairs(m, 0, panel, Bias<T>{}, packed);
    } else {
      pack(m, 0, panel, Bias<T>{}, packed);
    }
  }
}

// The matrices without biases, packed as operands of either type.
template <typename Operand, typename T>
Scratch<Operand> pack_operands(const Unpacked<T>& m) {
  const int64_t padded = PackedSizes::of<Accumulation<T>>().padded(m.columns);
  auto packed = scratch<Operand>(m.matrices * operands_of<Operand>(m.rows) * padded);
  pack_into(m, Bias<T>{}, packed.get());
  return packed;
}

// Calls work(Operand{}) with the type of the operands that multiply rows of T on this processor.
template <typename T, typename Work>
void with_operand(const Work& work) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (has_bfloat16_products()) return work(BFloat16Pair{});
  }
  work(Accumulation<T>{});
}

#if defined(__x86_64__)

// As outer_tile, for pairs: sums[r * kAll + v] are vectors of 16 float32. Not inlined, because the callers are not
// compiled for AVX512-BF16. (Inline assembly could be, but GCC 12 then keeps the sums in memory: half as fast.)
template <int kRows, int kVectors, int kPanels>
RBM_AVX512_BF16 __attribute__((noinline)) void pair_tile(
    const BFloat16Pair* const* left, int64_t left_stride, const BFloat16Pair* const* panels, int64_t right_stride,
    int64_t count, float* sums) {
  constexpr int kAll = kPanels * kVectors;
  __m512 totals[kRows][kAll];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) totals[r][v] = _mm512_loadu_ps(sums + (r * kAll + v) * 16);
  }
  for (int64_t i = 0; i < count; ++i) {
    __m512bh columns[kAll];
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) {
      __builtin_prefetch(panels[v / kVectors] + (i + kPrefetchRows) * right_stride + v % kVectors * 16);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) {
      const auto* const column = panels[v / kVectors] + i * right_stride + v % kVectors * 16;
      columns[v] = reinterpret_cast<__m512bh>(_mm512_loadu_ps(reinterpret_cast<const float*>(column)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto numbers =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left[r][i * left_stride].bits)));
#pragma GCC unroll 8
      for (int v = 0; v < kAll; ++v) totals[r][v] = _mm512_dpbf16_ps(totals[r][v], numbers, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) _mm512_storeu_ps(sums + (r * kAll + v) * 16, totals[r][v]);
  }
}

#endif

// outer_tile or pair_tile, by the type of the operands.
template <
    int kBytes, int kRows, int kVectors, int kPanels, typename Operand, typename Stored, typename Vector,
    typename Places = EveryPlace>
RBM_INLINE void product_tile(
    const Operand* const* left, int64_t left_stride, const Stored* const* panels, int64_t right_stride, int64_t count,
    Vector (&sums)[kRows][kPanels * kVectors], const Places& places = {}) {
  if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
    static_assert(std::is_same_v<Places, EveryPlace>);
#if defined(__x86_64__)
    pair_tile<kRows, kVectors, kPanels>(left, left_stride, panels, right_stride, count, reinterpret_cast<float*>(sums));
#endif
  } else {
    outer_tile<kBytes, kRows, kVectors, kPanels>(left, left_stride, panels, right_stride, count, sums, places);
  }
}

}  // namespace rbm::cpu
