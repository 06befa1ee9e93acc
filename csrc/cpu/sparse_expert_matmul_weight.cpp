// Gradients of the grouped matmul over CSR rows with respect to weight and scale, on the CPU. See sparse_rows.h.
#include <algorithm>
#include <cstring>

#include "sparse_rows.h"

namespace rbm::cpu {
namespace sparse {
namespace {

// One block of outputs of one expert: gradients of its weights and of its scale.
template <typename T>
struct WeightJob {
  const Problem<T>& p;
  const PairsByExpert& pairs;
  int64_t expert;
  int64_t first;   // output
  const T* grad;   // [B, N]
  T* block;        // [D, block width]
  T* grad_weight;  // [E, N, D]
  T* grad_scale;   // [D]: this block's contribution to the scale's gradient, or null
};

// block[column, i] += value * gate * grad[row, first + i], over the expert's rows.
template <int kBytes, int64_t kWidth, typename T>
RBM_INLINE void sum_products(const WeightJob<T>& job, int64_t width) {
  using L = Lanes<T, kBytes>;
  constexpr int64_t kCount = kVectors<T, kBytes, kWidth>;
  const Problem<T>& p = job.p;
  alignas(kLineBytes) T padded[kWidth] = {};
  std::fill_n(job.block, p.features * kWidth, T(0));
  const Pair* const pairs = job.pairs.of(job.expert);
  for (int64_t n = 0; n < job.pairs.count(job.expert); ++n) {
    const auto [row, index] = pairs[n];
    const T* const source = job.grad + row * p.outputs + job.first;
    for (int64_t i = 0; i < width; ++i) padded[i] = p.gates[index] * source[i];
    for (int64_t part = 0; part < kWidth; part += kCount * L::kCount) {
      typename L::Vector gated[kCount];
      std::memcpy(gated, padded + part, sizeof(gated));
      for (int64_t entry = p.crow[row]; entry < p.crow[row + 1]; ++entry) {
        T* const target = job.block + p.col[entry] * kWidth + part;
        for (int v = 0; v < kCount; ++v) {
          *reinterpret_cast<typename L::Loose*>(target + v * L::kCount) += p.values[entry] * gated[v];
        }
      }
    }
  }
}

template <int kBytes, typename T, int64_t kWidth>
RBM_INLINE void differentiate_weights_lanes(const WeightJob<T>& job, std::integral_constant<int64_t, kWidth>) {
  const Problem<T>& p = job.p;
  const int64_t width = std::min(kWidth, p.outputs - job.first);
  sum_products<kBytes, kWidth>(job, width);
  // Transpose back to [N, D]. The block holds the gradient of weight * scale.
  const T* const scales = p.scale ? p.scale + job.expert * p.features : nullptr;
  for (int64_t tile = 0; tile < p.features; tile += kTileFeatures) {
    const int64_t features = std::min(kTileFeatures, p.features - tile);
    T sums[kTileFeatures] = {};
    for (int64_t i = 0; i < width; ++i) {
      const int64_t output = job.first + i;
      T* const target = job.grad_weight + (job.expert * p.outputs + output) * p.features + tile;
      const T* const weight = p.weight + job.expert * p.expert_stride + output * p.output_stride + tile;
      for (int64_t c = 0; c < features; ++c) {
        const T value = job.block[(tile + c) * kWidth + i];
        target[c] = scales ? value * scales[tile + c] : value;
        if (scales) sums[c] += value * weight[c];
      }
    }
    if (scales) std::copy_n(sums, features, job.grad_scale + tile);
  }
}
RBM_DISPATCH(differentiate_weights)

template <typename T>
void differentiate(const Problem<T>& p, const Tensor& grad, const Tensor& grad_weight, const Tensor& grad_scale) {
  const int64_t lines = lines_of_block<T>(p.outputs), width = lines * kLine<T>, blocks = ceil_div(p.outputs, width);
  PairsByExpert pairs(p.rows, p.top_k, p.num_experts);
  pairs.list(p.experts, 0, p.rows);
  const int64_t scales = p.scale ? p.num_experts * p.features : 0;
  const auto partials = scratch<T>(blocks * scales);
  parallel_tasks(p.num_experts * blocks, torch::stable::get_num_threads(), [&](const auto& take) {
    const auto block = scratch<T, kBlockAlignment>(p.features * width);
    for (int64_t task = take(); task < p.num_experts * blocks; task = take()) {
      const int64_t expert = task / blocks;
      const WeightJob<T> job{
          .p = p,
          .pairs = pairs,
          .expert = expert,
          .first = task % blocks * width,
          .grad = data<T>(grad),
          .block = block.get(),
          .grad_weight = mutable_data<T>(grad_weight),
          .grad_scale = scales == 0 ? nullptr : partials.get() + task % blocks * scales + expert * p.features,
      };
      with_width<T>(lines, [&](auto width) { differentiate_weights(job, width); });
    }
  });
  T* const sums = mutable_data<T>(grad_scale);
  std::fill_n(sums, scales, T(0));
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < scales; ++i) sums[i] += partials[block * scales + i];
  }
}

}  // namespace
}  // namespace sparse

std::tuple<Tensor, Tensor> sparse_expert_matmul_backward_weight(
    const Tensor& grad_any, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts) {
  const char* const op = "sparse_expert_matmul_backward_weight";
  const sparse::Arguments arguments(op, crow, col, values, weight, std::nullopt, scale, gates, experts);
  const Tensor grad = sparse::checked_grad(op, grad_any, arguments);
  Tensor grad_weight = new_tensor(values.scalar_type(), {weight.size(0), weight.size(1), weight.size(2)});
  Tensor grad_scale = new_tensor(values.scalar_type(), {scale ? weight.size(0) : 0, weight.size(2)});
  with_wide_type(values.scalar_type(), [&]<typename T>(T) {
    sparse::differentiate(arguments.problem<T>(), grad, grad_weight, grad_scale);
  });
  return {grad_weight, grad_scale};
}

}  // namespace rbm::cpu
