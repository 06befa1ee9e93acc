// routed_matmul on the CPU. Few rows are routed and multiplied here, and the only tensor made is the result: for one
// row, the overhead of cosine_topk and expert_matmul is as large as their arithmetic. Larger batches call those two.
#include "../routed_matmul.h"

#include "../cosine_topk.h"
#include "../expert_matmul.h"
#include "few_rows.h"
#include "routing.h"

namespace rbm::cpu {
namespace {

template <typename T>
Tensor few_rows_at_once(
    const Tensor& x, const Tensor& memory, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k,
    double temperature) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), features = x.size(1), num_experts = weight.size(0), out_features = weight.size(1);
  const auto numbers = scratch<Acc>(2 * rows * k + num_experts);
  const auto experts = scratch<int32_t>(rows * k);
  Acc* const gates = numbers.get();
  Acc* const inverse_norms = gates + 2 * rows * k;
  Scratch<Acc> copies;
  const Routing<T> routing =
      routing_of<T>(x, memory, k, temperature, inverse_norms, copies, gates, experts.get(), gates + rows * k);
  route_in_parallel(routing, rows, kMultiplicationsOfThread);

  PairsByExpert pairs(rows, k, num_experts);
  pairs.list(experts.get(), 0, rows);
  Tensor y = new_tensor(x.scalar_type(), {rows, out_features});
  multiply_few_rows(
      FewRows<T>{
          .x = data<T>(x),
          .row_stride = x.stride(0),
          .weight = data<T>(weight),
          .bias = bias ? data<T>(*bias) : nullptr,
          .gates = gates,
          .pairs = &pairs,
          .rows = rows,
          .top_k = k,
          .in_features = features,
          .out_features = out_features,
          .num_experts = num_experts,
          .y = mutable_data<T>(y),
      });
  return y;
}

}  // namespace

Tensor routed_matmul(
    const Tensor& x_any, const Tensor& memory_any, const Tensor& weight_any, const std::optional<Tensor>& bias_any,
    int64_t k, double temperature) {
  const Checks check("routed_matmul");
  check_weights(check, x_any, weight_any, bias_any);
  check_routing(check, "x", x_any, memory_any, k, temperature);
  check.shape("memory", memory_any, {weight_any.size(0), x_any.size(1)}, "experts of weight by the features of x");
  const ScalarType dtype = x_any.scalar_type();
  const bool served = dtype != ScalarType::Half && memory_any.scalar_type() == accumulation(dtype);
  const bool few = dtype == ScalarType::BFloat16 ? are_few<BFloat16>(x_any.size(0), k, weight_any.size(0))
                                                 : are_few<float>(x_any.size(0), k, weight_any.size(0));
  if (!served || !few) {
    const auto [gates, experts, cosines] = cosine_topk(x_any, memory_any, k, temperature);
    const Tensor accumulated = as_dtype(gates, accumulation(dtype));
    return expert_matmul(x_any, weight_any, bias_any, accumulated, experts, {}, {}, {}, 0);
  }
  const Tensor x = with_adjacent_features(x_any), memory = dense(memory_any), weight = dense(weight_any);
  const std::optional<Tensor> bias = dense(bias_any);
  return with_type(dtype, [&]<typename T>(T) { return few_rows_at_once<T>(x, memory, weight, bias, k, temperature); });
}

}  // namespace rbm::cpu
