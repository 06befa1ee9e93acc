// Vector lanes on the CPU. A wheel must run on any x86-64, where a compiler may assume no more than SSE2, yet these loops
// gain several times from AVX-512. So hot functions are templates over the bytes of a vector, written with the vector types
// of GCC and Clang, compiled three times, and picked once by what the processor knows. Other architectures get 16 bytes.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define RBM_INLINE inline __attribute__((always_inline))

// Vectors wider than the baseline pass between functions that are inlined into one another, never through a call.
#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(__x86_64__)
#define RBM_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define RBM_AVX2 __attribute__((target("avx2,fma")))
#endif

// Functions whose vectors are of one size: the compiler breaks them up for each kind of processor, and the dynamic linker
// picks. Not with AddressSanitizer, whose runtime is not ready yet when the linker does.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define RBM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RBM_CLONES
#endif

namespace rbm::cpu {

using torch::headeronly::BFloat16;

// Bytes of the widest vector that this processor computes with. A build with RBM_MOST_VECTOR_BYTES=32 or 16 takes the code
// that older processors take, so that it can be tested on this one.
inline int vector_bytes() {
#if defined(RBM_MOST_VECTOR_BYTES)
  return RBM_MOST_VECTOR_BYTES;
#elif defined(__x86_64__)
  static const int bytes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
      ? 64
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 32 : 16;
  return bytes;
#else
  return 16;
#endif
}

// RBM_DISPATCH(name) defines name(arguments...) for a function template name_lanes<kBytes>(arguments...).
#if defined(__x86_64__)
#define RBM_DISPATCH(name)                                        \
  template <typename... Args>                                     \
  RBM_AVX512 void name##_avx512(const Args&... args) {            \
    name##_lanes<64>(args...);                                    \
  }                                                               \
  template <typename... Args>                                     \
  RBM_AVX2 void name##_avx2(const Args&... args) {                \
    name##_lanes<32>(args...);                                    \
  }                                                               \
  template <typename... Args>                                     \
  void name(const Args&... args) {                                \
    switch (vector_bytes()) {                                     \
      case 64: return name##_avx512(args...);                     \
      case 32: return name##_avx2(args...);                       \
      default: return name##_lanes<16>(args...);                  \
    }                                                             \
  }
#else
#define RBM_DISPATCH(name)                                        \
  template <typename... Args>                                     \
  void name(const Args&... args) {                                \
    name##_lanes<16>(args...);                                    \
  }
#endif

// What rows of T are summed in.
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
  // Memory of any alignment.
  typedef Acc Loose __attribute__((vector_size(kBytes), aligned(alignof(Acc)), may_alias));
  typedef std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t> Mask __attribute__((vector_size(kBytes)));

  static RBM_INLINE void load(Vector& value, const Acc* source) { value = *reinterpret_cast<const Loose*>(source); }

  // A bfloat16 is the upper half of a float32.
  static RBM_INLINE void load(Vector& value, const BFloat16* source) {
    uint16_t halves[kCount];
    uint32_t words[kCount];
    std::memcpy(halves, source, sizeof(halves));
    for (int lane = 0; lane < kCount; ++lane) words[lane] = static_cast<uint32_t>(halves[lane]) << 16;
    std::memcpy(&value, words, sizeof(value));
  }

  // The first `count` lanes; zeros after them.
  template <typename T>
  static RBM_INLINE void load_first(Vector& value, const T* source, int64_t count) {
    T padded[kCount] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = source[i];
    load(value, padded);
  }

  static RBM_INLINE void store(Acc* target, const Vector& value) { *reinterpret_cast<Loose*>(target) = value; }

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

  // Both vectors hold sums spread over segments of kSegment lanes. Adds the halves of each segment: the segments of the
  // result, half as long, are those of a and then those of b.
  template <int kSegment, int... kIndex>
  static RBM_INLINE void fold(Vector& result, const Vector& a, const Vector& b, std::integer_sequence<int, kIndex...>) {
    constexpr int kHalf = kSegment / 2;
    Vector lower, upper;
    pick(lower, a, b, std::integer_sequence<int, (kIndex / kHalf * kSegment + kIndex % kHalf)...>{});
    pick(upper, a, b, std::integer_sequence<int, (kIndex / kHalf * kSegment + kIndex % kHalf + kHalf)...>{});
    result = lower + upper;
  }

  // sums[i] = the sum of the lanes of vectors[i], for a power of two of vectors. Halves are added to halves, so that a sum is
  // the same, bit for bit, whatever stands beside it: equal rows must have equal cosines.
  template <int kVectors, int kSegment = kCount>
  static RBM_INLINE void sum_lanes(Vector (&vectors)[kVectors], Acc* sums) {
    if constexpr (kSegment == 1) {
      for (int i = 0; i < kVectors; ++i) {
        alignas(kBytes) Acc lanes[kCount];
        store(lanes, vectors[i]);
        for (int lane = 0; lane < kCount; ++lane) sums[i * kCount + lane] = lanes[lane];
      }
    } else if constexpr (kVectors == 1) {
      // Fewer sums than lanes: every segment is one of them.
      alignas(kBytes) Acc lanes[kCount];
      store(lanes, vectors[0]);
      for (int half = kSegment / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < kCount; ++lane) {
          if (lane % kSegment < half) lanes[lane] += lanes[lane + half];
        }
      }
      for (int segment = 0; segment < kCount / kSegment; ++segment) sums[segment] = lanes[segment * kSegment];
    } else {
      Vector folded[kVectors / 2];
      for (int i = 0; i < kVectors / 2; ++i) {
        fold<kSegment>(folded[i], vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, kCount>{});
      }
      sum_lanes<kVectors / 2, kSegment / 2>(folded, sums);
    }
  }
};

}  // namespace rbm::cpu
