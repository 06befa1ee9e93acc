// expert_matmul on the CPU: forward, and the gradients of its rows and gates. Every thread has its own rows and columns
// of the result and processes, for each expert, the rows that use it. Tiles of products are summed in registers and
// added, times their gates, to rows of the result, which stay in cache from one expert to the next. No row is
// multiplied with an expert that it does not use. BLAS would need the rows of each expert gathered and packed, and its
// products added up. Few rows: see few_rows.h.
#include "../expert_matmul.h"

#include <algorithm>

#include "expert_panel_amx.h"
#include "few_rows.h"
#include "shares.h"

namespace rbm::cpu {
namespace {

// Rows of a task: their results stay in cache, and every expert gets about kRowsOfExpert of them per read of its
// weights.
constexpr int64_t kFewestRows = 256;
constexpr int64_t kRowsOfExpert = 256;

// All matrices are packed before, once for all threads, if experts have more pairs than this on average, and if the
// operands are no more than that (16 MiB). Otherwise threads pack what they multiply next, while it is in their caches.
constexpr int64_t kPairsOfPacking = 1024;
constexpr int64_t kPackedBefore = 1 << 22;

// Rows and panels of columns of each task.
struct TaskSize {
  int64_t rows, panels;

  // Tasks of equal size, the same number for every thread. Threads divide the columns if they pack weights themselves,
  // so that no matrix is packed twice.
  static TaskSize of(int64_t rows, int64_t panels, int64_t num_experts, int64_t top_k, bool is_packed) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t parts = is_packed ? 1 : std::min(threads, panels);
    while (threads % parts != 0 || !divides_panels(panels, parts)) --parts;
    const int64_t most = std::max(kFewestRows, kRowsOfExpert * num_experts / std::max<int64_t>(1, top_k));
    const int64_t threads_of_rows = threads / parts, rounds = ceil_div(rows, most * threads_of_rows);
    return {ceil_div(rows, rounds * threads_of_rows), ceil_div(panels, parts)};
  }
};

// out [size] = the sum of sums [parts, size] over the parts, in their order.
template <typename Acc>
void add_parts(const Acc* sums, int64_t parts, int64_t size, Acc* out) {
  parallel_for(0, size, kGrainMultiplications, [&](int64_t begin, int64_t end) {
    std::copy_n(sums + begin, end - begin, out + begin);
    for (int64_t part = 1; part < parts; ++part) {
      for (int64_t i = begin; i < end; ++i) out[i] += sums[part * size + i];
    }
  });
}

template <typename T, typename Operand>
void multiply(const Product<T, Operand>& p) {
  using Acc = Accumulation<T>;
  constexpr bool kConverts = !std::is_same_v<T, Acc>;
  if (p.count == 0) return;
  const PackedSizes sizes = PackedSizes::of<Acc>();
  const int64_t panels = std::max<int64_t>(1, sizes.panels(p.to));
  const TaskSize size = TaskSize::of(p.count, panels, p.num_experts, p.top_k, p.packed != nullptr);
  const int64_t groups = ceil_div(p.count, size.rows), parts = ceil_div(panels, size.panels);
  const int64_t width = std::min(size.panels * sizes.width, p.to);
  // Threads that divide the columns sum products for the gates of the same rows.
  const bool has_parts = p.with_gates && parts > 1;
  const int64_t all_gates = p.count * p.top_k;
  const auto sums_of_parts = scratch<Acc>(has_parts ? parts * all_gates : 0);
  Acc* const gate_sums = has_parts ? sums_of_parts.get() : p.grad_gates;
  parallel_tasks(groups * parts, torch::stable::get_num_threads(), [&](const auto& take) {
    PairsByExpert pairs(size.rows, p.top_k, p.num_experts);
    const auto sums = scratch<Acc>(kConverts ? size.rows * width : 0);
    const auto room = scratch<Operand>(p.packed == nullptr ? kPackedTogether : 0);
    const auto each_task = [&](const auto& multiply_task) {
      int64_t listed = -1;
      for (int64_t i = take(); i < groups * parts; i = take()) {
        const int64_t group = i / parts, part = i % parts;
        const int64_t first = group * size.rows, rows = std::min(size.rows, p.count - first);
        const int64_t column = part * width, columns = std::min(width, p.to - column);
        if (group != listed) pairs.list(p.experts, first, first + rows);
        listed = group;
        Task<Acc, Operand> task{
            .pairs = &pairs,
            .first_row = first,
            .begin = column,
            .end = column + columns,
            .sums = sums.get(),
            .stride = columns,
            .gate_sums = p.with_gates ? gate_sums + part * all_gates : nullptr,
            .room = room.get(),
        };
        if constexpr (!kConverts) {
          task.sums = p.out + first * p.to + column;
          task.stride = p.to;
        }
        for (int64_t r = 0; r < rows; ++r) std::fill_n(task.sums + r * task.stride, columns, Acc(0));
        if (p.with_gates) std::fill_n(task.gate_sums + first * p.top_k, rows * p.top_k, Acc(0));
        multiply_task(task);
        if constexpr (kConverts) {
          for (int64_t r = 0; r < rows; ++r) {
            round_all(task.sums + r * columns, columns, p.out + (first + r) * p.to + column);
          }
        }
      }
    };
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      LeftBlock left(operands_of<Operand>(std::min(kInnerBlock, p.from)));
      each_task([&](const auto& task) { multiply_panel_amx(tiles, p, task, &left); });
    });
    if (with_amx) return;
    const auto converted = scratch<Operand>(kConverts ? kTileRows * kInnerBlock : 0);
    each_task([&](const auto& task) { multiply_panel(p, task, converted.get()); });
  });
  if (has_parts) add_parts(gate_sums, parts, all_gates, p.grad_gates);
}

