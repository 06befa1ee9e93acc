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

// Of kColumnTiles registers of columns, the second half is `apart` pairs after the first one.
template <int kColumnTiles>
constexpr int64_t kHalfWidth = std::max(kColumnTiles / 2, 1) * kRegisterWidth;
template <int kColumnTiles>
constexpr int64_t column_of(int64_t tile, int64_t apart) {
  const int64_t column = tile * kRegisterWidth;
  return column < kHalfWidth<kColumnTiles> ? column : apart + column - kHalfWidth<kColumnTiles>;
}

// sums [16 kRowTiles, 16 kColumnTiles] = left x right. `left` has a multiple of 16 pairs per row, with zeros after
// `steps`; `right` has `steps` rows, of columns that are adjacent if `apart` is kHalfWidth. `ahead` requests the lines
// of the next 16 rows, which the processor would load too late by itself: because it stops at every page if they come
// from memory, and because the registers wait for the L2 cache otherwise. meanwhile(i) is called for every
// kRegisterRows steps, while the registers are busy.
template <typename Tiles, int kRowTiles, int kColumnTiles, typename Meanwhile>
RBM_INLINE void multiply_block(
    const BFloat16Pair* left, int64_t left_stride, const BFloat16Pair* right, int64_t right_stride, int64_t apart,
    int64_t steps, bool ahead, float* sums, const Meanwhile& meanwhile) {
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
    int64_t stride = right_stride, half = apart;
    if (steps - k < kRegisterRows) {
      constexpr int64_t kWidth = kColumnTiles * kRegisterWidth;
      std::memset(rest, 0, sizeof(rest));
      for (int64_t r = 0; r < steps - k; ++r) {
        for (int64_t c = 0; c < kColumnTiles; ++c) {
          BFloat16Pair* const target = rest + r * kWidth + c * kRegisterWidth;
          std::memcpy(target, rows + r * stride + column_of<kColumnTiles>(c, apart), 4 * kRegisterWidth);
        }
      }
      rows = rest;
      stride = kWidth;
      half = kHalfWidth<kColumnTiles>;
    }
    if (ahead && k + kRegisterRows < steps) {
      const BFloat16Pair* const next = right + (k + kRegisterRows) * right_stride;
      for (int64_t r = 0; r < kRegisterRows; ++r) {
        for (int64_t c = 0; c < kColumnTiles; ++c) {
          __builtin_prefetch(next + r * right_stride + column_of<kColumnTiles>(c, apart));
        }
      }
    }
    Tiles::template load<kLeft>(left + k, left_stride);
    if constexpr (kRowTiles == 2) Tiles::template load<kLeft + 1>(left + k + kRegisterRows * left_stride, left_stride);
    each(kColumns, [&]<int c>() __attribute__((always_inline)) {
      if constexpr (c % 2 == 0) {  // two loads overlap
        const auto load = [&]<int t>() __attribute__((always_inline)) {
          Tiles::template load<kRight + t % 2>(rows + column_of<kColumnTiles>(t, half), stride);
        };
        load.template operator()<c>();
        if constexpr (c + 1 < kColumnTiles) load.template operator()<c + 1>();
      }
      Tiles::template multiply<c * kRowTiles, kLeft, kRight + c % 2>();
      if constexpr (kRowTiles == 2) Tiles::template multiply<c * kRowTiles + 1, kLeft + 1, kRight + c % 2>();
    });
    meanwhile(k / kRegisterRows);
  }
  each(kColumns, [&]<int c>() __attribute__((always_inline)) {
    constexpr int64_t kStride = kColumnTiles * kRegisterWidth;
    Tiles::template store<c * kRowTiles>(sums + c * kRegisterWidth, kStride);
    if constexpr (kRowTiles == 2) {
      Tiles::template store<c * kRowTiles + 1>(sums + c * kRegisterWidth + kRegisterRows * kStride, kStride);
    }
  });
}

// Rows [first, last) of the products, [last, kColumns], of a left side with the columns from `column` on.
template <int kColumns>
struct Products {
  int64_t column;
  const float* numbers;
  int64_t first, last;
};

// Weights that are multiplied later, and which the L2 cache requests meanwhile, some lines at each step.
class Upcoming {
 public:
  Upcoming() = default;
  // `bytes` from `weights` on, and as many that are `apart` bytes after them unless it is 0, within about `steps`
  // steps.
  Upcoming(const void* weights, int64_t bytes, int64_t apart, int64_t steps)
      : next_(static_cast<const char*>(weights)),
        end_(next_ + bytes),
        apart_(apart),
        at_once_(std::min(kMostLines, ceil_div(bytes, kLine * std::max<int64_t>(1, steps)))) {}

