// How a CUDA thread holds its part of a row, and sums over a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace rbm::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// float64 rows are summed in float64, all others in float32.
template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Columns of a row per thread: 16 bytes, but at most four if each needs its own load.
template <typename T, bool kVector>
constexpr int kColumns = kVector || sizeof(T) > 4 ? 16 / sizeof(T) : 4;

template <typename T>
__device__ AccOf<T> widen(T value) {
  return static_cast<AccOf<T>>(value);
}

template <typename Acc>
__device__ Acc warp_sum(Acc value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// A thread's columns of a row; those of a warp are adjacent. With kVector, a thread's columns are adjacent too and are
// read with one load. Otherwise (for rows that do not start at a multiple of 16 bytes) they are a warp apart, so that
// each load of the warp still covers contiguous memory.
template <typename T, bool kVector>
struct alignas(kVector ? 16 : alignof(T)) Fragment {
  T values[kColumns<T, kVector>];

  static __device__ int64_t column(int64_t first, int thread, int i) {
    if constexpr (kVector) return first + thread * kColumns<T, kVector> + i;
    return first + thread / kWarp * kWarp * kColumns<T, kVector> + thread % kWarp + i * kWarp;
  }

  // Columns past the end, and rows that do not exist, read as zero.
  __device__ void load(const T* row, bool row_exists, int64_t first, int thread, int64_t features) {
    const int64_t start = column(first, thread, 0);
    if constexpr (kVector) {
      const bool inside = row_exists && start < features;
      const uint4 bits = inside ? __ldg(reinterpret_cast<const uint4*>(row + start)) : uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(values) = bits;
    } else {
#pragma unroll
      for (int i = 0; i < kColumns<T, kVector>; ++i) {
        const bool inside = row_exists && start + i * kWarp < features;
        values[i] = inside ? row[start + i * kWarp] : static_cast<T>(0.f);
      }
    }
  }

  __device__ AccOf<T> square() const {
    AccOf<T> sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns<T, kVector>; ++i) sum += widen(values[i]) * widen(values[i]);
    return sum;
  }
};

}  // namespace rbm::cuda
