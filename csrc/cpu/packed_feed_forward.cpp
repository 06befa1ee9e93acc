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

// Room for the routing and the hidden rows of some rows.
template <typename T>
struct Room {
  Scratch<Accumulation<T>> numbers;
  Scratch<std::byte> hidden;
  Scratch<int32_t> experts;

  Room(const FeedForward<T>& all, int64_t rows)
      : numbers(scratch<Accumulation<T>>(2 * rows * all.routing.top_k)),
        hidden(scratch<std::byte>(rows * all.routing.top_k * hidden_bytes<T>(all.out.features))),
        experts(scratch<int32_t>(rows * all.routing.top_k)) {}
};

// Answers of the rows [first, first + count), [count, N]. route(routing) routes them, and multiply(layer) computes a
// product.
template <typename T, typename Route, typename Multiply>
void answer_rows(
    const FeedForward<T>& all, const Room<T>& room, int64_t first, int64_t count, T* y, const Route& route,
    const Multiply& multiply) {
  Routing<T> routing = all.routing;
  routing.h += first * routing.row_stride;
  routing.gates = room.numbers.get();
  routing.cosines = room.numbers.get() + count * routing.top_k;
  routing.experts = room.experts.get();
  route(routing);
  GivenPairs<T> given{nullptr, routing.experts, room.hidden.get(), all.out.features, all.activation};
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
  multiply(layer);
  given.gates = routing.gates;
  given.writes.reset();
  layer.experts = all.out;
  layer.y = y;
  layer.y_stride = all.out.outputs;
  multiply(layer);
}

// Many rows are divided into parts, each of which a thread answers alone, and few rows among threads for each product.
template <typename T>
Tensor answers(const Tensor& x, const FeedForward<T>& all) {
  const int64_t rows = x.size(0), outputs = all.out.outputs, num_experts = all.routing.num_experts;
  const int64_t k = all.routing.top_k;
  Tensor y = new_tensor(x.scalar_type(), {rows, outputs});
  if (rows == 0 || outputs == 0) return y;
  T* const numbers = mutable_data<T>(y);
  const int64_t threads = Call().threads();
  RowQueue queue(rows, threads, num_experts, k);
  if (!queue.serves()) {
    answer_rows(
        all, Room<T>(all, rows), 0, rows, numbers,
        [&](const Routing<T>& routing) { route_in_parallel(routing, rows, kMultiplicationsOfThread); },
        [&](const PackedLayer<T>& layer) { answer(layer, rows); });
    return y;
  }
  const Call call;
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const Room<T> room(all, queue.largest());
    const auto work = scratch<Accumulation<T>>(routing_scratch(all.routing, queue.largest()));
    for (RowRange part = queue.take(); part.count > 0; part = queue.take()) {
      answer_rows(
          all, room, part.first, part.count, numbers + part.first * outputs,
          [&](const Routing<T>& routing) { route_rows(routing, 0, part.count, work.get()); },
          [&](const PackedLayer<T>& layer) { answer_alone(layer, part.count); });
    }
  });
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
