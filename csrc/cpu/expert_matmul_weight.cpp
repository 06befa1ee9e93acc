// The gradient of expert_matmul's weights and biases on the CPU. Each thread has its own output features and processes
// all rows of an expert for them, so every gradient is summed by one thread, in the order of the rows.
#include "../expert_matmul.h"

#include <algorithm>

#include "weight_gradient_amx.h"

namespace rbm::cpu {
namespace {

// Output features of a slice: every thread has equally many slices, unless there are fewer tiles. Work is divided by
// slice rather than by expert, so that threads get equal shares even if experts do not.
template <typename Operand>
int64_t slice_width(int64_t outputs) {
  const int64_t threads = torch::stable::get_num_threads();
  if (std::is_same_v<Operand, BFloat16Pair> && tile_unit() != TileUnit::kNone) {
    const int64_t slices = threads * ceil_div(outputs, threads * kAmxMostOutputs);
    return round_up(ceil_div(outputs, std::max<int64_t>(1, slices)), kRegisterRows);
  }
  return round_up(ceil_div(outputs, threads), kTileRows);
}

// The gradients of all experts, with tiles of Operand.
template <typename Operand, typename T>
void sum_experts(const WeightGrad<T>& w, int64_t num_experts) {
  using Acc = Accumulation<T>;
  constexpr bool kConverts = !std::is_same_v<T, Acc>;
  const int64_t width = slice_width<Operand>(w.out_features);
  const int64_t slices = width > 0 ? ceil_div(w.out_features, width) : 0;
  parallel_tasks(slices * num_experts, torch::stable::get_num_threads(), [&](const auto& take) {
    // Sums in another type than the gradients are those of one slice only.
    const auto sums = scratch<Acc>(kConverts ? width * (w.in_features + 1) : 0);
    const auto each_slice = [&](const auto& act) {
      for (int64_t i = take(); i < slices * num_experts; i = take()) {
        const int64_t expert = i % num_experts, first = i / num_experts * width;
        const int64_t last = std::min(first + width, w.out_features);
        T* const weight = w.grad_weight + (expert * w.out_features + first) * w.in_features;
        T* const bias = w.grad_bias + expert * w.out_features + first;
        if constexpr (kConverts) {
          act(Slice<T>{expert, first, last, weight, bias, sums.get(), sums.get() + width * w.in_features});
        } else {
          act(Slice<T>{expert, first, last, weight, bias, weight, bias});
        }
      }
    };
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      AmxRoom room(width);
      each_slice([&](const auto& slice) { sum_slice_amx(tiles, w, slice, &room); });
    });
    if (with_amx) return;
    const auto gated = scratch<Operand>(kPieceRows * width);
    const auto bias_sum = scratch<Acc>(width);
    // No vector is longer than 64 bytes.
    const auto panels = scratch<Operand>(kPieceRows * (w.in_features + 64));
    each_slice([&](const Slice<T>& slice) {
      sum_slice(w, slice, gated.get(), bias_sum.get(), panels.get());
      if constexpr (kConverts) {
        round_all(slice.weight, (slice.end - slice.begin) * w.in_features, slice.grad_weight);
        round_all(slice.bias, slice.end - slice.begin, slice.grad_bias);
      }
    });
  });
}

template <typename T>
std::tuple<Tensor, Tensor> backward_weight(
    const Tensor& grad, const Tensor& x, const Tensor& gates, const Tensor& experts, int64_t num_experts,
    bool with_bias) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), in_features = x.size(1), out_features = grad.size(1);
  Tensor grad_weight = new_tensor(x.scalar_type(), {num_experts, out_features, in_features});
  Tensor grad_bias = new_tensor(x.scalar_type(), {num_experts, out_features});
  PairsByExpert pairs(rows, gates.size(1), num_experts);
  pairs.list(data<int32_t>(experts), 0, rows);
  const WeightGrad<T> sums{
      .x = data<T>(x),
      .x_stride = x.stride(0),
      .grad = data<T>(grad),
      .grad_stride = grad.stride(0),
      .gates = data<Acc>(gates),
      .pairs = &pairs,
      .in_features = in_features,
      .out_features = out_features,
      .grad_weight = mutable_data<T>(grad_weight),
      .grad_bias = mutable_data<T>(grad_bias),
  };
  with_operand<T>([&]<typename Operand>(Operand) { sum_experts<Operand>(sums, num_experts); });
  if (!with_bias) grad_bias = new_tensor(x.scalar_type(), {0});
  return {grad_weight, grad_bias};
}

}  // namespace

std::tuple<Tensor, Tensor> expert_matmul_backward_weight(
    const Tensor& grad_any, const Tensor& x_any, const Tensor& gates_any, const Tensor& experts_any,
    int64_t num_experts, bool with_bias) {
  const Checks check("expert_matmul_backward_weight");
  check.dtype("x", x_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.shape("x", x_any, {kAnySize, kAnySize}, "rows by features");
  check.shape("grad", grad_any, {kAnySize, kAnySize}, "rows by outputs");
  check_grad(check, grad_any, x_any, grad_any.size(1));
  check_pairs(check, x_any, gates_any, experts_any);
  check_num_experts(check, num_experts);
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)),
               grad = with_adjacent_features(as_dtype(grad_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, num_experts);
  const auto [grad_weight, grad_bias] = with_type(
      dtype, [&]<typename T>(T) { return backward_weight<T>(grad, x, gates, experts, num_experts, with_bias); });
  return {as_dtype(grad_weight, x_any.scalar_type()), as_dtype(grad_bias, x_any.scalar_type())};
}

}  // namespace rbm::cpu
