// Conversion of tensors to the form that the CPU kernels need.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>

#include "../checks.h"
#include "threads.h"
#include "vectors.h"

namespace rbm::cpu {

// Work with fewer multiplications than this is not worth a second thread.
constexpr int64_t kGrainMultiplications = 16384;
// The same for products of few rows, and for concurrent calls from several threads of a server. A sleeping thread takes
// 5 to 10 us to wake, and this many multiplications take a running thread about as long.
constexpr int64_t kMultiplicationsOfThread = 1 << 18;

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls copy(). The stable ABI drops PyTorch's reason if that fails, and only memory can be missing.
template <typename Copy>
Tensor copied(const Copy& copy) {
  try {
    return copy();
  } catch (const std::exception&) {
    fail_for_memory();
  }
}

inline Tensor as_dtype(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : copied([&] { return torch::stable::to(tensor, dtype); });
}

inline std::optional<Tensor> as_dtype(const std::optional<Tensor>& tensor, ScalarType dtype) {
  return tensor ? std::optional(as_dtype(*tensor, dtype)) : std::nullopt;
}

inline Tensor with_adjacent_features(const Tensor& rows) {
  return features_are_adjacent(rows) ? rows : copied([&] { return torch::stable::contiguous(rows); });
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copied([&] { return torch::stable::contiguous(tensor); });
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(dense(*tensor)) : std::nullopt;
}

// A new contiguous, uninitialised tensor, directly from the allocator: new_empty goes through the dispatcher, which is
// a large part of the cost of one row.
template <size_t kDimensions>
Tensor new_tensor(ScalarType dtype, const int64_t (&sizes)[kDimensions]) {
  // At most three sizes below 2^31. Unsigned, because the product of all three may exceed 2^63; it is not used.
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

// Called before the parallel part, because an exception must not leave it.
inline void check_experts(const Checks& check, const Tensor& experts, int64_t num_experts) {
  const int32_t* const first = data<int32_t>(experts);
  const int64_t count = experts.numel();
  const auto* const bad = std::find_if(first, first + count, [&](int64_t e) { return e < 0 || e >= num_experts; });
  if (bad == first + count) return;
  check.fail(
      "experts holds ", *bad, " in row ", (bad - first) / experts.size(1), ", expected between 0 and ",
      num_experts - 1);
}

// The kernels support float64, float32 and bfloat16. float16 is converted to float32, because no current processor
// computes with it at full speed.
inline ScalarType served_dtype(ScalarType dtype) { return dtype == ScalarType::Half ? ScalarType::Float : dtype; }

// work(T{}) for the type of a served dtype.
template <typename Work>
auto with_type(ScalarType dtype, const Work& work) {
  switch (dtype) {
    case ScalarType::Double: return work(double{});
    case ScalarType::BFloat16: return work(BFloat16{});
    default: return work(float{});
  }
}

// The same for tensors that are float64 or float32.
template <typename Work>
auto with_wide_type(ScalarType dtype, const Work& work) {
  return dtype == ScalarType::Double ? work(double{}) : work(float{});
}

// The size of a vector, and of a row of a tile register, which take twice as long to load if they cross a cache line.
constexpr size_t kScratchAlignment = 64;

template <size_t kAlignment>
struct FreeScratch {
  void operator()(void* numbers) const { operator delete[](numbers, std::align_val_t{kAlignment}); }
};

// A buffer of numbers whose values are not set.
template <typename T, size_t kAlignment = kScratchAlignment>
using Scratch = std::unique_ptr<T[], FreeScratch<kAlignment>>;

template <typename T, size_t kAlignment = kScratchAlignment>
Scratch<T, kAlignment> scratch(int64_t size) {
  static_assert(std::is_trivially_destructible_v<T>, "nothing is destroyed");
  try {
    return Scratch<T, kAlignment>(static_cast<T*>(operator new[](size * sizeof(T), std::align_val_t{kAlignment})));
  } catch (const std::bad_alloc&) {
    fail_for_memory();
  }
}

}  // namespace rbm::cpu
