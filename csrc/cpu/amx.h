// Products of bfloat16 with the tile registers of AMX, which Intel's server processors have. Each of eight registers
// has 16 rows of 64 bytes. One instruction multiplies 16 rows of 16 pairs with 16 columns, 16 times as much as an
// instruction of AVX512-BF16. Its right side has the form of packed pairs, so weights are packed once for both.
//
// RBM_AMX=0 in the environment avoids AMX. RBM_AMX=emulated computes the same with plain loops, for tests on any
// processor that has AVX512-BF16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "bfloat16_pairs.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rbm::cpu {

// Rows of a register; pairs, or sums, in each of them.
constexpr int64_t kRegisterRows = 16, kRegisterWidth = 16;
// Rows of the left side that are multiplied together: two registers.
constexpr int64_t kBlockRows = 2 * kRegisterRows;
// Columns of the right side that are multiplied together with one register of rows; a block has half of them.
constexpr int64_t kBlockColumns = 4 * kRegisterWidth;

#if defined(__x86_64__)

// The instructions. Inline assembly with a clobber, because GCC's intrinsics for loads do not say that they read
// memory.
struct AmxTiles {
  static void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } form;
    asm volatile("ldtilecfg %0" ::"m"(form));
  }
  static void end() { asm volatile("tilerelease"); }

  template <int kTile>
  static RBM_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static RBM_INLINE void load(const BFloat16Pair* source, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(4 * stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static RBM_INLINE void store(float* target, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(4 * stride), "i"(kTile) : "memory");
  }
  template <int kSums, int kLeft, int kRight>
  static RBM_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
  }
};

// The same in plain C++. Sums of even and of odd elements are added at the end, as by the instruction; subnormal
// numbers are kept.
struct EmulatedTiles {
  static void begin() { std::memset(tiles_, 0xff, sizeof(tiles_)); }  // NaN: a register must be set before use
  static void end() {}

  template <int kTile>
  static void zero() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  static void load(const BFloat16Pair* source, int64_t stride) {
    for (int64_t r = 0; r < kRegisterRows; ++r) std::memcpy(tiles_[kTile][r], source + r * stride, 64);
  }
  template <int kTile>
  static void store(float* target, int64_t stride) {
    for (int64_t r = 0; r < kRegisterRows; ++r) std::memcpy(target + r * stride, tiles_[kTile][r], 64);
  }
  template <int kSums, int kLeft, int kRight>
  static void multiply() {
    for (int64_t r = 0; r < kRegisterRows; ++r) {
      for (int64_t c = 0; c < kRegisterWidth; ++c) {
        float even = 0, odd = 0, sum;
        for (int64_t k = 0; k < kRegisterWidth; ++k) {
          const uint32_t left = tiles_[kLeft][r][k], right = tiles_[kRight][k][c];
          even += number(left << 16) * number(right << 16);
          odd += number(left & 0xffff0000) * number(right & 0xffff0000);
        }
        std::memcpy(&sum, &tiles_[kSums][r][c], sizeof(sum));
        sum += even + odd;
        std::memcpy(&tiles_[kSums][r][c], &sum, sizeof(sum));
      }
    }
  }

