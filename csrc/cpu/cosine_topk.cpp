// cosine_topk on the CPU. The forward pass is that of routing.h.
#include "../cosine_topk.h"

#include <algorithm>

#include "dot_tile.h"
#include "routing.h"
#include "rows.h"

namespace rbm::cpu {
namespace {

template <typename T>
void route(
    const Tensor& h, const Tensor& memory, int64_t k, double temperature, Tensor& gates, Tensor& experts,
    Tensor& cosines) {
  using Acc = Accumulation<T>;
  const auto inverse_norms = scratch<Acc>(memory.size(0));
  Scratch<Acc> copies;
  const Routing<T> routing = routing_of<T>(
      h, memory, k, temperature, inverse_norms.get(), copies, mutable_data<Acc>(gates), mutable_data<int32_t>(experts),
      mutable_data<Acc>(cosines));
  route_in_parallel(routing, h.size(0), kGrainMultiplications);
}

template <typename T>
struct RoutingGrad {
  using Acc = Accumulation<T>;
  const T* h;
  int64_t row_stride;
  const Acc* memory;         // [E, D], contiguous
  const Acc* inverse_norms;  // [E]
  int64_t features, top_k;
  Acc temperature;
  const Acc *grad_gates, *grad_cosines;  // [B, k], or null
  const Acc *gates, *cosines;            // [B, k]
  const int32_t* experts;                // [B, k]
  T* grad_h;                             // [B, D], contiguous
};

// Rows [begin, end). `slopes` has room for k and `row_grad` for D.
template <int kBytes, typename T>
RBM_INLINE void route_rows_backward_lanes(
    const RoutingGrad<T>& r, int64_t begin, int64_t end, Accumulation<T>* slopes, Accumulation<T>* row_grad) {
  using Acc = Accumulation<T>;
  for (int64_t b = begin; b < end; ++b) {
    const T* const row = r.h + b * r.row_stride;
    T* const __restrict out = r.grad_h + b * r.features;
    Acc square[1], factor = 1;
    square_tile<kBytes, 1>(&row, r.features, square);
    if (!square_is_safe(square[0])) {
      factor = kShrink<Acc>;
      const auto copy = shrunk(row, r.features);
      const Acc* const short_row = copy.get();
      square_tile<kBytes, 1>(&short_row, r.features, square);
    }
    const Acc norm = std::sqrt(square[0]);
    // A row that is too short has no direction, nor has a NaN row: NaN > kNormEps is false.
    if (!(norm > static_cast<Acc>(kNormEps))) {
      std::fill_n(out, r.features, T(Acc(0)));
      continue;
    }
    // Gradients of the chosen cosines: their own, plus those through the softmax.
    const int64_t first = b * r.top_k;
    Acc mean = 0, along_row = 0;
    if (r.grad_gates != nullptr) {
      for (int64_t j = 0; j < r.top_k; ++j) mean += r.gates[first + j] * r.grad_gates[first + j];
    }
    for (int64_t j = 0; j < r.top_k; ++j) {
      Acc slope = r.grad_cosines == nullptr ? 0 : r.grad_cosines[first + j];
      if (r.grad_gates != nullptr) slope += r.gates[first + j] * (r.grad_gates[first + j] - mean) / r.temperature;
      slopes[j] = slope;
      along_row += slope * r.cosines[first + j];
    }
    const Acc scale = -along_row / square[0];
    for (int64_t d = 0; d < r.features; ++d) row_grad[d] = scale * (static_cast<Acc>(row[d]) * factor);
    for (int64_t j = 0; j < r.top_k; ++j) {
      const int64_t expert = r.experts[first + j];
      const Acc* const __restrict memory = r.memory + expert * r.features;
      const Acc weight = slopes[j] * r.inverse_norms[expert] / norm;
      for (int64_t d = 0; d < r.features; ++d) row_grad[d] += weight * memory[d];
    }
    for (int64_t d = 0; d < r.features; ++d) out[d] = static_cast<T>(row_grad[d] * factor);
  }
}
RBM_DISPATCH(route_rows_backward)

template <typename T>
void route_backward(
    const std::optional<Tensor>& grad_gates, const std::optional<Tensor>& grad_cosines, const Tensor& h,
    const Tensor& memory, const Tensor& gates, const Tensor& experts, const Tensor& cosines, double temperature,
    Tensor& grad_h) {
  using Acc = Accumulation<T>;
  const int64_t rows = h.size(0), features = h.size(1), num_experts = memory.size(0), top_k = gates.size(1);
  const auto inverse_norms = scratch<Acc>(num_experts);
  Scratch<Acc> copies;
  const Acc* const vectors = measured(data<Acc>(memory), num_experts, features, inverse_norms.get(), copies);
  const RoutingGrad<T> routing{
      .h = data<T>(h),
      .row_stride = h.stride(0),
      .memory = vectors,
      .inverse_norms = inverse_norms.get(),
      .features = features,
      .top_k = top_k,
      .temperature = static_cast<Acc>(temperature),
      .grad_gates = grad_gates ? data<Acc>(*grad_gates) : nullptr,
      .grad_cosines = grad_cosines ? data<Acc>(*grad_cosines) : nullptr,
      .gates = data<Acc>(gates),
      .cosines = data<Acc>(cosines),
      .experts = data<int32_t>(experts),
      .grad_h = mutable_data<T>(grad_h),
  };
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplications / std::max<int64_t>(1, (top_k + 2) * features));
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    const auto slopes = scratch<Acc>(top_k);
    const auto row_grad = scratch<Acc>(features);
    route_rows_backward(routing, begin, end, slopes.get(), row_grad.get());
  });
}

