// packed_network: all layers of a network, for any number of rows, in one call. So a multi-threaded Python server
// releases the GIL once per answer rather than once per operator.
#include "../packed_network.h"

#include <algorithm>
#include <cmath>

#include "int8_layer.h"
#include "network_form.h"
#include "packed_layer.h"

namespace rbm::cpu {
namespace {

// Rows that pass through all layers together: their intermediate results stay in cache, whatever the batch size.
constexpr int64_t kRowsAtOnce = 4096;
// A shorter row is divided by this, as torch.nn.functional.normalize does.
constexpr float kShortest = 1e-12f;

struct Answers {
  const float* x;
  int64_t x_stride, rows;
  float* y;  // [rows, y_stride]
  int64_t y_stride;
};

// What follows a layer's product, row by row, in place.
struct Finish {
  Norm norm;
  const float *scale, *shift;  // [columns], of a norm
  float eps;                   // of layer norm
  bool activates;
  float negative_slope;
  const float* added;  // rows that are added after the activation; or null
  int64_t added_stride;
  bool is_unit;

  bool changes_rows() const { return norm != Norm::kNone || activates || added != nullptr || is_unit; }
};

// Plain loops that the compiler vectorises: a row's numbers are the same in every batch.
RBM_CLONES void finish(float* rows, int64_t stride, int64_t first, int64_t last, int64_t columns, const Finish& does) {
  const float *const scale = does.scale, *const shift = does.shift;
  for (int64_t r = first; r < last; ++r) {
    float* const row = rows + r * stride;
    if (does.norm == Norm::kLayer) {
      float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < columns; ++c) sum += row[c];
      const float mean = sum / static_cast<float>(columns);
#pragma omp simd reduction(+ : squares)
      for (int64_t c = 0; c < columns; ++c) squares += (row[c] - mean) * (row[c] - mean);
      const float factor = 1 / std::sqrt(squares / static_cast<float>(columns) + does.eps);
      for (int64_t c = 0; c < columns; ++c) row[c] = (row[c] - mean) * factor * scale[c] + shift[c];
    } else if (does.norm == Norm::kAffine) {
      for (int64_t c = 0; c < columns; ++c) row[c] = row[c] * scale[c] + shift[c];
    }
    if (does.activates && does.negative_slope == 0) {
      for (int64_t c = 0; c < columns; ++c) row[c] = row[c] < 0 ? 0 : row[c];  // keeps NaN; zero for minus infinity
    } else if (does.activates) {
      const float slope = does.negative_slope;
      for (int64_t c = 0; c < columns; ++c) row[c] = row[c] < 0 ? row[c] * slope : row[c];
    }
    if (does.added != nullptr) {
      const float* const added = does.added + r * does.added_stride;
      for (int64_t c = 0; c < columns; ++c) row[c] += added[c];
    }
    if (does.is_unit) {
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t c = 0; c < columns; ++c) squares += row[c] * row[c];
      const float root = std::sqrt(squares), length = root < kShortest ? kShortest : root;  // keeps NaN
      for (int64_t c = 0; c < columns; ++c) row[c] /= length;
    }
  }
}

