// Routing rows to memory vectors: cosines, the k largest, softmax. Used by cosine_topk and by routed_matmul.
// The mathematics is in rbm_kernels/ops/cosine_topk/README.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../long_vectors.h"
#include "dot_tile.h"
#include "rows.h"

namespace rbm::cpu {

// A row shorter than this has no direction, and cosine 0 (almost) with every memory vector.
constexpr double kShortest = 1e-12;

template <typename Acc>
RBM_INLINE Acc inverse_norm(Acc square) {
  return 1 / std::max(std::sqrt(square), static_cast<Acc>(kShortest));
}

template <typename T>
struct Routing {
  using Acc = Accumulation<T>;
  const T* h;
  int64_t row_stride;
  const Acc* memory;         // [E, D], contiguous
  const Acc* inverse_norms;  // [E], of the memory vectors
  int64_t features, num_experts, top_k;
  Acc temperature;
  Acc* gates;        // [B, k]
  int32_t* experts;  // [B, k]
  Acc* cosines;      // [B, k]
};

// A NaN counts as the largest, as it does where PyTorch sorts. Equals are not larger: the lower expert wins.
template <typename Acc>
RBM_INLINE bool is_larger(Acc a, Acc b) {
  return a > b || (a != a && b == b);
}

// Takes the k largest of `cosines`, which are overwritten, and their softmax.
template <typename T>
RBM_INLINE void choose(const Routing<T>& r, int64_t b, Accumulation<T>* cosines, uint8_t* taken) {
  using Acc = Accumulation<T>;
  Acc* const chosen = r.cosines + b * r.top_k;
  Acc* const gates = r.gates + b * r.top_k;
  int32_t* const experts = r.experts + b * r.top_k;
  std::fill_n(taken, r.num_experts, uint8_t(0));
  for (int64_t j = 0; j < r.top_k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < r.num_experts; ++e) {
      if (!taken[e] && (best < 0 || is_larger(cosines[e], cosines[best]))) best = e;
    }
    taken[best] = 1;
    experts[j] = static_cast<int32_t>(best);
    chosen[j] = cosines[best];
  }
  Acc total = 0;
  for (int64_t j = 0; j < r.top_k; ++j) {
    gates[j] = std::exp((chosen[j] - chosen[0]) / r.temperature);
    total += gates[j];
  }
  for (int64_t j = 0; j < r.top_k; ++j) gates[j] /= total;
}

// A copy of `row` whose square does not overflow.
template <typename T>
std::unique_ptr<Accumulation<T>[]> shrunk(const T* row, int64_t features) {
  auto copy = scratch<Accumulation<T>>(features);
  for (int64_t d = 0; d < features; ++d) copy[d] = static_cast<Accumulation<T>>(row[d]) * kShrink<Accumulation<T>>;
  return copy;
}

// All cosines of kRows rows. `cosines` is [kRows, E]. Returns whether the rows' squares are safe: else the cosines are not.
template <int kBytes, int kRows, typename T, typename Row>
RBM_INLINE bool cosines_of(const Routing<T>& r, const Row* const* rows, Accumulation<T>* cosines) {
  using Acc = Accumulation<T>;
  constexpr int kColumns = 4;
  Acc inverse[kRows], sums[kRows * kColumns];
  bool safe = true;
  for (int i = 0; i < kRows; ++i) {
    Acc square[1];
    dot_tile<kBytes, 1, 1>(rows + i, rows[i], 0, r.features, square);
    inverse[i] = inverse_norm(square[0]);
    safe = safe && square_is_safe(square[0]);
  }
  int64_t e = 0;
  for (; e + kColumns <= r.num_experts; e += kColumns) {
    dot_tile<kBytes, kRows, kColumns>(rows, r.memory + e * r.features, r.features, r.features, sums);
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kColumns; ++c) {
        cosines[i * r.num_experts + e + c] = sums[i * kColumns + c] * inverse[i] * r.inverse_norms[e + c];
      }
    }
  }
  for (; e < r.num_experts; ++e) {
    dot_tile<kBytes, kRows, 1>(rows, r.memory + e * r.features, 0, r.features, sums);
    for (int i = 0; i < kRows; ++i) cosines[i * r.num_experts + e] = sums[i] * inverse[i] * r.inverse_norms[e];
  }
  return safe;
}

// All cosines of kRows rows that begin with row b, among which may be long ones.
template <int kBytes, int kRows, typename T>
RBM_INLINE void all_cosines(const Routing<T>& r, int64_t b, Accumulation<T>* cosines) {
  const T* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = r.h + (b + i) * r.row_stride;
  if (cosines_of<kBytes, kRows>(r, rows, cosines)) return;
  for (int i = 0; i < kRows; ++i) {
    if (cosines_of<kBytes, 1>(r, rows + i, cosines + i * r.num_experts)) continue;
    const auto copy = shrunk(rows[i], r.features);
    const Accumulation<T>* const row = copy.get();
    cosines_of<kBytes, 1>(r, &row, cosines + i * r.num_experts);
  }
}

// Rows [begin, end). `cosines` has room for [4, E] and `taken` for [E].
template <int kBytes, typename T>
RBM_INLINE void route_rows_lanes(
    const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* cosines, uint8_t* taken) {
  int64_t b = begin;
  for (; b + 4 <= end; b += 4) {
    all_cosines<kBytes, 4>(r, b, cosines);
    for (int i = 0; i < 4; ++i) choose(r, b + i, cosines + i * r.num_experts, taken);
  }
  for (; b < end; ++b) {
    all_cosines<kBytes, 1>(r, b, cosines);
    choose(r, b, cosines, taken);
  }
}
RBM_DISPATCH(route_rows)

// inverse_norms[e] = 1 / |memory[e]|.
template <int kBytes, typename Acc>
RBM_INLINE void invert_norms_lanes(const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms) {
  for (int64_t e = 0; e < num_experts; ++e) {
    const Acc* const row = memory + e * features;
    Acc square[1];
    dot_tile<kBytes, 1, 1>(&row, row, 0, features, square);
    inverse_norms[e] = inverse_norm(square[0]);
  }
}
RBM_DISPATCH(invert_norms)

// The memory vectors as they are compared, and their inverse lengths: `memory` itself, or a copy in `copies`, [E, D], in which
// long vectors are shrunk. That changes no cosine.
template <typename Acc>
const Acc* measured(
    const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms, std::unique_ptr<Acc[]>& copies) {
  invert_norms(memory, num_experts, features, inverse_norms);
  const auto is_long = [](Acc inverse) { return !square_is_safe(1 / (inverse * inverse)); };
  if (std::none_of(inverse_norms, inverse_norms + num_experts, is_long)) return memory;
  copies = scratch<Acc>(num_experts * features);
  for (int64_t e = 0; e < num_experts; ++e) {
    const Acc factor = is_long(inverse_norms[e]) ? kShrink<Acc> : 1;
    for (int64_t d = 0; d < features; ++d) copies[e * features + d] = memory[e * features + d] * factor;
  }
  invert_norms(static_cast<const Acc*>(copies.get()), num_experts, features, inverse_norms);
  return copies.get();
}

}  // namespace rbm::cpu
