// Grouped matmul over rows in CSR form: declarations and argument checks. It is defined in
// rbm_kernels/ops/sparse_expert_matmul/reference.py. On CUDA that reference is used, with PyTorch's sparse matmul.
#pragma once

#include <optional>
#include <tuple>

#include "checks.h"

namespace rbm {

inline void check_sparse_rows(
    const Checks& check, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& gates,
    const Tensor& experts) {
  check.dtype("crow", crow, {ScalarType::Int});
  check.dtype("col", col, {ScalarType::Int});
  check.dtype("values", values, {ScalarType::Float, ScalarType::Double});
  check.dtype("gates", gates, {values.scalar_type()});
  check.dtype("experts", experts, {ScalarType::Int});
  check.shape("values", values, {kAnySize}, "one for each stored entry");
  check.shape("col", col, {values.size(0)}, "one for each stored entry");
  check.shape("gates", gates, {kAnySize, kAnySize}, "rows by choices");
  check.shape("experts", experts, {gates.size(0), gates.size(1)}, "the shape of gates");
  check.shape("crow", crow, {gates.size(0) + 1}, "where each row begins, and the end");
  if (gates.size(0) * gates.size(1) > kMostSize) {
    check.fail("gates has shape ", shape_text(gates.sizes()), ", expected fewer than 2^31 choices: split the batch");
  }
  for (const auto& [name, tensor] :
       {std::pair{"crow", &crow}, {"col", &col}, {"gates", &gates}, {"experts", &experts}}) {
    check.same_device(name, *tensor, "values", values);
  }
}

inline void check_sparse_weights(
    const Checks& check, const Tensor& values, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& scale) {
  check.dtype("weight", weight, {values.scalar_type()});
  check.shape("weight", weight, {kAnySize, kAnySize, kAnySize}, "experts by outputs by features");
  check.same_device("weight", weight, "values", values);
  if (bias) {
    check.dtype("bias", *bias, {values.scalar_type()});
    check.shape("bias", *bias, {weight.size(0), weight.size(1)}, "experts by outputs, as in weight");
    check.same_device("bias", *bias, "values", values);
  }
  if (scale) {
    check.dtype("scale", *scale, {values.scalar_type()});
    check.shape("scale", *scale, {weight.size(0), weight.size(2)}, "experts by features, as in weight");
    check.same_device("scale", *scale, "values", values);
  }
}

namespace cpu {
Tensor sparse_expert_matmul(
    const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts);
Tensor sparse_expert_matmul_backward_gates(
    const Tensor& grad, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts);
std::tuple<Tensor, Tensor> sparse_expert_matmul_backward_weight(
    const Tensor& grad, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts);
}  // namespace cpu

}  // namespace rbm