void answer_layer(const StoredNetwork& network, const StoredLayer& s, const Answers& a) {
  const bool is_routed = s.memory != kNowhere;
  const bool leaves_out_zeros = s.is_finite != 0 && are_mostly_zero(a.x, a.x_stride, a.rows, s.inputs);
  Scratch<float> addresses, inverse_norms, copies;
  Routing<float> routing = no_routing<float>();
  if (is_routed) {
    const float* routed = a.x;
    int64_t routed_stride = a.x_stride;
    if (s.router != kNowhere) {
      routed_stride = PackedSizes::of<float>().padded(s.router_features);
      addresses = scratch<float>(a.rows * routed_stride);
      routed = addresses.get();
      answer(
          PackedLayer<float>{
              .x = a.x,
              .x_stride = a.x_stride,
              .routing = no_routing<float>(),
              .is_routed = false,
              .experts{network.at<float>(s.router), 1, s.inputs, s.router_features},
              .y = addresses.get(),
              .y_stride = routed_stride,
              .leaves_out_zeros = leaves_out_zeros},
          a.rows);
    }
    inverse_norms = scratch<float>(s.num_experts);
    const float* const memory = network.at<float>(s.memory);
    routing = {
        .h = routed,
        .row_stride = routed_stride,
        .memory = measured(memory, s.num_experts, s.router_features, inverse_norms.get(), copies),
        .inverse_norms = inverse_norms.get(),
        .features = s.router_features,
        .num_experts = s.num_experts,
        .top_k = s.top_k,
        .temperature = static_cast<float>(s.temperature),
        .gates = nullptr,
        .experts = nullptr,
        .cosines = nullptr,
        .over_all = s.over_all != 0};
  }
  if (s.weights == Weights::kInt8) {
    answer(
        Int8Layer{
            .x = a.x,
            .x_stride = a.x_stride,
            .features = s.inputs,
            .routing = routing,
            .is_routed = is_routed,
            .experts = network.at<int8_t>(s.experts),
            .outputs = s.outputs,
            .y = a.y,
            .y_stride = a.y_stride},
        a.rows);
  } else {
    answer(
        PackedLayer<float>{
            .x = a.x,
            .x_stride = a.x_stride,
            .routing = routing,
            .is_routed = is_routed,
            .experts{network.at<float>(s.experts), s.num_experts, s.inputs, s.outputs},
            .y = a.y,
            .y_stride = a.y_stride,
            .leaves_out_zeros = leaves_out_zeros},
        a.rows);
  }
  const bool has_norm = s.norm != Norm::kNone;
  const Finish does{
      .norm = s.norm,
      .scale = has_norm ? network.at<float>(s.scale) : nullptr,
      .shift = has_norm ? network.at<float>(s.shift) : nullptr,
      .eps = static_cast<float>(s.eps),
      .activates = s.activates != 0,
      .negative_slope = static_cast<float>(s.negative_slope),
      .added = s.adds_input != 0 ? a.x : nullptr,
      .added_stride = a.x_stride,
      .is_unit = s.is_unit != 0};
  if (!does.changes_rows()) return;
  const int64_t grain = std::max<int64_t>(1, kMultiplicationsOfThread / s.outputs);
  parallel_for(
      0, a.rows, grain, [&](int64_t begin, int64_t end) { finish(a.y, a.y_stride, begin, end, s.outputs, does); });
}

void answer_network(const StoredNetwork& network, const Answers& all) {
  int64_t widest = 0;
  for (int64_t i = 0; i + 1 < network.count(); ++i) widest = std::max(widest, network.layer(i).outputs);
  const int64_t stride = round_up(widest, kPanelColumns);  // whole vectors, on any processor
  const int64_t most = std::min(all.rows, kRowsAtOnce);
  const auto between = scratch<float>(2 * most * stride);
  for (int64_t first = 0; first < all.rows; first += most) {
    Answers a = all;
    a.x += first * all.x_stride;
    a.rows = std::min(most, all.rows - first);
    for (int64_t i = 0; i < network.count(); ++i) {
      const bool is_last = i + 1 == network.count();
      a.y = is_last ? all.y + first * all.y_stride : between.get() + i % 2 * most * stride;
      a.y_stride = is_last ? all.y_stride : stride;
      answer_layer(network, network.layer(i), a);
      a.x = a.y;
      a.x_stride = a.y_stride;
    }
  }
}

}  // namespace

Tensor packed_network(const Tensor& x_any, const Tensor& bytes, int64_t out_features) {
  const Checks check("packed_network");
  check.dtype("x", x_any, {ScalarType::Float});
  check.shape("x", x_any, {kAnySize, kAnySize}, "rows by features");
  check.dtype("network", bytes, {ScalarType::Byte});
  check.shape("network", bytes, {kAnySize}, "what pack_network returned");
  check.same_device("network", bytes, "x", x_any);
  if (!bytes.is_contiguous()) check.fail("network is not contiguous, expected what pack_network returned");
  const StoredNetwork network(check, data<uint8_t>(bytes), bytes.size(0));
  const int64_t features = network.layer(0).inputs, outputs = network.layer(network.count() - 1).outputs;
  check.shape("x", x_any, {kAnySize, features}, "rows by the network's features");
  if (out_features != outputs) check.fail("out_features is ", out_features, ", expected ", outputs, ", the network's");
  const Tensor x = with_adjacent_features(x_any);
  Tensor y = new_tensor(ScalarType::Float, {x.size(0), outputs});
  answer_network(network, {data<float>(x), x.stride(0), x.size(0), mutable_data<float>(y), outputs});
  return y;
}

}  // namespace rbm::cpu
