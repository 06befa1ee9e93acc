// Products of rows and 8-bit integer experts, summed in 32 bits. They are exact, so every processor gets the same sums.
//
// An expert is stored in panels of 16 columns. A panel has lines of 64 bytes: the scales of its columns, their biases,
// -128 times the sums of their weights (int32), and then, for every four features, four weights of each column. Such a
// line is one vector of AVX-512, which multiplies unsigned with signed numbers and adds four products at once, or two
// vectors of AVX2. The format is the same on every processor. The rows' numbers and all weights are between -127 and
// 127.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RBM_VNNI __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512vnni,avx2,fma")))
#endif

namespace rbm::cpu {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kHeadLines = 3;
// A sum of this many products of 127 and 127 fits in 32 bits.
constexpr int64_t kMostInt8Features = 1 << 17;
// A row with no number as large as this counts as zeros: 127 / number must be finite.
constexpr float kLeastOfRow = 1e-30f;
constexpr float kMostNumber = 127.0f;

constexpr int64_t panels_of(int64_t outputs) { return ceil_div(outputs, kPanelColumns); }
constexpr int64_t groups_of(int64_t features) { return ceil_div(features, 4); }

// Some rows of one expert times some panels. Rows start at their first number; panels are `panel_bytes` apart.
struct Int8Tile {
  const uint8_t* rows[6];
  float row_scales[6], gates[6];
  float* sums[6];  // += gate * (integer * (row scale * column scale) + bias)
  const int8_t* panels;
  int64_t panel_bytes, groups;
};

// numbers = row * 127 / |row|max, rounded to the nearest, ties to even, plus `shift`. Returns the scale for the
// inverse. A non-finite row becomes zeros with scale NaN. This is a plain loop, vectorised wherever it is inlined.
RBM_INLINE float quantize_row(const float* row, int64_t features, int64_t padded, uint8_t shift, uint8_t* numbers) {
  // The bit patterns of positive numbers have the same order as the numbers; infinity and NaN come last.
  int32_t largest_bits = 0;
  for (int64_t d = 0; d < features; ++d) {
    int32_t bits;
    std::memcpy(&bits, row + d, sizeof(bits));
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  const bool is_finite = largest_bits < 0x7f800000, is_zero = largest < kLeastOfRow;
  std::memset(numbers, shift, padded);
  if (!is_finite || is_zero) return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const float factor = kMostNumber / largest;
  for (int64_t d = 0; d < features; ++d) {
    numbers[d] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_nearbyintf(row[d] * factor)) + shift);
  }
  return largest / kMostNumber;
}

// Each kind of processor defines the shift of its rows' numbers, the maximum height of a tile, how many panels a tile
// of a given height processes at once, and the tiles.
struct PlainInt8 {
  static constexpr uint8_t kShift = 0;
  static constexpr int kMostRows = 1;
  static constexpr int panels_at_once(int) { return 1; }

  static float quantize(const float* row, int64_t features, int64_t padded, uint8_t* numbers) {
    return quantize_row(row, features, padded, kShift, numbers);
  }

  template <int kRows, int kPanels>
  static void multiply(const Int8Tile& tile) {
    static_assert(kRows == 1 && kPanels == 1);
    int32_t totals[kPanelColumns] = {};
    const int8_t* line = tile.panels + kHeadLines * kLineBytes;
    for (int64_t g = 0; g < tile.groups; ++g, line += kLineBytes) {
      const uint8_t* const numbers = tile.rows[0] + 4 * g;
      for (int c = 0; c < kPanelColumns; ++c) {
        for (int i = 0; i < 4; ++i) totals[c] += static_cast<int8_t>(numbers[i]) * line[4 * c + i];
      }
    }
    float head[2][kPanelColumns];
    std::memcpy(head, tile.panels, sizeof(head));
    for (int c = 0; c < kPanelColumns; ++c) {
      const float answer = static_cast<float>(totals[c]) * (tile.row_scales[0] * head[0][c]) + head[1][c];
      tile.sums[0][c] += tile.gates[0] * answer;
    }
  }
};

#if defined(__x86_64__)

struct Avx2Int8 {
  static constexpr uint8_t kShift = 0;
  static constexpr int kMostRows = 4;
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  RBM_AVX2 static float quantize(const float* row, int64_t features, int64_t padded, uint8_t* numbers) {
    return quantize_row(row, features, padded, kShift, numbers);
  }

