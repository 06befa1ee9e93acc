// Memory update on the CPU: one pass over the rows, in shares whose number depends only on the shapes. Each share has
// its own partial result, and these are added in order, so any number of threads gives the same bits.
#include "../memory_update.h"

#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "rows.h"

namespace rbm::cpu {
namespace {

using torch::headeronly::Half;

// Sums of this many rows are added to a share's result, so that the rounding error of a long share grows with its
// number of tiles rather than its number of rows.
constexpr int64_t kTileRows = 256;
constexpr int64_t kBlockFeatures = 128;

// A partial result holds num_experts x features sums and then num_experts totals.
template <typename T, typename Acc>
struct Share {
  const T* h;
  int64_t row_stride;
  const Acc* gates;
  const int32_t* experts;
  int64_t begin, end;  // rows
  int64_t features, top_k, num_experts;
  bool normalize;
  Acc* tile;     // a partial result
  Acc* row;      // features
  Acc* partial;  // a partial result: the sums of the share
};

// With few rows, a share has at least 128, and at least 16 per expert, so that partial results take at most a sixteenth
// of the elements of h. With many rows there are at most 64 shares, so that partial results take at most 64 times the
// result.
int64_t count_shares(int64_t rows, int64_t num_experts) {
  return std::clamp<int64_t>(rows / std::max<int64_t>(128, 16 * num_experts), rows > 0 ? 1 : 0, 64);
}

template <typename Acc>
RBM_INLINE bool all_finite(const Acc* values, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite = finite && std::isfinite(values[i]);
  return finite;
}

// In blocks, as with kTileRows, so that the accuracy of a norm does not depend on the number of lanes of a vector.
template <typename Acc>
RBM_INLINE Acc squared_norm(const Acc* row, int64_t stride, int64_t features, Acc factor = 1) {
  Acc square = 0;
  for (int64_t first = 0; first < features; first += kBlockFeatures) {
    const int64_t last = std::min(first + kBlockFeatures, features);
    Acc block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t d = first; d < last; ++d) block += (row[d * stride] * factor) * (row[d * stride] * factor);
    square += block;
  }
  return square;
}

template <int kBytes, typename T, typename Acc>
RBM_INLINE void sum_share_lanes(const Share<T, Acc>& s) {
  const int64_t result_size = s.num_experts * (s.features + 1);
  Acc* const tile_total = s.tile + s.num_experts * s.features;
  std::fill_n(s.partial, result_size, Acc(0));

  for (int64_t tile_begin = s.begin; tile_begin < s.end; tile_begin += kTileRows) {
    std::fill_n(s.tile, result_size, Acc(0));
    for (int64_t b = tile_begin; b < std::min(tile_begin + kTileRows, s.end); ++b) {
      const T* const __restrict source = s.h + b * s.row_stride;
      const Acc* __restrict row;
      if constexpr (std::is_same_v<T, Acc>) {
        row = source;
      } else {
        Acc* const __restrict converted = s.row;
        for (int64_t d = 0; d < s.features; ++d) converted[d] = static_cast<Acc>(source[d]);
        row = converted;
      }
      const Acc square = squared_norm(row, 1, s.features);
      const Acc* const gates = s.gates + b * s.top_k;
      if (!std::isfinite(square) || !all_finite(gates, s.top_k)) continue;
      const Acc scale = s.normalize ? 1 / std::max(std::sqrt(square), static_cast<Acc>(kNormEps)) : 1;

      for (int64_t j = 0; j < s.top_k; ++j) {
        const int64_t expert = s.experts[b * s.top_k + j];
        const Acc weight = std::exp(gates[j]);
        const Acc row_weight = weight * scale;
        Acc* const __restrict sum = s.tile + expert * s.features;
#pragma omp simd
        for (int64_t d = 0; d < s.features; ++d) sum[d] += row_weight * row[d];
        tile_total[expert] += weight;
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < result_size; ++i) s.partial[i] += s.tile[i];
  }
}

RBM_DISPATCH(sum_share)

// result[i] = the sum of partials[share][i] over the shares, in order.
template <typename Acc>
void add_partials(const Acc* partials, int64_t shares, int64_t stride, Acc* result, int64_t size) {
  parallel_for(0, size, kGrainMultiplications, [&](int64_t begin, int64_t end) {
    std::fill(result + begin, result + end, Acc(0));
    for (int64_t share = 0; share < shares; ++share) {
      const Acc* const partial = partials + share * stride;
      for (int64_t i = begin; i < end; ++i) result[i] += partial[i];
    }
  });
}

template <typename T, typename Acc>
void sum_rows(
    const Tensor& h, const Tensor& gates, const Tensor& experts, bool normalize, Tensor& weighted_sum, Tensor& total) {
  const int64_t rows = h.size(0), features = h.size(1), top_k = gates.size(1), num_experts = total.size(0);
  const int64_t shares = count_shares(rows, num_experts);
  const int64_t share_rows = shares > 0 ? ceil_div(rows, shares) : 0;
  const int64_t result_size = num_experts * (features + 1);
  const auto partials = scratch<Acc>(shares * result_size);

  parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    const auto tile = scratch<Acc>(result_size);
    const auto row = scratch<Acc>(features);
    for (int64_t share = first; share < last; ++share) {
      const int64_t begin = std::min(share * share_rows, rows);
      sum_share(
          Share<T, Acc>{
              .h = data<T>(h),
              .row_stride = h.stride(0),
              .gates = data<Acc>(gates),
              .experts = data<int32_t>(experts),
              .begin = begin,
              .end = std::min(begin + share_rows, rows),
              .features = features,
              .top_k = top_k,
              .num_experts = num_experts,
              .normalize = normalize,
              .tile = tile.get(),
              .row = row.get(),
              .partial = partials.get() + share * result_size,
          });
    }
  });

