// pack_experts, routed_matmul_packed and expert_matmul_packed: a layer at inference, for any number of rows. Only the
// result is written. Every thread routes the rows that it multiplies, so threads synchronise only once, at the end.
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
  std::unique_ptr<Acc[]> gates, work, sums;
  std::unique_ptr<Row[]> converted;
  std::unique_ptr<int32_t[]> chosen;
  PairsByExpert pairs;
  int64_t features;  // of a row as it is multiplied
  bool converts;     // whether rows are copied, in another type or to an even number of features
  bool is_direct;    // whether sums are written to the result itself

  Workplace(const PackedLayer<T>& layer, int64_t rows, int64_t padded)
      : gates(scratch<Acc>(2 * rows * layer.routing.top_k)),
        work(scratch<Acc>(routing_scratch(layer.routing.num_experts))),
        chosen(scratch<int32_t>(rows * layer.routing.top_k)),
        pairs(rows, layer.routing.top_k, layer.routing.num_experts),
        features(packed_rows<Operand>(layer.experts.features) - 1),
        converts(!std::is_same_v<T, Row> || features != layer.experts.features),
        is_direct(std::is_same_v<T, Acc> && padded <= layer.y_stride) {
    if (!is_direct) sums = scratch<Acc>(rows * layer.results_of_row() * padded);
    if (converts) converted = scratch<Row>(rows * layer.inputs_of_row() * features);
  }
};

// Processes rows [begin, end) and panels of columns [first_panel, last_panel) in one thread.
template <typename Operand, typename T>
void serve(
    const PackedLayer<T>& layer, const PackedSizes& sizes, int64_t begin, int64_t end, int64_t first_panel,
    int64_t last_panel) {
  using Acc = Accumulation<T>;
  using Row = PackedProduct<T, Operand>::Row;
  const int64_t outputs = layer.experts.outputs, features = layer.experts.features, padded = sizes.padded(outputs);
  const int64_t num_experts = layer.experts.num_experts, top_k = layer.routing.top_k;
  const int64_t inputs_of_row = layer.inputs_of_row(), results_of_row = layer.results_of_row();
  const int64_t most = rows_at_once(num_experts, top_k);
  Workplace<T, Operand> own(layer, std::min(end - begin, most), padded);
  for (int64_t first = begin; first < end; first += most) {
    const int64_t rows = std::min(most, end - first);
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
        .own_rows = inputs_of_row > 1,
        .own_sums = results_of_row > 1,
    };
    const int64_t first_input = first * inputs_of_row, first_result = first * results_of_row;
    if (own.converts) {
      for (int64_t row = 0; row < rows * inputs_of_row; ++row) {
        const T* const source = layer.x + (first_input + row) * layer.x_stride;
        Row* const target = own.converted.get() + row * own.features;
        for (int64_t d = 0; d < features; ++d) target[d] = static_cast<Row>(source[d]);
        for (int64_t d = features; d < own.features; ++d) target[d] = Row(Acc(0));
      }
    } else if constexpr (std::is_same_v<T, Row>) {
      product.rows = layer.x + first_input * layer.x_stride;
      product.row_stride = layer.x_stride;
    }
    if constexpr (std::is_same_v<T, Acc>) {
      if (own.is_direct) {
        product.sums = layer.y + first_result * layer.y_stride;
        product.sum_stride = layer.y_stride;
      }
    }
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      LeftBlock left(std::min(kAmxInner, operands_of<Operand>(features)));
      multiply_packed_amx(tiles, product, first_panel, last_panel, &left);
    });
    if (!with_amx) multiply_packed(product, first_panel, last_panel);
    if (own.is_direct) continue;
    const int64_t column = first_panel * sizes.width, columns = std::min(last_panel * sizes.width, outputs) - column;
    for (int64_t row = 0; row < rows * results_of_row; ++row) {
      const Acc* const source = own.sums.get() + row * padded + column;
      T* const target = layer.y + (first_result + row) * layer.y_stride + column;
      for (int64_t c = 0; c < columns; ++c) target[c] = static_cast<T>(source[c]);
    }
  }
}

}  // namespace