// Weights [E, N, D] as matrices [D, N], or [N, D] for the gradient of the rows.
template <typename T>
Unpacked<T> unpacked_weight(const Tensor& weight, bool for_gradient) {
  const int64_t outputs = weight.size(1), features = weight.size(2);
  return for_gradient
             ? Unpacked<T>{data<T>(weight), weight.size(0), outputs, features, outputs * features, features, 1}
             : Unpacked<T>{data<T>(weight), weight.size(0), features, outputs, outputs * features, 1, features};
}

// Calls multiply_with(packed) with the operands of this processor for `pairs` pairs: all matrices packed, or null.
template <typename T, typename MultiplyWith>
void with_operands(const Unpacked<T>& m, int64_t pairs, const MultiplyWith& multiply_with) {
  with_operand<T>([&]<typename Operand>(Operand) {
    const int64_t size = m.matrices * operands_of<Operand>(m.rows) * m.columns;
    const bool is_packed = size == 0 || (pairs > kPairsOfPacking * m.matrices && size <= kPackedBefore);
    const auto packed = is_packed ? pack_operands<Operand>(m) : Scratch<Operand>();
    multiply_with(static_cast<const Operand*>(packed.get()));
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
  const Unpacked<T> matrices = unpacked_weight<T>(weight, false);
  with_operands(matrices, rows * top_k, [&]<typename Operand>(const Operand* packed) {
    multiply(
        Product<T, Operand>{
            .rows = data<T>(x),
            .row_stride = x.stride(0),
            .matrices = matrices,
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
        });
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
  const Unpacked<T> matrices = unpacked_weight<T>(weight, true);
  with_operands(matrices, rows * top_k, [&]<typename Operand>(const Operand* packed) {
    multiply(
        Product<T, Operand>{
            .rows = data<T>(grad),
            .row_stride = grad.stride(0),
            .matrices = matrices,
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
            .grad_gates = with_gates ? mutable_data<Acc>(grad_gates) : nullptr,
            .out = mutable_data<T>(grad_x),
        });
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
