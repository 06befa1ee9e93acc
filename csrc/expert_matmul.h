// Grouped matmul: declarations and argument checks. Its CUDA kernels are written in Triton.
#pragma once

#include <optional>
#include <tuple>

#include "checks.h"

namespace rbm {

inline void check_weights(
    const Checks& check, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check.dtype("x", x, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.dtype("weight", weight, {x.scalar_type()});
  check.shape("x", x, {kAnySize, kAnySize}, "rows by features");
  check.shape("weight", weight, {kAnySize, kAnySize, x.size(1)}, "experts by outputs by the features of x");
  check.same_device("weight", weight, "x", x);
  if (bias) {
    check.dtype("bias", *bias, {x.scalar_type()});
    check.shape("bias", *bias, {weight.size(0), weight.size(1)}, "experts by outputs, as in weight");
    check.same_device("bias", *bias, "x", x);
  }
}

inline void check_pairs(const Checks& check, const Tensor& x, const Tensor& gates, const Tensor& experts) {
  check.dtype("gates", gates, {x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float});
  check.dtype("experts", experts, {ScalarType::Int});
  check.shape("gates", gates, {x.size(0), kAnySize}, "one row for each row of x");
  check.shape("experts", experts, {gates.size(0), gates.size(1)}, "the shape of gates");
  check.same_device("gates", gates, "x", x);
  check.same_device("experts", experts, "x", x);
}

inline void check_grad(const Checks& check, const Tensor& grad, const Tensor& x, int64_t out_features) {
  check.dtype("grad", grad, {x.scalar_type()});
  check.shape("grad", grad, {x.size(0), out_features}, "rows of x by outputs");
  check.same_device("grad", grad, "x", x);
}

namespace cpu {
// The order of the rows is for the CUDA kernels; here each thread lists its rows by expert.
using Order = const std::optional<Tensor>&;

Tensor expert_matmul(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts, Order order, Order tile_experts, Order tile_counts, int64_t block_m);
std::tuple<Tensor, Tensor> expert_matmul_backward_input(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts, bool with_gates, Order order, Order tile_experts, Order tile_counts, int64_t block_m);
std::tuple<Tensor, Tensor> expert_matmul_backward_weight(
    const Tensor& grad, const Tensor& x, const Tensor& gates, const Tensor& experts, int64_t num_experts,
    bool with_bias);
}  // namespace cpu

}  // namespace rbm