template <typename T>
void answer(const PackedLayer<T>& layer, int64_t rows) {
  const PackedSizes sizes = PackedSizes::of<Accumulation<T>>();
  const PackedExperts<T>& experts = layer.experts;
  const int64_t routed = layer.is_routed ? experts.num_experts : 0, panels = sizes.panels(experts.outputs);
  const int64_t multiplications =
      rows * (layer.routing.top_k * sizes.padded(experts.outputs) + routed) * experts.features;
  const Call call;
  const Split split = Split::of(call, rows, multiplications, experts.outputs, panels);
  with_operand<T>([&]<typename Operand>(Operand) {
    split.run(rows, panels, [&](int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
      serve<Operand>(layer, sizes, begin, end, first_panel, last_panel);
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
  std::unique_ptr<Accumulation<T>[]> copies;
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
Tensor multiply_given(
    const Tensor& x, const std::optional<Tensor>& gates, const Tensor& experts, const Tensor& packed, int64_t outputs) {
  using Acc = Accumulation<T>;
  const int64_t rows = experts.size(0), top_k = experts.size(1), features = x.size(x.dim() - 1);
  const Tensor y =
      gates ? new_tensor(x.scalar_type(), {rows, outputs}) : new_tensor(x.scalar_type(), {rows, top_k, outputs});
  if (y.numel() == 0) return y;
  const GivenPairs<T> given{
      .gates = gates ? data<Acc>(*gates) : nullptr,
      .experts = data<int32_t>(experts),
      .own_rows = x.dim() == 3,
      .own_results = !gates,
  };
  Routing<T> routing = no_routing<T>();
  routing.num_experts = packed.size(0);
  routing.top_k = top_k;
  answer(
      PackedLayer<T>{
          .x = data<T>(x),
          .x_stride = x.dim() == 3 ? features : x.stride(0),
          .routing = routing,
          .is_routed = false,
          .experts{data<T>(packed), packed.size(0), features, outputs},
          .y = mutable_data<T>(y),
          .y_stride = outputs,
          .given = &given,
      },
      rows);
  return y;
}

// Rows of packed experts on this processor.
template <typename T>
int64_t packed_rows_of(int64_t features) {
  int64_t rows = 0;
  with_operand<T>([&]<typename Operand>(Operand) { rows = packed_rows<Operand>(features); });
  return rows;
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

namespace {

void check_packed(
    const Checks& check, const Tensor& x, const Tensor& packed, int64_t num_experts, int64_t features,
    int64_t out_features) {
  const ScalarType dtype = x.scalar_type();
  check.dtype("packed", packed, {dtype});
  check_out_features(check, out_features);
  const PackedSizes sizes = dtype == ScalarType::Double ? PackedSizes::of<double>() : PackedSizes::of<float>();
  const int64_t rows = with_type(dtype, [&]<typename T>(T) { return packed_rows_of<T>(features); });
  check.shape(
      "packed", packed, {num_experts, rows, sizes.padded(out_features)},
      "what pack_experts returned on this processor for out_features, the experts and the features of x");
  check.same_device("packed", packed, "x", x);
  if (!packed.is_contiguous()) check.fail("packed is not contiguous, expected what pack_experts returned");
}

}  // namespace

Tensor routed_matmul_packed(
    const Tensor& x_any, const Tensor& memory_any, const Tensor& packed, int64_t out_features, int64_t k,
    double temperature) {
  const Checks check("routed_matmul_packed");
  const ScalarType dtype = x_any.scalar_type();
  check_routing(check, "x", x_any, memory_any, k, temperature);
  check.dtype("x", x_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16});
  check.dtype("memory", memory_any, {accumulation(dtype)});
  check_packed(check, x_any, packed, memory_any.size(0), x_any.size(1), out_features);
  const Tensor x = with_adjacent_features(x_any), memory = dense(memory_any);
  return with_type(
      dtype, [&]<typename T>(T) { return route_and_multiply<T>(x, memory, packed, out_features, k, temperature); });
}

Tensor expert_matmul_packed(
    const Tensor& x_any, const std::optional<Tensor>& gates_any, const Tensor& experts_any, const Tensor& packed,
    int64_t out_features) {
  const Checks check("expert_matmul_packed");
  const ScalarType dtype = x_any.scalar_type();
  check.dtype("x", x_any, {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16});
  check.dtype("experts", experts_any, {ScalarType::Int});
  if (x_any.dim() == 3) {
    check.shape("x", x_any, {kAnySize, kAnySize, kAnySize}, "rows by choices by features");
    check.shape("experts", experts_any, {x_any.size(0), x_any.size(1)}, "rows by choices, as in x");
  } else {
    check.shape("x", x_any, {kAnySize, kAnySize}, "rows by features, or rows by choices by features");
    check.shape("experts", experts_any, {x_any.size(0), kAnySize}, "one row for each row of x");
  }
  check.same_device("experts", experts_any, "x", x_any);
  if (gates_any) {
    check.dtype("gates", *gates_any, {accumulation(dtype)});
    check.shape("gates", *gates_any, {experts_any.size(0), experts_any.size(1)}, "the shape of experts");
    check.same_device("gates", *gates_any, "x", x_any);
  }
  check.shape("packed", packed, {kAnySize, kAnySize, kAnySize}, "what pack_experts returned");
  check_packed(check, x_any, packed, packed.size(0), x_any.size(x_any.dim() - 1), out_features);
  const Tensor x = x_any.dim() == 3 ? dense(x_any) : with_adjacent_features(x_any), experts = dense(experts_any);
  const std::optional<Tensor> gates = dense(gates_any);
  check_experts(check, experts, packed.size(0));
  return with_type(dtype, [&]<typename T>(T) { return multiply_given<T>(x, gates, experts, packed, out_features); });
}

}  // namespace rbm::cpu
