// pack_experts and routed_matmul_packed: a whole layer at inference, for any number of rows. Only the result is
// written. Every thread routes the rows that it multiplies, so threads synchronise only once, at the end.
#include "../packed_experts.h"

#include <algorithm>

#include "../cosine_topk.h"
#include "../expert_matmul.h"
#include "packed_experts_amx.h"
#include "packed_layer.h"
#include "shares.h"

namespace rbm::cpu {
namespace {

// Buffers of a thread, for as many rows as it processes at once.
template <typename T, typename Operand>
struct Workplace {
  using Acc = Accumulation<T>;
  using Row = PackedProduct<T, Operand>::Row;
  Scratch<Acc> gates, work, sums;
  Scratch<Row> converted;
  Scratch<int32_t> chosen;
  PairsByExpert pairs;
  int64_t features;  // of a row as it is multiplied
  bool converts;     // whether rows are copied, to another type or to an even number of features
  bool is_direct;    // whether sums are written to the result itself

  Workplace(const PackedLayer<T>& layer, int64_t rows, int64_t padded)
      : gates(scratch<Acc>(2 * rows * layer.routing.top_k)),
        work(scratch<Acc>(routing_scratch(layer.routing, rows))),
        chosen(scratch<int32_t>(rows * layer.routing.top_k)),
        pairs(rows, layer.routing.top_k, layer.routing.num_experts),
        features(packed_rows<Operand>(layer.experts.features) - 1),
        converts(!layer.reads_hidden() && (!std::is_same_v<T, Row> || features != layer.experts.features)),
        is_direct(!layer.writes_hidden() && std::is_same_v<T, Acc> && padded <= layer.y_stride) {
    if (!is_direct) sums = scratch<Acc>(rows * padded + kMostLanes);
    if (converts) converted = scratch<Row>(rows * features);
  }
};

// Panels of columns that threads can divide among them. A thread activates what it has multiplied, so gates and values
// are divided alike, and not at all if a panel has both.
template <typename T>
int64_t divisible_panels(const PackedLayer<T>& layer, const PackedSizes& sizes) {
  if (!layer.writes_hidden()) return sizes.panels(layer.experts.outputs);
  const int64_t features = layer.given->features;
  return layer.experts.outputs > features && features % sizes.width != 0 ? 1 : sizes.panels(features);
}

// The hidden rows of the rows from `first_row` on.
template <typename T>
HiddenRows hidden_rows(const PackedLayer<T>& layer, int64_t first_row) {
  const GivenPairs<T>& given = *layer.given;
  const int64_t bytes = hidden_bytes<T>(given.features);
  return {given.hidden + first_row * layer.routing.top_k * bytes, bytes, given.features, *given.writes};
}

// The first product, expert by expert, so that what is activated comes from a cache. multiply(first, last) multiplies
// panels of columns.
template <typename T, typename Operand, typename Multiply>
void write_hidden(
    const PackedLayer<T>& layer, const PackedSizes& sizes, const HiddenRows& hidden, int64_t first_panel,
    int64_t last_panel, PackedProduct<T, Operand>* product, const Multiply& multiply) {
  using Row = PackedProduct<T, Operand>::Row;
  const int64_t features = hidden.features;
  const bool is_whole = last_panel - first_panel == divisible_panels(layer, sizes);
  const int64_t begin = first_panel * sizes.width;
  const int64_t end = is_whole ? features : std::min(last_panel * sizes.width, features);
  const int64_t padded = packed_rows<Operand>(features) - 1;
  for (int64_t e = 0; e < layer.experts.num_experts; ++e) {
    const Pair* const pairs = product->pairs->of(e);
    const int64_t count = product->pairs->count(e);
    if (count == 0) continue;
    product->first_expert = e;
    product->last_expert = e + 1;
    product->own_sums = pairs;
    if (is_whole) {
      multiply(0, sizes.panels(layer.experts.outputs));
    } else {
      for (int64_t half = 0; half < layer.experts.outputs; half += features) {
        multiply(half / sizes.width + first_panel, half / sizes.width + last_panel);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto* const sums = product->sums_of(pairs[i]);
      Row* const row = reinterpret_cast<Row*>(hidden.numbers + pairs[i].index * hidden.bytes);
      activate(hidden.activation, sums + begin, sums + features + begin, end - begin, row + begin);
      if (end == features) std::fill(row + features, row + padded, Row(Accumulation<T>(0)));
    }
  }
}

// Processes panels of columns [first_panel, last_panel) in one thread, of the rows that take() returns until it returns
// none; at most `most` at once.
template <typename Operand, typename T, typename Take>
void serve(
    const PackedLayer<T>& layer, const PackedSizes& sizes, const Take& take, int64_t most, int64_t first_panel,
    int64_t last_panel) {
  using Acc = Accumulation<T>;
  using Row = PackedProduct<T, Operand>::Row;
  const int64_t outputs = layer.experts.outputs, features = layer.experts.features, padded = sizes.padded(outputs);
  const int64_t num_experts = layer.experts.num_experts, top_k = layer.routing.top_k;
  Workplace<T, Operand> own(layer, most, padded);
  std::optional<FeatureList> list;
  if (layer.leaves_out_zeros) list.emplace(features);
  for (RowRange part = take(); part.count > 0; part = take()) {
    const int64_t first = part.first, rows = part.count;
    const GivenPairs<T>* const given = layer.given;
    if (layer.is_routed) {
      Routing<T> routing = layer.routing;
      routing.h += first * routing.row_stride;
      routing.gates = own.gates.get();
      routing.cosines = own.gates.get() + rows * top_k;
      routing.experts = own.chosen.get();
      route_rows(routing, 0, rows, own.work.get());
    } else {
      std::fill_n(own.gates.get(), rows * top_k, Acc(1));
      if (given == nullptr) std::fill_n(own.chosen.get(), rows, 0);
    }
    own.pairs.list(given ? given->experts + first * top_k : own.chosen.get(), 0, rows);
    PackedProduct<T, Operand> product{
        .rows = own.converted.get(),
        .row_stride = own.features,
        .experts = layer.experts,
        .gates = given && given->gates ? given->gates + first * top_k : own.gates.get(),
        .pairs = &own.pairs,
        .count = rows,
        .sums = own.sums.get(),
        .sum_stride = padded,
        .first_expert = 0,
        .last_expert = num_experts,
        .own_rows = layer.reads_hidden() && top_k > 1,
        .list = list ? &*list : nullptr,
    };
    if (layer.reads_hidden()) {
      product.row_stride = hidden_bytes<T>(features) / sizeof(Row);
      product.rows = reinterpret_cast<const Row*>(given->hidden) + first * top_k * product.row_stride;
    } else if (own.converts) {
      for (int64_t row = 0; row < rows; ++row) {
        const T* const source = layer.x + (first + row) * layer.x_stride;
        Row* const target = own.converted.get() + row * own.features;
        for (int64_t d = 0; d < features; ++d) target[d] = static_cast<Row>(source[d]);
        for (int64_t d = features; d < own.features; ++d) target[d] = Row(Acc(0));
      }
    } else if constexpr (std::is_same_v<T, Row>) {
      product.rows = layer.x + first * layer.x_stride;
      product.row_stride = layer.x_stride;
    }
    if constexpr (std::is_same_v<T, Acc>) {
      if (own.is_direct) {
        product.sums = layer.y + first * layer.y_stride;
        product.sum_stride = layer.y_stride;
      }
    }
    // With one kernel or the other.
    const auto all = [&](const auto& multiply) {
      if (!layer.writes_hidden()) return multiply(first_panel, last_panel);
      write_hidden(layer, sizes, hidden_rows(layer, first), first_panel, last_panel, &product, multiply);
    };
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      LeftBlock left(std::min(kAmxInner, operands_of<Operand>(features)));
      if (layer.writes_hidden() && are_whole_blocks(features, given->features)) {
        const int64_t from = first_panel * sizes.width, to = std::min(last_panel * sizes.width, given->features);
        return activate_packed_amx(tiles, product, hidden_rows(layer, first), from, to, &left);
      }
      all([&](int64_t from, int64_t to) { multiply_packed_amx(tiles, product, from, to, &left); });
    });
    if (!with_amx) all([&](int64_t from, int64_t to) { multiply_packed(product, from, to); });
    if (own.is_direct || layer.writes_hidden()) continue;
    const int64_t column = first_panel * sizes.width, columns = std::min(last_panel * sizes.width, outputs) - column;
    for (int64_t row = 0; row < rows; ++row) {
      const Acc* const source = own.sums.get() + row * padded + column;
      T* const target = layer.y + (first + row) * layer.y_stride + column;
      if constexpr (std::is_same_v<T, BFloat16>) {
        round_all(source, columns, target);
      } else {
        std::copy_n(source, columns, target);
      }
    }
  }
}

// Processes rows [begin, end) in one thread.
template <typename Operand, typename T>
void serve_rows(
    const PackedLayer<T>& layer, const PackedSizes& sizes, int64_t begin, int64_t end, int64_t first_panel,
    int64_t last_panel) {
  const int64_t most = std::min(rows_at_once(layer.experts.num_experts, layer.routing.top_k), end - begin);
  const auto take = [&] {
    const RowRange part{begin, std::min(most, end - begin)};
    begin += part.count;
    return part;
  };
  serve<Operand>(layer, sizes, take, most, first_panel, last_panel);
}

}  // namespace

