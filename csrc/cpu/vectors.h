// Vector lanes on the CPU. A wheel must run on any x86-64, for which a compiler may only assume SSE2, but these loops
// are several times faster with AVX-512. So hot functions are templates over the vector size in bytes, written with the
// vector types of GCC and Clang, compiled three times, and selected once by the features of the processor. Other
// architectures use 16 bytes.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../integers.h"

#define RBM_INLINE inline __attribute__((always_inline))

// Vectors wider than the baseline are only passed between functions that are inlined into one another, never through a
// call.
#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(__x86_64__)
#define RBM_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define RBM_AVX2 __attribute__((target("avx2,fma")))
#endif

// For functions with a single vector size: the compiler splits the vectors for each kind of processor, and the dynamic
// linker picks a version. Not with AddressSanitizer, whose runtime is not initialised yet when the linker does so.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define RBM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RBM_CLONES
#endif

namespace rbm::cpu {

using torch::headeronly::BFloat16;

// Bytes of the widest vectors of this processor. A build with RBM_MOST_VECTOR_BYTES=32 or 16 runs the code for older
// processors, so that it can be tested on this one.
inline int vector_bytes() {
#if defined(RBM_MOST_VECTOR_BYTES)
  return RBM_MOST_VECTOR_BYTES;
#elif defined(__x86_64__)
  static const int bytes = [] {
    const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    const bool has_256 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_512 ? 64 : has_256 ? 32 : 16;
  }();
  return bytes;
#else
  return 16;
#endif
}

// Vector size to compile if only one is compiled, which is faster; 0 for all.
#if defined(RBM_MOST_VECTOR_BYTES)
constexpr int kOnlyVectorBytes = RBM_MOST_VECTOR_BYTES;
#else
constexpr int kOnlyVectorBytes = 0;
#endif

// The only vector size for which functions with an argument of type T are compiled; 0 for all.
template <typename T>
constexpr int kVectorBytesFor = kOnlyVectorBytes;

// RBM_DISPATCH(name) defines name(arguments...) for a function template name_lanes<kBytes>(arguments...).
#if defined(__x86_64__)
#define RBM_DISPATCH(name)                                       \
  template <typename... Args>                                    \
  RBM_AVX512 void name##_avx512(const Args&... args) {           \
    name##_lanes<64>(args...);                                   \
  }                                                              \
  template <typename... Args>                                    \
  RBM_AVX2 void name##_avx2(const Args&... args) {               \
    name##_lanes<32>(args...);                                   \
  }                                                              \
  template <typename... Args>                                    \
  void name(const Args&... args) {                               \
    constexpr int kBytes = std::max({kVectorBytesFor<Args>...}); \
    if constexpr (kBytes == 64) {                                \
      name##_avx512(args...);                                    \
    } else if constexpr (kBytes == 32) {                         \
      name##_avx2(args...);                                      \
    } else if constexpr (kBytes == 16) {                         \
      name##_lanes<16>(args...);                                 \
    } else {                                                     \
      switch (vector_bytes()) {                                  \
        case 64: return name##_avx512(args...);                  \
        case 32: return name##_avx2(args...);                    \
        default: return name##_lanes<16>(args...);               \
      }                                                          \
    }                                                            \
  }
#else
#define RBM_DISPATCH(name)         \
  template <typename... Args>      \
  void name(const Args&... args) { \
    name##_lanes<16>(args...);     \
  }
#endif

// The type in which rows of T are summed.
template <typename T>
struct AccumulationOf {
  using type = float;
};
template <>
struct AccumulationOf<double> {
  using type = double;
};
template <typename T>
using Accumulation = typename AccumulationOf<T>::type;

