// Memory update: declarations and argument checks shared by the CPU and the CUDA library.
// The mathematics is in rbm_kernels/ops/memory_update/README.md.
#pragma once

#include <tuple>

#include "checks.h"
#include "long_vectors.h"

namespace rbm {

inline void check_memory_statistics(const Tensor& h, const Tensor& gates, const Tensor& experts, int64_t num_experts) {
  const Checks check("memory_statistics");
  check.dtype("h", h, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  const bool wide = h.scalar_type() == ScalarType::Double;
  check.dtype("gates", gates, {wide ? ScalarType::Double : ScalarType::Float});
  check.dtype("experts", experts, {ScalarType::Int});
  check.shape("h", h, {kAnySize, kAnySize}, "rows by features");
  check.shape("gates", gates, {h.size(0), kAnySize}, "one row for each row of h");
  check.shape("experts", experts, {h.size(0), gates.size(1)}, "one expert for each gate");
  check.same_device("gates", gates, "h", h);
  check.same_device("experts", experts, "h", h);
  check_num_experts(check, num_experts);
}

inline void check_memory_update(const Tensor& memory, const Tensor& weighted_sum, const Tensor& total, double decay) {
  const Checks check("memory_update_");
  check.dtype("memory", memory, {ScalarType::Float, ScalarType::Double});
  check.dtype("weighted_sum", weighted_sum, {memory.scalar_type()});
  check.dtype("total", total, {memory.scalar_type()});
  check.shape("memory", memory, {kAnySize, kAnySize}, "experts by features");
  check.shape("weighted_sum", weighted_sum, {memory.size(0), memory.size(1)}, "the shape of memory");
  check.shape("total", total, {memory.size(0)}, "one for each row of memory");
  check.same_device("weighted_sum", weighted_sum, "memory", memory);
  check.same_device("total", total, "memory", memory);
  check.no_overlap("memory", memory);
  check.disjoint("memory", memory, "weighted_sum", weighted_sum);
  check.disjoint("memory", memory, "total", total);
  if (!(decay >= 0 && decay <= 1)) check.fail("decay is ", decay, ", expected between 0 and 1");
}

namespace cpu {
std::tuple<Tensor, Tensor> memory_statistics(
    const Tensor& h, const Tensor& gates, const Tensor& experts, int64_t num_experts, bool normalize);
void memory_update_(Tensor memory, const Tensor& weighted_sum, const Tensor& total, double decay, bool normalize);
}  // namespace cpu

namespace cuda {
std::tuple<Tensor, Tensor> memory_statistics(
    const Tensor& h, const Tensor& gates, const Tensor& experts, int64_t num_experts, bool normalize);
void memory_update_(Tensor memory, const Tensor& weighted_sum, const Tensor& total, double decay, bool normalize);
}  // namespace cuda

}  // namespace rbm
