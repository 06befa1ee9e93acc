// Grouped matmul over CSR rows on the CPU, and the gradient of its gates. See sparse_rows.h.
#include <algorithm>
#include <cstring>
#include <vector>

#include "sparse_rows.h"

namespace rbm::cpu {
namespace sparse {
namespace {

// block[c, i] = weight[expert, first + i, c] * scale[expert, c]: [D, block width], zero past the last output.
template <int64_t kWidth, typename T>
RBM_INLINE void pack(const Problem<T>& p, int64_t expert, int64_t first, T* __restrict block) {
  const int64_t width = std::min(kWidth, p.outputs - first);
  const T* const weight = p.weight + expert * p.expert_stride + first * p.output_stride;
  for (int64_t tile = 0; tile < p.features; tile += kTileFeatures) {
    const int64_t features = std::min(kTileFeatures, p.features - tile);
    T scale[kTileFeatures];
    for (int64_t c = 0; c < features; ++c) scale[c] = p.scale ? p.scale[expert * p.features + tile + c] : T(1);
    for (int64_t i = 0; i < width; ++i) {
      const T* const source = weight + i * p.output_stride + tile;
      for (int64_t c = 0; c < features; ++c) block[(tile + c) * kWidth + i] = source[c] * scale[c];
    }
    for (int64_t c = tile; c < tile + features; ++c) {
      std::fill(block + c * kWidth + width, block + (c + 1) * kWidth, T(0));
    }
  }
}

// products[i] = sum over the row's entries of value * block[column, i].
template <int kBytes, int64_t kWidth, typename T>
RBM_INLINE void multiply_row(const Problem<T>& p, int64_t row, const T* block, T* products) {
  using L = Lanes<T, kBytes>;
  constexpr int64_t kCount = kVectors<T, kBytes, kWidth>;
  for (int64_t part = 0; part < kWidth; part += kCount * L::kCount) {
    typename L::Vector sums[kCount] = {};
    for (int64_t entry = p.crow[row]; entry < p.crow[row + 1]; ++entry) {
      const T* const source = block + p.col[entry] * kWidth + part;
      for (int v = 0; v < kCount; ++v) {
        sums[v] += p.values[entry] * *reinterpret_cast<const typename L::Loose*>(source + v * L::kCount);
      }
    }
    std::memcpy(products + part, sums, sizeof(sums));
  }
}

// The same, reading the weights in place.
template <int64_t kWidth, typename T>
RBM_INLINE void multiply_row_in_place(const Problem<T>& p, int64_t row, int64_t expert, int64_t first, T* products) {
  const T* const scale = p.scale ? p.scale + expert * p.features : nullptr;
  for (int64_t i = 0; i < std::min(kWidth, p.outputs - first); ++i) {
    const T* const weight = p.weight + expert * p.expert_stride + (first + i) * p.output_stride;
    T sum = 0;
    for (int64_t entry = p.crow[row]; entry < p.crow[row + 1]; ++entry) {
      const int64_t c = p.col[entry];
      sum += p.values[entry] * (scale ? weight[c] * scale[c] : weight[c]);
    }
    products[i] = sum;
  }
}

// One block of outputs of some rows: forward, or for the gradient of the gates.
template <typename T>
struct RowsJob {
  const Problem<T>& p;
  const PairsByExpert& pairs;
  int64_t begin, end;  // rows
  int64_t first;       // output
  T* block;            // [D, block width]
  T* y;                // [B, N]: receives the sum of the products, or null
  const T* grad;       // [B, N]: multiplied with the products if y is null
  T* grad_gates;       // [B * k]: receives the result of that
};

template <typename T>
RBM_INLINE void begin_with_bias(const RowsJob<T>& job, int64_t width) {
  const Problem<T>& p = job.p;
  for (int64_t row = job.begin; row < job.end; ++row) {
    T* const target = job.y + row * p.outputs + job.first;
    std::fill_n(target, width, T(0));
    if (p.bias == nullptr) continue;
    for (int64_t pair = row * p.top_k; pair < (row + 1) * p.top_k; ++pair) {
      const T* const bias = p.bias + p.experts[pair] * p.outputs + job.first;
      for (int64_t i = 0; i < width; ++i) target[i] += p.gates[pair] * bias[i];
    }
  }
}

template <typename T>
RBM_INLINE void take_products(const RowsJob<T>& job, const Pair& pair, int64_t width, const T* products) {
  const Problem<T>& p = job.p;
  const int64_t place = pair.row * p.outputs + job.first;
  if (job.y != nullptr) {
    for (int64_t i = 0; i < width; ++i) job.y[place + i] += p.gates[pair.index] * products[i];
    return;
  }
  const T* const bias = p.bias ? p.bias + p.experts[pair.index] * p.outputs + job.first : nullptr;
  T sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += job.grad[place + i] * (bias ? products[i] + bias[i] : products[i]);
  job.grad_gates[pair.index] = sum;
}

template <int kBytes, typename T, int64_t kWidth>
RBM_INLINE void multiply_rows_lanes(const RowsJob<T>& job, std::integral_constant<int64_t, kWidth>) {
  const Problem<T>& p = job.p;
  const int64_t width = std::min(kWidth, p.outputs - job.first);
  if (job.y != nullptr) begin_with_bias(job, width);
  alignas(kLineBytes) T products[kWidth];
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const Pair* const first = job.pairs.of(e);
    const Pair* const last = first + job.pairs.count(e);
    int64_t entries = 0;
    for (const Pair* pair = first; pair != last; ++pair) entries += p.entries_of(pair->row);
    const bool in_place = entries * kLineCost < p.features;
    if (!in_place) pack<kWidth>(p, e, job.first, job.block);
    for (const Pair* pair = first; pair != last; ++pair) {
      if (in_place) {
        multiply_row_in_place<kWidth>(p, pair->row, e, job.first, products);
      } else {
        multiply_row<kBytes, kWidth>(p, pair->row, job.block, products);
      }
      take_products(job, *pair, width, products);
    }
  }
}
RBM_DISPATCH(multiply_rows)

// Forward into y, or the gradient of the gates into partials, [blocks, B * k].
template <typename T>
void run_rows(const Problem<T>& p, T* y, const T* grad, T* partials) {
  const int64_t lines = lines_of_block<T>(p.outputs), width = lines * kLine<T>, blocks = ceil_div(p.outputs, width);
  if (blocks == 0) return;  // no outputs
  const int64_t multiplications = p.entries * p.top_k * p.outputs;
  const int64_t threads = multiplications < kFewMultiplications ? 1 : torch::stable::get_num_threads();
  // Every chunk transposes the weights that it needs, so there are no more chunks than threads without a block. The
  // sums do not depend on the chunks.
  const int64_t chunks = std::clamp<int64_t>(threads / blocks, 1, std::max<int64_t>(1, p.rows));
  const int64_t chunk_rows = ceil_div(p.rows, chunks);
  std::vector<PairsByExpert> pairs;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = std::min(chunk * chunk_rows, p.rows), end = std::min(begin + chunk_rows, p.rows);
    pairs.emplace_back(end - begin, p.top_k, p.num_experts).list(p.experts, begin, end);
  }
  parallel_tasks(chunks * blocks, threads, [&](const auto& take) {
    const auto block = scratch<T, kBlockAlignment>(p.features * width);
    for (int64_t task = take(); task < chunks * blocks; task = take()) {
      const int64_t chunk = task / blocks;
      const RowsJob<T> job{
          .p = p,
          .pairs = pairs[chunk],
          .begin = std::min(chunk * chunk_rows, p.rows),
          .end = std::min((chunk + 1) * chunk_rows, p.rows),
          .first = task % blocks * width,
          .block = block.get(),
          .y = y,
          .grad = grad,
          .grad_gates = partials == nullptr ? nullptr : partials + task % blocks * p.rows * p.top_k,
      };
      with_width<T>(lines, [&](auto width) { multiply_rows(job, width); });
    }
  });
}

template <typename T>
void differentiate_gates(const Problem<T>& p, const Tensor& grad, const Tensor& grad_gates) {
  const int64_t pairs = p.rows * p.top_k, width = lines_of_block<T>(p.outputs) * kLine<T>,
                blocks = ceil_div(p.outputs, width);
  const auto partials = scratch<T>(blocks * pairs);
  run_rows<T>(p, nullptr, data<T>(grad), partials.get());
  T* const sums = mutable_data<T>(grad_gates);
  std::fill_n(sums, pairs, T(0));
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t pair = 0; pair < pairs; ++pair) sums[pair] += partials[block * pairs + pair];
  }
}

}  // namespace
}  // namespace sparse

Tensor sparse_expert_matmul(
    const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts) {
  const sparse::Arguments arguments("sparse_expert_matmul", crow, col, values, weight, bias, scale, gates, experts);
  Tensor y = new_tensor(values.scalar_type(), {gates.size(0), weight.size(1)});
  with_wide_type(values.scalar_type(), [&]<typename T>(T) {
    sparse::run_rows<T>(arguments.problem<T>(), mutable_data<T>(y), nullptr, nullptr);
  });
  return y;
}

Tensor sparse_expert_matmul_backward_gates(
    const Tensor& grad_any, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scale, const Tensor& gates, const Tensor& experts) {
  const char* const op = "sparse_expert_matmul_backward_gates";
  const sparse::Arguments arguments(op, crow, col, values, weight, bias, scale, gates, experts);
  const Tensor grad = sparse::checked_grad(op, grad_any, arguments);
  Tensor grad_gates = new_tensor(gates.scalar_type(), {gates.size(0), gates.size(1)});
  with_wide_type(values.scalar_type(), [&]<typename T>(T) {
    sparse::differentiate_gates(arguments.problem<T>(), grad, grad_gates);
  });
  return grad_gates;
}

}  // namespace rbm::cpu
