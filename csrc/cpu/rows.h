// Tensors as the CPU kernels take them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "../checks.h"
#include "threads.h"
#include "vectors.h"

namespace rbm::cpu {

// Work below this many multiplications is not worth a second thread.
constexpr int64_t kGrainMultiplications = 16384;
// The same for products of few rows, and for what several threads of a server do side by side: a thread that sleeps takes 5 to
// 10 us to wake, and this many multiplications take one that is awake about as long.
constexpr int64_t kMultiplicationsOfThread = 1 << 18;

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Tensor as_dtype(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

// Rows whose features lie apart are copied; any distance between rows is served as it is.
inline Tensor with_adjacent_features(const Tensor& rows) {
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : torch::stable::contiguous(rows);
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A new contiguous tensor, uninitialised. Straight from the allocator: new_empty goes through the dispatcher, and that is a
// large part of what one row costs.
template <size_t kDimensions>
Tensor new_tensor(ScalarType dtype, const int64_t (&sizes)[kDimensions]) {
  // Three sizes below 2^31 at most: unsigned, for the product of all of them may pass 2^63, and is not used.
  int64_t strides[kDimensions];
  uint64_t stride = 1;
  for (size_t i = kDimensions; i-- > 0;) {
    strides[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(1, sizes[i]));
  }
  AtenTensorHandle handle;
  const auto failed = aoti_torch_empty_strided(
      kDimensions, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle);
  if (failed) fail_for_memory();
  return Tensor(handle);
}

inline ScalarType accumulation(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Before the parallel part: an exception must not leave it.
inline void check_experts(const Checks& check, const Tensor& experts, int64_t num_experts) {
  const int32_t* const first = data<int32_t>(experts);
  const int64_t count = experts.numel();
  const auto* const bad = std::find_if(first, first + count, [&](int64_t e) { return e < 0 || e >= num_experts; });
  if (bad == first + count) return;
  check.fail(
      "experts holds ", *bad, " in row ", (bad - first) / experts.size(1), ", expected between 0 and ", num_experts - 1);
}

// The kernels know float64, float32 and bfloat16. float16, which no processor of today computes with at speed, is taken as
// float32.
inline ScalarType served_dtype(ScalarType dtype) { return dtype == ScalarType::Half ? ScalarType::Float : dtype; }

template <typename T>
std::unique_ptr<T[]> scratch(int64_t size) {
  try {
    return std::make_unique_for_overwrite<T[]>(size);
  } catch (const std::bad_alloc&) {
    fail_for_memory();
  }
}

}  // namespace rbm::cpu