  RBM_INLINE void request() {
    for (int64_t i = 0; i < at_once_ && next_ < end_; ++i, next_ += kLine) {
      __builtin_prefetch(next_, 0, 2);
      if (apart_ != 0) __builtin_prefetch(next_ + apart_, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64, kMostLines = 16;
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t apart_ = 0, at_once_ = 0;
};

// The left side of at most kBlockRows rows, each with room for `pairs` pairs.
class LeftBlock {
 public:
  explicit LeftBlock(int64_t pairs)
      // One register row more than needed: rows at multiples of 1 KB would compete for places in the cache.
      : stride_(round_up(pairs, kRegisterWidth) + kRegisterWidth),
        pairs_(scratch<BFloat16Pair>(kBlockRows * stride_)) {}

  Upcoming upcoming;

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

  // Multiplies `valid` rows with the columns [begin, end), whose number is a multiple of 16. panel(column, width)
  // returns the right side of `width` columns, which is the stride too, for each kBlockColumns of them. act(products)
  // is called for parts of the products, of some rows and columns. `is_new` tells that the right side is probably in no
  // cache.
  template <typename Tiles, typename Panel, typename Act>
  RBM_INLINE void multiply(
      Tiles, int64_t valid, int64_t begin, int64_t end, int64_t steps, bool is_new, const Panel& panel,
      const Act& act) {
    int64_t column = begin;
    const auto whole_parts = [&]<int kRowTiles, int kColumnTiles>() __attribute__((always_inline)) {
      constexpr int64_t kWidth = kColumnTiles * kRegisterWidth;
      Parts<Tiles, kRowTiles, kColumnTiles, Act> parts(this, valid, steps, is_new, act);
      for (; column + kWidth <= end; column += kWidth) {
        const int64_t inside = (column - begin) % kBlockColumns, first = column - inside;
        const int64_t width = std::min(kBlockColumns, end - first);
        parts.multiply(panel(first, width) + inside, width, kHalfWidth<kColumnTiles>, column);
      }
      parts.finish();
    };
    if (valid > kRegisterRows) {
      whole_parts.template operator()<2, 2>();
      whole_parts.template operator()<2, 1>();
      return;
    }
    // Four registers of sums, because the next product of one has to wait for the last.
    whole_parts.template operator()<1, 4>();
    whole_parts.template operator()<1, 3>();
    whole_parts.template operator()<1, 2>();
    whole_parts.template operator()<1, 1>();
  }

  // The same for whole blocks of columns, and as many that are `apart` pairs after them. The first half of the numbers
  // of a row of a part are products of the former, the second half those of the latter.
  template <typename Tiles, typename Panel, typename Act>
  RBM_INLINE void multiply_both(
      Tiles, int64_t valid, int64_t begin, int64_t end, int64_t apart, int64_t steps, bool is_new, const Panel& panel,
      const Act& act) {
    const auto all = [&]<int kRowTiles, int kColumnTiles>() __attribute__((always_inline)) {
      Parts<Tiles, kRowTiles, kColumnTiles, Act> parts(this, valid, steps, is_new, act);
      for (int64_t column = begin; column < end; column += kHalfWidth<kColumnTiles>) {
        const int64_t inside = (column - begin) % kBlockColumns;
        parts.multiply(panel(column - inside, kBlockColumns) + inside, kBlockColumns, apart, column);
      }
      parts.finish();
    };
    if (valid > kRegisterRows) return all.template operator()<2, 2>();
    all.template operator()<1, 4>();
  }

 private:
  // Parts of columns, one after the other. A part's products are used while the next part is multiplied: the
  // processor's vector units are idle then.
  template <typename Tiles, int kRowTiles, int kColumnTiles, typename Act>
  class Parts {
   public:
    RBM_INLINE Parts(LeftBlock* left, int64_t valid, int64_t steps, bool is_new, const Act& act)
        : left_(left), valid_(valid), steps_(steps), is_new_(is_new), act_(act) {}

    RBM_INLINE void multiply(const BFloat16Pair* right, int64_t right_stride, int64_t apart, int64_t column) {
      const int64_t rows = waiting_.last, rounds = std::max<int64_t>(1, ceil_div(steps_, kRegisterRows));
      const int64_t at_once = ceil_div(rows, rounds);
      float* const target = numbers_[waiting_.numbers == numbers_[0]];
      multiply_block<Tiles, kRowTiles, kColumnTiles>(
          left_->row(0), left_->stride_, right, right_stride, apart, steps_, is_new_ || kRowTiles == 2, target,
          [&](int64_t step) __attribute__((always_inline)) {
            left_->upcoming.request();
            waiting_.first = step * at_once;
            waiting_.last = std::min(waiting_.first + at_once, rows);
            if (waiting_.first < rows) act_(waiting_);
          });
      waiting_ = {column, target, 0, valid_};
      if (steps_ == 0) finish();  // the next part has no steps either
    }
    RBM_INLINE void finish() {
      if (waiting_.last > 0) act_(waiting_);
      waiting_.last = 0;
    }

   private:
    LeftBlock* left_;
    int64_t valid_, steps_;
    bool is_new_;
    const Act& act_;
    Products<kColumnTiles * kRegisterWidth> waiting_{};  // those of the last part that have not been used
    alignas(64) float numbers_[2][kRowTiles * kRegisterRows * kColumnTiles * kRegisterWidth];
  };

  int64_t stride_;
  Scratch<BFloat16Pair> pairs_;
};

template <>
inline constexpr int kVectorBytesFor<LeftBlock*> = 64;

}  // namespace rbm::cpu