template <typename T>
void answer_alone(const PackedLayer<T>& layer, int64_t rows) {
  const PackedSizes sizes = PackedSizes::of<Accumulation<T>>();
  with_operand<T>([&]<typename Operand>(Operand) {
    serve_rows<Operand>(layer, sizes, 0, rows, 0, divisible_panels(layer, sizes));
  });
}
template void answer_alone(const PackedLayer<double>&, int64_t);
template void answer_alone(const PackedLayer<float>&, int64_t);
template void answer_alone(const PackedLayer<BFloat16>&, int64_t);

template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows) {
  const PackedSizes sizes = PackedSizes::of<Accumulation<T>>();
  const PackedExperts<T>& experts = layer.experts;
  const int64_t routed = layer.is_routed ? experts.num_experts : 0, panels = divisible_panels(layer, sizes);
  const int64_t multiplied = layer.leaves_out_zeros ? ceil_div(experts.features, kMostlyZero) : experts.features;
  const int64_t multiplications =
      rows * (layer.routing.top_k * sizes.padded(experts.outputs) * multiplied + routed * experts.features);
  const Call call;
  const Split split = Split::of(call, rows, multiplications, experts.outputs, panels);
  RowQueue queue(rows, split.rows, experts.num_experts, layer.routing.top_k);
  with_operand<T>([&]<typename Operand>(Operand) {
    if (split.columns == 1 && split.rows > 1 && queue.serves()) {
      const auto take = [&] { return queue.take(); };
      return parallel_for(
          0, split.rows, 1, [&](int64_t, int64_t) { serve<Operand>(layer, sizes, take, queue.largest(), 0, panels); });
    }
    split.run(rows, panels, [&](int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
      serve_rows<Operand>(layer, sizes, begin, end, first_panel, last_panel);
    });
  });
}
template void answer(const PackedLayer<double>&, int64_t);
template void answer(const PackedLayer<float>&, int64_t);
template void answer(const PackedLayer<BFloat16>&, int64_t);