 private:
  static float number(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static inline thread_local uint32_t tiles_[8][kRegisterRows][kRegisterWidth];
};

#endif

enum class TileUnit { kNone, kAmx, kEmulated };

inline TileUnit find_tile_unit() {
#if defined(__x86_64__) && defined(__linux__)
  const char* const wanted = std::getenv("RBM_AMX");
  if (!has_bfloat16_products() || (wanted != nullptr && std::strcmp(wanted, "0") == 0)) return TileUnit::kNone;
  if (wanted != nullptr && std::strcmp(wanted, "emulated") == 0) return TileUnit::kEmulated;
  constexpr unsigned kAmxBFloat16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return TileUnit::kNone;
  if ((edx & kAmxBFloat16) == 0 || (edx & kAmxTile) == 0) return TileUnit::kNone;
  // Linux gives a process the registers if it asks. It refuses if a thread's signal stack has no room for them.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return TileUnit::kNone;
  return TileUnit::kAmx;
#else
  return TileUnit::kNone;
#endif
}

// Decided once per process.
inline TileUnit tile_unit() {
  static const TileUnit unit = find_tile_unit();
  return unit;
}

// Calls work(tiles) with the registers of this processor, if rows of Operand can be multiplied with any; otherwise
// returns false.
template <typename Operand, typename Work>
bool with_tiles(const Work& work) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
    const auto run = [&]<typename Tiles>(Tiles tiles) {
      Tiles::begin();
      work(tiles);
      Tiles::end();
      return true;
    };
    switch (tile_unit()) {
      case TileUnit::kAmx: return run(AmxTiles{});
      case TileUnit::kEmulated: return run(EmulatedTiles{});
      case TileUnit::kNone: break;
    }
  }
#endif
  return false;
}

// sums [16 kRowTiles, 16 kColumnTiles] = left x right. `left` has a multiple of 16 pairs per row, with zeros after
// `steps`; `right` has `steps` rows. `ahead` requests the lines of the next 16 of them, which the processor would load
// too late by itself: because it stops at every page if they come from memory, and because the registers wait for the
// L2 cache otherwise.
template <typename Tiles, int kRowTiles, int kColumnTiles>
RBM_INLINE void multiply_block(
    const BFloat16Pair* left, int64_t left_stride, const BFloat16Pair* right, int64_t right_stride, int64_t steps,
    bool ahead, float* sums) {
  constexpr auto kColumns = std::make_integer_sequence<int, kColumnTiles>{};
  constexpr int kLeft = 4, kRight = 6;  // the first registers of either side
  const auto each = [&]<int... c>(std::integer_sequence<int, c...>, const auto& act)
                        __attribute__((always_inline)) { (act.template operator()<c>(), ...); };
  each(kColumns, [&]<int c>() __attribute__((always_inline)) {
    Tiles::template zero<c * kRowTiles>();
    if constexpr (kRowTiles == 2) Tiles::template zero<c * kRowTiles + 1>();
  });
  BFloat16Pair rest[kRegisterRows * kColumnTiles * kRegisterWidth];
  for (int64_t k = 0; k < steps; k += kRegisterRows) {
    const BFloat16Pair* rows = right + k * right_stride;
    int64_t stride = right_stride;
    if (steps - k < kRegisterRows) {
      constexpr int64_t kWidth = kColumnTiles * kRegisterWidth;
      std::memset(rest, 0, sizeof(rest));
      for (int64_t r = 0; r < steps - k; ++r) std::memcpy(rest + r * kWidth, rows + r * stride, 4 * kWidth);
      rows = rest;
      stride = kWidth;
    }
    if (ahead && k + kRegisterRows < steps) {
      const BFloat16Pair* const next = right + (k + kRegisterRows) * right_stride;
      for (int64_t r = 0; r < kRegisterRows; ++r) {
        for (int64_t c = 0; c < kColumnTiles; ++c) __builtin_prefetch(next + r * right_stride + c * kRegisterWidth);
      }
    }
    Tiles::template load<kLeft>(left + k, left_stride);
    if constexpr (kRowTiles == 2) Tiles::template load<kLeft + 1>(left + k + kRegisterRows * left_stride, left_stride);
    each(kColumns, [&]<int c>() __attribute__((always_inline)) {
      if constexpr (c % 2 == 0) {  // two loads overlap
        Tiles::template load<kRight>(rows + c * kRegisterWidth, stride);
        if constexpr (c + 1 < kColumnTiles) Tiles::template load<kRight + 1>(rows + (c + 1) * kRegisterWidth, stride);
      }
      Tiles::template multiply<c * kRowTiles, kLeft, kRight + c % 2>();
      if constexpr (kRowTiles == 2) Tiles::template multiply<c * kRowTiles + 1, kLeft + 1, kRight + c % 2>();
    });
  }
  each(kColumns, [&]<int c>() __attribute__((always_inline)) {
    constexpr int64_t kStride = kColumnTiles * kRegisterWidth;
    Tiles::template store<c * kRowTiles>(sums + c * kRegisterWidth, kStride);
    if constexpr (kRowTiles == 2) {
      Tiles::template store<c * kRowTiles + 1>(sums + c * kRegisterWidth + kRegisterRows * kStride, kStride);
    }
  });
}

