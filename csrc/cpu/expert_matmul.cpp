// expert_matmul on the CPU: forward, and the gradients of its rows and gates. Every thread has its own rows and
// processes, for each expert, those that use it. Tiles of products are summed in registers and added, times their
// gates, to rows of the result, which stay in cache from one expert to the next. No row is multiplied with an expert
// that it does not use, and only the result grows with the batch. BLAS would need the rows of each expert gathered and
// packed, and its products added up. Few rows: see few_rows.h.
#include "../expert_matmul.h"

#include <algorithm>

#include "expert_panel_amx.h"
#include "few_rows.h"

namespace rbm::cpu {
namespace {

// Rows of a panel: their results stay in cache, and every expert gets about kRowsOfExpert of them per read of its
// weights.
constexpr int64_t kFewestPanelRows = 256;
constexpr int64_t kRowsOfExpert = 256;

// Panels of equal height, the same number for every thread.
int64_t count_panel_rows(int64_t rows, int64_t num_experts, int64_t top_k) {
  const int64_t most = std::max(kFewestPanelRows, kRowsOfExpert * num_experts / std::max<int64_t>(1, top_k));
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t rounds = ceil_div(rows, most * threads);
  return ceil_div(rows, rounds * threads);
}

template <typename T, typename Operand>
void multiply(const Product<T, Operand>& p) {
  using Acc = Accumulation<T>;
  if (p.count == 0) return;
  const int64_t panel_rows = count_panel_rows(p.count, p.num_experts, p.top_k);
  parallel_for(0, ceil_div(p.count, panel_rows), 1, [&](int64_t begin, int64_t end) {
    constexpr bool kConverts = !std::is_same_v<T, Acc>;
    PairsByExpert pairs(panel_rows, p.top_k, p.num_experts);
    const auto sums = scratch<Acc>(kConverts ? panel_rows * p.to : 0);
    const auto each_panel = [&](const auto& multiply_rows) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t first = panel * panel_rows, last = std::min(first + panel_rows, p.count);
        pairs.list(p.experts, first, last);
        Acc* panel_sums = sums.get();
        if constexpr (!kConverts) panel_sums = p.out + first * p.to;
        std::fill_n(panel_sums, (last - first) * p.to, Acc(0));
        if (p.with_gates) std::fill_n(p.grad_gates + first * p.top_k, (last - first) * p.top_k, Acc(0));
        multiply_rows(first, panel_sums);
        if constexpr (kConverts) round_all(panel_sums, (last - first) * p.to, p.out + first * p.to);
      }
    };
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      LeftBlock left(operands_of<Operand>(std::min(kInnerBlock, p.from)));
      each_panel([&](int64_t first, Acc* to) { multiply_panel_amx(tiles, p, first, pairs, to, &left); });
    });
    if (with_amx) return;
    const auto converted = scratch<Operand>(kConverts ? kTileRows * kInnerBlock : 0);
    each_panel([&](int64_t first, Acc* to) { multiply_panel(p, first, pairs, to, converted.get()); });
  });
}

// Weights [E, N, D] as matrices [D, N], or [N, D] for the gradient of the rows.
template <typename T>
Unpacked<T> unpacked_weight(const Tensor& weight, bool for_gradient) {
  const int64_t outputs = weight.size(1), features = weight.size(2);
  return for_gradient
             ? Unpacked<T>{data<T>(weight), weight.size(0), outputs, features, outputs * features, features, 1}
             : Unpacked<T>{data<T>(weight), weight.size(0), features, outputs, outputs * features, 1, features};
}

// Packs the weights for this processor and multiplies; `product` makes a Product from the packed weights.
template <typename T, typename Make>
void pack_and_multiply(const Unpacked<T>& weight, const Make& product) {
  with_operand<T>([&]<typename Operand>(Operand) {
    const auto packed = pack_operands<Operand>(weight);
    multiply(product(static_cast<const Operand*>(packed.get())));
  });
}