  const int64_t sums = num_experts * features;
  add_partials(partials.get(), shares, result_size, mutable_data<Acc>(weighted_sum), sums);
  add_partials(partials.get() + sums, shares, result_size, mutable_data<Acc>(total), num_experts);
}

template <typename Acc>
void move_memory(Tensor& memory, const Tensor& weighted_sum, const Tensor& total, double decay, bool normalize) {
  const int64_t num_experts = memory.size(0), features = memory.size(1);
  const int64_t row_stride = memory.stride(0), stride = memory.stride(1);
  const auto* const totals = data<Acc>(total);
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplications / std::max<int64_t>(1, features));

  parallel_for(0, num_experts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      if (!(totals[e] > 0) || !std::isfinite(totals[e])) continue;
      Acc* const row = mutable_data<Acc>(memory) + e * row_stride;
      const Acc* const sum = data<Acc>(weighted_sum) + e * features;
      Acc square = squared_norm<Acc>(row, stride, features), factor = 1;
      if (normalize && !square_is_safe(square)) {
        factor = kShrink<Acc>;
        square = squared_norm(row, stride, features, factor);
      }
      const Acc norm = normalize ? std::max(std::sqrt(square), static_cast<Acc>(kNormEps)) : 1;
      const Acc keep = static_cast<Acc>(decay) / norm;
      const Acc take = static_cast<Acc>(1 - decay) / totals[e];
      for (int64_t d = 0; d < features; ++d) row[d * stride] = keep * (row[d * stride] * factor) + take * sum[d];
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> memory_statistics(
    const Tensor& h_any, const Tensor& gates_any, const Tensor& experts_any, int64_t num_experts, bool normalize) {
  check_memory_statistics(h_any, gates_any, experts_any, num_experts);
  const Tensor h = with_adjacent_features(h_any), gates = dense(gates_any), experts = dense(experts_any);
  check_experts(Checks("memory_statistics"), experts, num_experts);

  Tensor weighted_sum = new_tensor(gates.scalar_type(), {num_experts, h.size(1)});
  Tensor total = new_tensor(gates.scalar_type(), {num_experts});
  switch (h.scalar_type()) {
    case ScalarType::Double: sum_rows<double, double>(h, gates, experts, normalize, weighted_sum, total); break;
    case ScalarType::Float: sum_rows<float, float>(h, gates, experts, normalize, weighted_sum, total); break;
    case ScalarType::BFloat16: sum_rows<BFloat16, float>(h, gates, experts, normalize, weighted_sum, total); break;
    default: sum_rows<Half, float>(h, gates, experts, normalize, weighted_sum, total); break;
  }
  return {weighted_sum, total};
}

void memory_update_(
    Tensor memory, const Tensor& weighted_sum_any, const Tensor& total_any, double decay, bool normalize) {
  check_memory_update(memory, weighted_sum_any, total_any, decay);
  const Tensor weighted_sum = dense(weighted_sum_any), total = dense(total_any);
  with_wide_type(
      memory.scalar_type(), [&]<typename T>(T) { move_memory<T>(memory, weighted_sum, total, decay, normalize); });
}

}  // namespace rbm::cpu