// With a float64 memory, rows of any dtype are converted to float64.
ScalarType served_dtype(const Tensor& h, const Tensor& memory) {
  return is_wide(h, memory) ? ScalarType::Double : cpu::served_dtype(h.scalar_type());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cosine_topk(
    const Tensor& h_any, const Tensor& memory_any, int64_t k, double temperature) {
  check_routing(Checks("cosine_topk"), "h", h_any, memory_any, k, temperature);
  const ScalarType dtype = served_dtype(h_any, memory_any);
  const Tensor h = with_adjacent_features(as_dtype(h_any, dtype));
  const Tensor memory = dense(as_dtype(memory_any, accumulation(dtype)));
  Tensor gates = new_tensor(memory.scalar_type(), {h.size(0), k});
  Tensor experts = new_tensor(ScalarType::Int, {h.size(0), k});
  Tensor cosines = new_tensor(memory.scalar_type(), {h.size(0), k});
  with_type(dtype, [&]<typename T>(T) { route<T>(h, memory, k, temperature, gates, experts, cosines); });
  return {gates, experts, cosines};
}

Tensor cosine_topk_backward(
    const std::optional<Tensor>& grad_gates_any, const std::optional<Tensor>& grad_cosines_any, const Tensor& h_any,
    const Tensor& memory_any, const Tensor& gates_any, const Tensor& experts_any, const Tensor& cosines_any,
    double temperature) {
  const Checks check("cosine_topk_backward");
  check.shape("gates", gates_any, {kAnySize, kAnySize}, "rows by choices");
  check_routing(check, "h", h_any, memory_any, gates_any.size(1), temperature);
  const ScalarType dtype = served_dtype(h_any, memory_any), wide = accumulation(dtype);
  check.dtype("experts", experts_any, {ScalarType::Int});
  check.shape("experts", experts_any, {h_any.size(0), gates_any.size(1)}, "one for each choice of each row");
  const auto of_pairs = [&](const char* name, const Tensor& pairs) {
    check.dtype(name, pairs, {ScalarType::Float, ScalarType::Double});
    check.shape(name, pairs, {h_any.size(0), gates_any.size(1)}, "one for each choice of each row");
    return dense(as_dtype(pairs, wide));
  };
  const Tensor h = with_adjacent_features(as_dtype(h_any, dtype)), memory = dense(as_dtype(memory_any, wide));
  const Tensor gates = of_pairs("gates", gates_any), cosines = of_pairs("cosines", cosines_any);
  const Tensor experts = dense(experts_any);
  check_experts(check, experts, memory.size(0));
  std::optional<Tensor> grad_gates, grad_cosines;
  if (grad_gates_any) grad_gates = of_pairs("grad_gates", *grad_gates_any);
  if (grad_cosines_any) grad_cosines = of_pairs("grad_cosines", *grad_cosines_any);

  Tensor grad_h = new_tensor(h.scalar_type(), {h.size(0), h.size(1)});
  with_type(dtype, [&]<typename T>(T) {
    route_backward<T>(grad_gates, grad_cosines, h, memory, gates, experts, cosines, temperature, grad_h);
  });
  return as_dtype(grad_h, h_any.scalar_type());
}

}  // namespace rbm::cpu
