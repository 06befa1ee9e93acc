// Routing rows to memory vectors: cosines, the k largest, softmax. Used by every operator that routes.
// The mathematics is in rbm_kernels/ops/cosine_topk/README.md.
#pragma once

#include <cstdint>

#include "../long_vectors.h"
#include "rows.h"
#include "vectors.h"

namespace rbm::cpu {

template <typename T>
struct Routing {
  using Acc = Accumulation<T>;
  const T* h;
  int64_t row_stride;
  const Acc* memory;         // [E, D], contiguous
  const Acc* inverse_norms;  // [E], of the memory vectors
  int64_t features, num_experts, top_k;
  Acc temperature;
  Acc* gates;             // [B, k]
  int32_t* experts;       // [B, k]
  Acc* cosines;           // [B, k]
  bool over_all = false;  // whether the softmax of the gates runs over all experts
};

// For a layer without routing, which has one expert.
template <typename T>
Routing<T> no_routing() {
  return {
      .h = nullptr,
      .row_stride = 0,
      .memory = nullptr,
      .inverse_norms = nullptr,
      .features = 0,
      .num_experts = 1,
      .top_k = 1,
      .temperature = 1,
      .gates = nullptr,
      .experts = nullptr,
      .cosines = nullptr};
}

// Experts are chosen for as many rows at once as a vector has lanes: one row per lane.
constexpr int64_t kMostLanes = 64 / static_cast<int64_t>(sizeof(float));

// Numbers in the scratch of route_rows for up to `rows` rows.
template <typename T>
int64_t routing_scratch(const Routing<T>& r, int64_t rows);

// A copy of `row` whose square does not overflow.
template <typename T>
Scratch<Accumulation<T>> shrunk(const T* row, int64_t features) {
  auto copy = scratch<Accumulation<T>>(features);
  for (int64_t d = 0; d < features; ++d) copy[d] = static_cast<Accumulation<T>>(row[d]) * kShrink<Accumulation<T>>;
  return copy;
}

// Routes rows [begin, end): writes their gates, experts and cosines. `work` has room for routing_scratch.
template <typename T>
void route_rows(const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* work);

// Routes all rows, in several threads if each gets at least `least` multiplications.
template <typename T>
void route_in_parallel(const Routing<T>& r, int64_t rows, int64_t least) {
  const int64_t grain = std::max<int64_t>(4, least / std::max<int64_t>(1, r.num_experts * r.features));
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    const auto work = scratch<Accumulation<T>>(routing_scratch(r, end - begin));
    route_rows(r, begin, end, work.get());
  });
}

// The memory vectors used for the cosines, and their inverse norms: `memory` itself, or a copy in `copies`, [E, D], in
// which long vectors are shrunk. This does not change cosines.
template <typename Acc>
const Acc* measured(const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms, Scratch<Acc>& copies);

// Routing of the rows h by these memory vectors, whose norms are computed here. Kernels that route tile by tile set the
// result pointers.
template <typename T>
Routing<T> routing_of(
    const Tensor& h, const Tensor& memory, int64_t k, double temperature, Accumulation<T>* inverse_norms,
    Scratch<Accumulation<T>>& copies, Accumulation<T>* gates = nullptr, int32_t* experts = nullptr,
    Accumulation<T>* cosines = nullptr) {
  using Acc = Accumulation<T>;
  const int64_t num_experts = memory.size(0), features = memory.size(1);
  return {
      .h = data<T>(h),
      .row_stride = h.stride(0),
      .memory = measured(data<Acc>(memory), num_experts, features, inverse_norms, copies),
      .inverse_norms = inverse_norms,
      .features = features,
      .num_experts = num_experts,
      .top_k = k,
      .temperature = static_cast<Acc>(temperature),
      .gates = gates,
      .experts = experts,
      .cosines = cosines,
  };
}

}  // namespace rbm::cpu
