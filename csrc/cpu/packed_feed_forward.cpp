// packed_feed_forward: rows are routed, and multiplied twice with their experts. Between the two products there
// is a row of activated numbers for each of a row's choices; a part of the batch at a time, so that they stay in a
// cache.
#include "../packed_feed_forward.h"

#include <algorithm>

#include "../cosine_topk.h"
#include "packed_layer.h"
#include "shares.h"

namespace rbm::cpu {
namespace {

template <typename T>
struct FeedForward {
  PackedExperts<T> in, out;
  Activation activation;
  Routing<T> routing;  // of all rows; gates, experts and cosines are those of a part
};

template <typename T>
Tensor answers(const Tensor& x, const FeedForward<T>& all) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), outputs = all.out.outputs, k = all.routing.top_k;
  Tensor y = new_tensor(x.scalar_type(), {rows, outputs});
  if (rows == 0 || outputs == 0) return y;
  const int64_t most = rows_at_once(all.routing.num_experts, k) * torch::stable::get_num_threads();
  const int64_t at_once = std::min(most, rows), bytes = hidden_bytes<T>(all.out.features);
  const auto numbers = scratch<Acc>(2 * at_once * k);
  const auto hidden = scratch<std::byte>(at_once * k * bytes);
  const auto experts = scratch<int32_t>(at_once * k);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    Routing<T> routing = all.routing;
    routing.h += first * routing.row_stride;
    routing.gates = numbers.get();
    routing.cosines = numbers.get() + count * k;
    routing.experts = experts.get();
    route_in_parallel(routing, count);
    GivenPairs<T> given{nullptr, experts.get(), hidden.get(), all.out.features, all.activation};
    PackedLayer<T> layer{
        .x = routing.h,
        .x_stride = routing.row_stride,
        .routing = routing,
        .is_routed = false,
        .experts = all.in,
        .y = nullptr,
        .y_stride = 0,
        .given = &given,
    };
    answer(layer, count);
    given.gates = routing.gates;
    given.writes.reset();
    layer.experts = all.out;
    layer.y = mutable_data<T>(y) + first * outputs;
    layer.y_stride = outputs;
    answer(layer, count);
  }
  return y;
}

}  // namespace

Tensor packed_feed_forward(
    const Tensor& x_any, const Tensor& memory_any, const Tensor& packed_in, const Tensor& packed_out,
    int64_t hidden_features, int64_t out_features, int64_t k, std::string activation, double temperature) {
  const Checks check("packed_feed_forward");
  const ScalarType dtype = x_any.scalar_type();
  check_routing(check, "x", x_any, memory_any, k, temperature);
  check.dtype("x", x_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16});
  check.dtype("memory", memory_any, {accumulation(dtype)});
  const std::optional<Activation> then = activation_named(activation);
  if (!then) check.fail("activation is '", activation, "', expected one of relu, gelu, silu, swiglu");
  if (hidden_features < 0 || hidden_features > kMostSize / 2) {
    check.fail("hidden_features is ", hidden_features, ", expected between 0 and ", kMostSize / 2);
  }
  check_out_features(check, out_features);
  const int64_t num_experts = memory_any.size(0), features = x_any.size(1), wide = numbers_of(*then) * hidden_features;
  check_packed(check, "packed_in", packed_in, x_any, num_experts, features, wide);
  check_packed(check, "packed_out", packed_out, x_any, num_experts, hidden_features, out_features);
  const Tensor x = with_adjacent_features(x_any), memory = dense(memory_any);
  return with_type(dtype, [&]<typename T>(T) {
    const auto inverse_norms = scratch<Accumulation<T>>(num_experts);
    Scratch<Accumulation<T>> copies;
    return answers(
        x, FeedForward<T>{
               .in{data<T>(packed_in), num_experts, features, wide},
               .out{data<T>(packed_out), num_experts, hidden_features, out_features},
               .activation = *then,
               .routing = routing_of<T>(x, memory, k, temperature, inverse_norms.get(), copies),
           });
  });
}

}  // namespace rbm::cpu