template <typename Acc, int kBytes>
struct Lanes {
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(Acc));
  typedef Acc Vector __attribute__((vector_size(kBytes)));
  // For memory of any alignment.
  typedef Acc Loose __attribute__((vector_size(kBytes), aligned(alignof(Acc)), may_alias));
  typedef std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t> Mask __attribute__((vector_size(kBytes)));

  static RBM_INLINE void load(Vector& value, const Acc* source) { value = *reinterpret_cast<const Loose*>(source); }

  // A bfloat16 is the upper half of a float32.
  static RBM_INLINE void load(Vector& value, const BFloat16* source) {
#if defined(__x86_64__) && !defined(__clang__)
    // GCC 12 would load the numbers of the loop below one by one.
    if constexpr (kBytes >= 32) {
      struct Halves {
        BFloat16 numbers[kCount];
      };
      Mask words;
      asm("vpmovzxwd %1, %0" : "=v"(words) : "m"(*reinterpret_cast<const Halves*>(source)));
      value = reinterpret_cast<Vector>(words << 16);
      return;
    }
#endif
    uint16_t halves[kCount];
    uint32_t words[kCount];
    std::memcpy(halves, source, sizeof(halves));
    for (int lane = 0; lane < kCount; ++lane) words[lane] = static_cast<uint32_t>(halves[lane]) << 16;
    std::memcpy(&value, words, sizeof(value));
  }

  // Loads the first `count` lanes and sets the others to zero.
  template <typename T>
  static RBM_INLINE void load_first(Vector& value, const T* source, int64_t count) {
    T padded[kCount] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = source[i];
    load(value, padded);
  }

  static RBM_INLINE void store(Acc* target, const Vector& value) { *reinterpret_cast<Loose*>(target) = value; }

  // Each lane of `value` becomes change(lane).
  template <typename Change>
  static RBM_INLINE void each(Vector& value, const Change& change) {
    alignas(kBytes) Acc lanes[kCount];
    store(lanes, value);
    for (Acc& lane : lanes) lane = change(lane);
    load(value, lanes);
  }

  template <int... kPicks>
  static RBM_INLINE void pick(Vector& value, const Vector& a, const Vector& b, std::integer_sequence<int, kPicks...>) {
#if defined(__clang__)
    value = __builtin_shufflevector(a, b, kPicks...);
#else
    value = __builtin_shuffle(a, b, Mask{kPicks...});
#endif
  }

  // a0 b0 a1 b1 ...
  static RBM_INLINE void interleave(Vector& lower, Vector& upper, const Vector& a, const Vector& b) {
    interleave_by(lower, upper, a, b, std::make_integer_sequence<int, kCount>{});
  }

  template <int... kIndex>
  static RBM_INLINE void interleave_by(
      Vector& lower, Vector& upper, const Vector& a, const Vector& b, std::integer_sequence<int, kIndex...>) {
    pick(lower, a, b, std::integer_sequence<int, (kIndex / 2 + kIndex % 2 * kCount)...>{});
    pick(upper, a, b, std::integer_sequence<int, (kIndex / 2 + kIndex % 2 * kCount + kCount / 2)...>{});
  }

  // sum_lanes takes kSteps steps, first within parts of 16 bytes, where shuffles are fast, then across them. A step
  // folds two vectors a and b into one: lane i of the result is v[n] + v[n + upper_distance], with v the lanes of a and
  // then those of b, and n = lower_lane(i).
  static constexpr int kPart = 16 / static_cast<int>(sizeof(Acc));
  static constexpr int kSteps = (kPart == 4 ? 2 : 1) + (kBytes == 64 ? 2 : kBytes == 32 ? 1 : 0);

  template <int kStep>
  static constexpr int lower_lane(int lane) {
    constexpr int kInPart = kPart == 4 ? 2 : 1;
    const int part = lane / kPart, place = lane % kPart;
    if (kStep + 1 < kInPart) return place % 2 * kCount + part * kPart + place / 2;
    if (kStep < kInPart) return place / (kPart / 2) * kCount + part * kPart + place % (kPart / 2);
    constexpr int kParts = kCount / kPart, kHalf = kParts / 2 > 0 ? kParts / 2 : 1;
    const int from = part / kHalf * kCount;
    return from + (kStep == kInPart ? part % kHalf : part % kHalf * 2) * kPart + place;
  }

  template <int kStep>
  static constexpr int upper_distance() {
    constexpr int kInPart = kPart == 4 ? 2 : 1;
    if (kStep < kInPart) return kPart / 2;
    return kStep == kInPart && kBytes == 64 ? 2 * kPart : kPart;
  }

  template <int kStep, int... kLane>
  static RBM_INLINE void fold(Vector& result, const Vector& a, const Vector& b, std::integer_sequence<int, kLane...>) {
    Vector lower, upper;
    pick(lower, a, b, std::integer_sequence<int, lower_lane<kStep>(kLane)...>{});
    pick(upper, a, b, std::integer_sequence<int, (lower_lane<kStep>(kLane) + upper_distance<kStep>())...>{});
    result = lower + upper;
  }

  // sum_lanes adds lanes in pairs, as in a binary tree with the leaves lane_at(0), lane_at(1), ...: within parts of 16
  // bytes, and across them, the bits of a place are those of its lane in reverse order.
  static constexpr int lane_at(int place) {
    return reversed(place % kPart, kPart) + kPart * reversed(place / kPart, kCount / kPart);
  }
  static constexpr int reversed(int number, int count) {
    return count == 1 ? 0 : number % 2 * (count / 2) + reversed(number / 2, count / 2);
  }

  // sums[i] = the sum of the lanes of vectors[i]; the number of vectors must be a power of two. Lanes are added in the
  // same order whatever the other vectors are, so that a sum is always the same, bit for bit: equal rows must have
  // equal cosines.
  template <int kVectors, int kStep = 0, int kSums = kVectors>
  static RBM_INLINE void sum_lanes(Vector (&vectors)[kVectors], Acc* sums) {
    if constexpr (kStep == kSteps) {
      for (int i = 0; i < kVectors; ++i) {
        alignas(kBytes) Acc lanes[kCount];
        store(lanes, vectors[i]);
        for (int lane = 0; lane < std::min(kCount, kSums); ++lane) sums[i * kCount + lane] = lanes[lane];
      }
    } else {
      constexpr int kFolded = kVectors > 1 ? kVectors / 2 : 1;
      Vector folded[kFolded];
      for (int i = 0; i < kFolded; ++i) {
        fold<kStep>(
            folded[i], vectors[2 * i], vectors[kVectors > 1 ? 2 * i + 1 : 0],
            std::make_integer_sequence<int, kCount>{});
      }
      sum_lanes<kFolded, kStep + 1, kSums>(folded, sums);
    }
  }
};

}  // namespace rbm::cpu