namespace {

template <typename T>
Tensor route_and_multiply(
    const Tensor& x, const Tensor& memory, const Tensor& packed, int64_t outputs, int64_t k, double temperature) {
  const int64_t rows = x.size(0), num_experts = packed.size(0);
  Tensor y = new_tensor(x.scalar_type(), {rows, outputs});
  if (rows == 0 || outputs == 0) return y;
  const auto inverse_norms = scratch<Accumulation<T>>(num_experts);
  Scratch<Accumulation<T>> copies;
  answer(
      PackedLayer<T>{
          .x = data<T>(x),
          .x_stride = x.stride(0),
          .routing = routing_of<T>(x, memory, k, temperature, inverse_norms.get(), copies),
          .is_routed = true,
          .experts{data<T>(packed), num_experts, x.size(1), outputs},
          .y = mutable_data<T>(y),
          .y_stride = outputs,
      },
      rows);
  return y;
}

template <typename T>
Tensor packed_of(const Tensor& weight, const std::optional<Tensor>& bias) {
  const PackedSizes sizes = PackedSizes::of<Accumulation<T>>();
  const int64_t num_experts = weight.size(0), outputs = weight.size(1), features = weight.size(2);
  Tensor packed = new_tensor(weight.scalar_type(), {num_experts, packed_rows_of<T>(features), sizes.padded(outputs)});
  const Unpacked<T> unpacked{data<T>(weight), num_experts, features, outputs, outputs * features, 1, features};
  const Bias<T> biases{true, bias ? data<T>(*bias) : nullptr};
  with_operand<T>([&]<typename Operand>(Operand) {
    using Weight = typename PackedProduct<T, Operand>::Weight;
    pack_into(unpacked, biases, reinterpret_cast<Weight*>(mutable_data<T>(packed)));
  });
  return packed;
}

}  // namespace

Tensor pack_experts(const Tensor& weight_any, const std::optional<Tensor>& bias_any) {
  const Checks check("pack_experts");
  check.dtype("weight", weight_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16});
  check.shape("weight", weight_any, {kAnySize, kAnySize, kAnySize}, "experts by outputs by features");
  if (bias_any) {
    check.dtype("bias", *bias_any, {weight_any.scalar_type()});
    check.shape("bias", *bias_any, {weight_any.size(0), weight_any.size(1)}, "experts by outputs, as in weight");
    check.same_device("bias", *bias_any, "weight", weight_any);
  }
  const Tensor weight = dense(weight_any);
  const std::optional<Tensor> bias = dense(bias_any);
  return with_type(weight.scalar_type(), [&]<typename T>(T) { return packed_of<T>(weight, bias); });
}

Tensor routed_matmul_packed(
    const Tensor& x_any, const Tensor& memory_any, const Tensor& packed, int64_t out_features, int64_t k,
    double temperature) {
  const Checks check("routed_matmul_packed");
  const ScalarType dtype = x_any.scalar_type();
  check_routing(check, "x", x_any, memory_any, k, temperature);
  check.dtype("x", x_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16});
  check.dtype("memory", memory_any, {accumulation(dtype)});
  check_out_features(check, out_features);
  check_packed(check, "packed", packed, x_any, memory_any.size(0), x_any.size(1), out_features);
  const Tensor x = with_adjacent_features(x_any), memory = dense(memory_any);
  return with_type(
      dtype, [&]<typename T>(T) { return route_and_multiply<T>(x, memory, packed, out_features, k, temperature); });
}

}  // namespace rbm::cpu