// Products [valid, kColumns] of the rows of a left side with the columns from `column` on.
template <int kColumns>
struct Products {
  int64_t column;
  const float* numbers;
};

// The left side of at most kBlockRows rows, each with room for `pairs` pairs.
class LeftBlock {
 public:
  explicit LeftBlock(int64_t pairs)
      // One register row more than needed: rows at multiples of 1 KB would compete for places in the cache.
      : stride_(round_up(pairs, kRegisterWidth) + kRegisterWidth),
        pairs_(scratch<BFloat16Pair>(kBlockRows * stride_)) {}

  int64_t stride() const { return stride_; }
  BFloat16Pair* row(int64_t r) { return pairs_.get() + r * stride_; }

  // Row r = `count` elements, then zeros to a whole register.
  RBM_INLINE void set(int64_t r, const BFloat16* source, int64_t count) {
    // A copy of a known size, because memcpy is slow for one that is not.
    typedef float Register __attribute__((vector_size(64), aligned(2), may_alias));
    auto* const target = reinterpret_cast<BFloat16*>(row(r));
    constexpr int64_t kNumbers = 2 * kRegisterWidth;
    int64_t i = 0;
    for (; i + kNumbers <= count; i += kNumbers) {
      *reinterpret_cast<Register*>(target + i) = *reinterpret_cast<const Register*>(source + i);
    }
    if (i == count) return;
    *reinterpret_cast<Register*>(target + i) = Register{};
    std::memcpy(target + i, source + i, (count - i) * sizeof(BFloat16));
  }

  // Calls act(products) with the products of `valid` rows and `width` columns, a multiple of 16 of at most
  // kBlockColumns, in parts. `is_new` tells that the right side is probably in no cache.
  template <typename Tiles, typename Act>
  RBM_INLINE void multiply(
      Tiles, int64_t valid, const BFloat16Pair* right, int64_t right_stride, int64_t steps, int64_t width, bool is_new,
      const Act& act) {
    alignas(64) float numbers[kBlockRows * kBlockColumns / 2];
    const auto part = [&]<int kRowTiles, int kColumnTiles>(int64_t column) __attribute__((always_inline)) {
      multiply_block<Tiles, kRowTiles, kColumnTiles>(
          row(0), stride_, right + column, right_stride, steps, is_new || kRowTiles == 2, numbers);
      act(Products<kColumnTiles * kRegisterWidth>{column, numbers});
    };
    if (valid > kRegisterRows) {
      int64_t column = 0;
      for (; column + 2 * kRegisterWidth <= width; column += 2 * kRegisterWidth) {
        part.template operator()<2, 2>(column);
      }
      if (column < width) part.template operator()<2, 1>(column);
      return;
    }
    // Four registers of sums, because the next product of one has to wait for the last.
    switch (width / kRegisterWidth) {
      case 4: return part.template operator()<1, 4>(0);
      case 3: return part.template operator()<1, 3>(0);
      case 2: return part.template operator()<1, 2>(0);
      case 1: return part.template operator()<1, 1>(0);
    }
  }

 private:
  int64_t stride_;
  Scratch<BFloat16Pair> pairs_;
};

template <>
inline constexpr int kVectorBytesFor<LeftBlock*> = 64;

}  // namespace rbm::cpu