  // AVX2 also multiplies unsigned with signed numbers, but adds two products in 16 bits. With |number| and a weight
  // that takes the number's sign, they sum to at most 2 * 127 * 127, which fits in 16 bits.
  template <int kRows, int kPanels>
  RBM_AVX2 static void multiply(const Int8Tile& tile) {
    constexpr int kVectors = 2 * kPanels;
    __m256i totals[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm256_setzero_si256();
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t g = 0; g < tile.groups; ++g) {
      const int8_t* const line = tile.panels + (kHeadLines + g) * kLineBytes;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, tile.rows[r] + 4 * g, sizeof(four));
        const __m256i numbers = _mm256_set1_epi32(four), sizes = _mm256_abs_epi8(numbers);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const int8_t* const place = line + v / 2 * tile.panel_bytes + v % 2 * 32;
          const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
          const __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(weights, numbers));
          totals[r][v] = _mm256_add_epi32(totals[r][v], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256 row_scale = _mm256_set1_ps(tile.row_scales[r]), gate = _mm256_set1_ps(tile.gates[r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int8_t* const panel = tile.panels + v / 2 * tile.panel_bytes + v % 2 * 32;
        const __m256 scale = _mm256_mul_ps(row_scale, _mm256_loadu_ps(reinterpret_cast<const float*>(panel)));
        const __m256 bias = _mm256_loadu_ps(reinterpret_cast<const float*>(panel + kLineBytes));
        float* const target = tile.sums[r] + 8 * v;
        const __m256 answer = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[r][v]), scale, bias);
        _mm256_storeu_ps(target, _mm256_fmadd_ps(gate, answer, _mm256_loadu_ps(target)));
      }
    }
  }
};

struct VnniInt8 {
  static constexpr uint8_t kShift = 128;
  static constexpr int kMostRows = 6;
  static constexpr int panels_at_once(int rows) { return rows <= 2 ? 8 : 4; }

  RBM_VNNI static float quantize(const float* row, int64_t features, int64_t padded, uint8_t* numbers) {
    return quantize_row(row, features, padded, kShift, numbers);
  }

  // The rows' numbers are unsigned, shifted by 128, so sums start at -128 times the sum of the weights.
  template <int kRows, int kPanels>
  RBM_VNNI static void multiply(const Int8Tile& tile) {
    __m512i totals[kRows][kPanels];
#pragma GCC unroll 8
    for (int v = 0; v < kPanels; ++v) {
      const __m512i first = _mm512_loadu_si512(tile.panels + v * tile.panel_bytes + 2 * kLineBytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) totals[r][v] = first;
    }
    for (int64_t g = 0; g < tile.groups; ++g) {
      const int8_t* const line = tile.panels + (kHeadLines + g) * kLineBytes;
      __m512i weights[kPanels];
#pragma GCC unroll 8
      for (int v = 0; v < kPanels; ++v) weights[v] = _mm512_loadu_si512(line + v * tile.panel_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, tile.rows[r] + 4 * g, sizeof(four));
        const __m512i numbers = _mm512_set1_epi32(four);
#pragma GCC unroll 8
        for (int v = 0; v < kPanels; ++v) {
          // Inline assembly: with the intrinsic, GCC 12 copies and stores every sum.
          asm("vpdpbusd %2, %1, %0" : "+v"(totals[r][v]) : "v"(numbers), "v"(weights[v]));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512 row_scale = _mm512_set1_ps(tile.row_scales[r]), gate = _mm512_set1_ps(tile.gates[r]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanels; ++v) {
        const int8_t* const panel = tile.panels + v * tile.panel_bytes;
        float* const target = tile.sums[r] + kPanelColumns * v;
        const __m512 sum = __builtin_convertvector((__v16si)totals[r][v], __m512);
        const __m512 scale = _mm512_mul_ps(row_scale, _mm512_loadu_ps(panel));
        const __m512 answer = _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(panel + kLineBytes));
        _mm512_storeu_ps(target, _mm512_fmadd_ps(gate, answer, _mm512_loadu_ps(target)));
      }
    }
  }
};

inline bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has && vector_bytes() == 64;
}

#endif

// Calls act(kind) with the kind of this processor.
template <typename Act>
auto with_int8_kind(const Act& act) {
#if defined(__x86_64__)
  if (has_vnni()) return act(VnniInt8{});
  if (vector_bytes() >= 32) return act(Avx2Int8{});
#endif
  return act(PlainInt8{});
}

}  // namespace rbm::cpu