template <typename T>
Tensor forward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), top_k = gates.size(1);
  Tensor y = new_tensor(x.scalar_type(), {rows, weight.size(1)});
  if (are_few<T>(rows, top_k, weight.size(0))) {
    PairsByExpert pairs(rows, top_k, weight.size(0));
    pairs.list(data<int32_t>(experts), 0, rows);
    const FewRows<T> few{
        .x = data<T>(x),
        .row_stride = x.stride(0),
        .weight = data<T>(weight),
        .bias = bias ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .pairs = &pairs,
        .rows = rows,
        .top_k = top_k,
        .in_features = x.size(1),
        .out_features = weight.size(1),
        .num_experts = weight.size(0),
        .y = mutable_data<T>(y),
    };
    multiply_few_rows(few);
    return y;
  }
  pack_and_multiply(unpacked_weight<T>(weight, false), [&]<typename Operand>(const Operand* packed) {
    return Product<T, Operand>{
        .rows = data<T>(x),
        .row_stride = x.stride(0),
        .packed = packed,
        .bias = bias ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .experts = data<int32_t>(experts),
        .count = rows,
        .from = x.size(1),
        .to = weight.size(1),
        .num_experts = weight.size(0),
        .top_k = top_k,
        .with_gates = false,
        .x = nullptr,
        .x_stride = 0,
        .grad_gates = nullptr,
        .out = mutable_data<T>(y),
    };
  });
  return y;
}

template <typename T>
std::tuple<Tensor, Tensor> backward_input(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts, bool with_gates) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), in_features = x.size(1), top_k = gates.size(1);
  Tensor grad_x = new_tensor(x.scalar_type(), {rows, in_features});
  Tensor grad_gates =
      with_gates ? new_tensor(gates.scalar_type(), {rows, top_k}) : new_tensor(gates.scalar_type(), {0});
  pack_and_multiply(unpacked_weight<T>(weight, true), [&]<typename Operand>(const Operand* packed) {
    return Product<T, Operand>{
        .rows = data<T>(grad),
        .row_stride = grad.stride(0),
        .packed = packed,
        .bias = bias && with_gates ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .experts = data<int32_t>(experts),
        .count = rows,
        .from = weight.size(1),
        .to = in_features,
        .num_experts = weight.size(0),
        .top_k = top_k,
        .with_gates = with_gates,
        .x = data<T>(x),
        .x_stride = x.stride(0),
        .grad_gates = mutable_data<Acc>(grad_gates),
        .out = mutable_data<T>(grad_x),
    };
  });
  return {grad_x, grad_gates};
}
}  // namespace

Tensor expert_matmul(
    const Tensor& x_any, const Tensor& weight_any, const std::optional<Tensor>& bias_any, const Tensor& gates_any,
    const Tensor& experts_any, Order, Order, Order, int64_t) {
  const Checks check("expert_matmul");
  check_weights(check, x_any, weight_any, bias_any);
  check_pairs(check, x_any, gates_any, experts_any);
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)), weight = dense(as_dtype(weight_any, dtype));
  const std::optional<Tensor> bias = dense(as_dtype(bias_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, weight.size(0));
  const Tensor y = with_type(dtype, [&]<typename T>(T) { return forward<T>(x, weight, bias, gates, experts); });
  return as_dtype(y, x_any.scalar_type());
}

std::tuple<Tensor, Tensor> expert_matmul_backward_input(
    const Tensor& grad_any, const Tensor& x_any, const Tensor& weight_any, const std::optional<Tensor>& bias_any,
    const Tensor& gates_any, const Tensor& experts_any, bool with_gates, Order, Order, Order, int64_t) {
  const Checks check("expert_matmul_backward_input");
  check_weights(check, x_any, weight_any, bias_any);
  check_pairs(check, x_any, gates_any, experts_any);
  check_grad(check, grad_any, x_any, weight_any.size(1));
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)), weight = dense(as_dtype(weight_any, dtype));
  const Tensor grad = with_adjacent_features(as_dtype(grad_any, dtype));
  const std::optional<Tensor> bias = dense(as_dtype(bias_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, weight.size(0));
  const auto [grad_x, grad_gates] = with_type(
      dtype, [&]<typename T>(T) { return backward_input<T>(grad, x, weight, bias, gates, experts, with_gates); });
  return {as_dtype(grad_x, x_any.scalar_type()), grad_gates};
}

}  // namespace rbm::cpu
