// Routing: declarations and argument checks. Its CUDA kernels are written in Triton.
#pragma once

#include <limits>
#include <optional>
#include <tuple>

#include "checks.h"

namespace rbm {

inline bool is_wide(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == ScalarType::Double || b.scalar_type() == ScalarType::Double;
}

inline void check_routing(
    const Checks& check, const char* rows, const Tensor& h, const Tensor& memory, int64_t k, double temperature) {
  check.dtype(rows, h, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.dtype("memory", memory, {ScalarType::Float, ScalarType::Double});
  check.shape(rows, h, {kAnySize, kAnySize}, "rows by features");
  check.shape("memory", memory, {kAnySize, h.size(1)}, "experts by the features of the rows");
  check.same_device("memory", memory, rows, h);
  if (k < 1 || k > memory.size(0)) check.fail("k is ", k, ", expected between 1 and ", memory.size(0), " experts");
  // Kernels divide by it in the dtype of the gates. There, the inverse of a smaller number may be infinite.
  const double least = is_wide(h, memory) ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double most = is_wide(h, memory) ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (!(temperature >= least && temperature <= most)) {
    check.fail(
        "temperature is ", temperature, ", expected a positive number between ", least, " and ", most,
        ", the range of the gates' dtype");
  }
}

namespace cpu {
std::tuple<Tensor, Tensor, Tensor> cosine_topk(const Tensor& h, const Tensor& memory, int64_t k, double temperature);
Tensor cosine_topk_backward(
    const std::optional<Tensor>& grad_gates, const std::optional<Tensor>& grad_cosines, const Tensor& h,
    const Tensor& memory, const Tensor& gates, const Tensor& experts, const Tensor& cosines, double temperature);
}  // namespace cpu

}  // namespace rbm
