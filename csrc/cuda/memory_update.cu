// Memory update on CUDA. Two stages, without atomics or synchronisation: equal arguments give equal bits, and both
// operators can be captured in a CUDA graph.
//
// First stage, memory_statistics_kernel. A block is `blockDim.x` threads across the columns times `blockDim.y` groups.
// Each group processes kRows rows at a time, each thread up to 16 bytes of each row. A thread keeps its part of the
// rows in registers while the norms are computed, then adds them, weighted, to its accumulators: one for each of
// kExperts experts and each of its columns. So h is read once, and the sums stay in registers until the end. An expert
// that a row did not choose has weight 0: with few experts multiplying is cheaper than indexing, and an out-of-range
// expert id matches nothing.
//
//   blockIdx.x: a tile of columns and a tile of experts -> disjoint parts of a partial result
//   blockIdx.y: a range of rows                         -> a partial result
//
// A row wider than one block is read twice: squared_norm_kernel runs first, and the column tiles use its norms.
// Second stage, add_partials_kernel: adds the partial results in a fixed order.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "../integers.h"
#include "../memory_update.h"
#include "rows.cuh"

namespace rbm::cuda {
namespace {

constexpr int kExperts = 8;       // experts that a thread accumulates
constexpr int kGates = 4;         // gates of a row that are loaded at once
constexpr int kMaxThreads = 256;  // per block of the first stage
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kReduceWidth = 32, kReduceDepth = 16;

// Rows that a group holds in registers. With twice the columns, registers suffice for half the rows: more would spill.
template <typename T, bool kVector>
constexpr int kRows = kColumns<T, kVector> == 8 ? 4 : 8;

template <typename T>
struct Statistics {
  const T* h;
  int64_t row_stride;
  const AccOf<T>* gates;
  const int32_t* experts;
  int64_t rows, features, top_k, num_experts;
  bool normalize;
  // Set by the launch.
  int column_tiles = 1;
  int64_t rows_per_block = 0;
  const AccOf<T>* squared_norms = nullptr;  // of every row; null: a block reads whole rows and computes them itself
  AccOf<T>* partials = nullptr;             // [gridDim.y][num_experts * features sums, then num_experts totals]
};

// Shared by the threads of a group, for its kRows rows.
template <typename T, bool kVector>
struct GroupRows {
  AccOf<T> weight[kRows<T, kVector>][kExperts];   // exp(gate), or 0; NaN if a gate of the row is not finite
  AccOf<T> square[kRows<T, kVector>][kMaxWarps];  // squared norm, a part from each warp of the group
};

// exp(gate) of `row` for expert `expert`, 0 if the row did not choose it, NaN if any gate of the row is not finite.
template <typename T>
__device__ AccOf<T> weight_of(const Statistics<T>& s, int64_t row, int expert) {
  const AccOf<T>* const gates = s.gates + row * s.top_k;
  const int32_t* const experts = s.experts + row * s.top_k;
  AccOf<T> weight = 0;
  bool finite = true;
  // kGates at a time: a loop of single loads would wait for each before issuing the next.
  for (int64_t first = 0; first < s.top_k; first += kGates) {
    AccOf<T> gate[kGates];
    int32_t chosen[kGates];
#pragma unroll
    for (int j = 0; j < kGates; ++j) {
      const bool inside = first + j < s.top_k;
      gate[j] = inside ? gates[first + j] : AccOf<T>(0);
      chosen[j] = inside ? experts[first + j] : -1;
    }
#pragma unroll
    for (int j = 0; j < kGates; ++j) {
      finite = finite && isfinite(gate[j]);
      if (chosen[j] == expert) weight += exp(gate[j]);
    }
  }
  return finite ? weight : static_cast<AccOf<T>>(NAN);
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) memory_statistics_kernel(const Statistics<T> s) {
  using Acc = AccOf<T>;
  constexpr int kRows = cuda::kRows<T, kVector>;
  const int width = blockDim.x, thread = threadIdx.x, group = threadIdx.y, groups = blockDim.y;
  const int lane = thread % kWarp, warp = thread / kWarp, warps = width / kWarp;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % s.column_tiles) * width * kColumns<T, kVector>;
  const int first_expert = blockIdx.x / s.column_tiles * kExperts;

  // Two buffers, used alternately: a single barrier per step then separates writes from reads.
  __shared__ GroupRows<T, kVector> shared[2][kMaxWarps];
  __shared__ alignas(16) Acc exchange[kMaxThreads * kColumns<T, kVector>];

  Acc sums[kExperts][kColumns<T, kVector>] = {};
  Acc total = 0;  // of expert first_expert + thread, in the first kExperts threads of the group

  const int64_t begin = blockIdx.y * s.rows_per_block;
  const int64_t end = min(begin + s.rows_per_block, s.rows);
  int buffer = 0;
  for (int64_t block_row = begin; block_row < end; block_row += groups * kRows, buffer ^= 1) {
    GroupRows<T, kVector>& mine = shared[buffer][group];
    const int64_t first_row = block_row + group * kRows;

    Fragment<T, kVector> x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r].load(s.h + (first_row + r) * s.row_stride, first_row + r < end, first_column, thread, s.features);
    }
    for (int i = thread; i < kRows * kExperts; i += width) {
      const int64_t row = first_row + i / kExperts;
      mine.weight[i / kExperts][i % kExperts] = row < end ? weight_of(s, row, first_expert + i % kExperts) : Acc(0);
    }
    if (s.squared_norms != nullptr) {
      if (thread < kRows) {
        mine.square[thread][0] = first_row + thread < end ? s.squared_norms[first_row + thread] : Acc(0);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Acc square = warp_sum(x[r].square());
        if (lane == 0) mine.square[r][warp] = square;
      }
    }
    __syncthreads();

    // Lane r of each warp finishes row r, so that the square root and the division run once per warp, not once per
    // thread.
    Acc row_scale = 0;  // 0 for a row that is skipped
    if (lane < kRows) {
      Acc square = mine.square[lane][0];
      if (s.squared_norms == nullptr) {
        for (int w = 1; w < warps; ++w) square += mine.square[lane][w];
      }
      if (isfinite(square) && !isnan(mine.weight[lane][0])) {
        row_scale = s.normalize ? 1 / max(sqrt(square), static_cast<Acc>(kNormEps)) : Acc(1);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Acc scale = __shfl_sync(kAllLanes, row_scale, r);
      if (scale == 0) continue;  // the same for all threads of the group; 0 * NaN would be NaN
      if (thread < kExperts) total += mine.weight[r][thread];
#pragma unroll
      for (int i = 0; i < kColumns<T, kVector>; ++i) {
        const Acc value = widen(x[r].values[i]) * scale;
#pragma unroll
        for (int e = 0; e < kExperts; ++e) sums[e][i] += mine.weight[r][e] * value;
      }
    }
  }

  // The groups have sums of different rows for the same columns. For each expert they write these to shared memory, and
  // every thread of the block adds up some columns, in the order of the groups: adjacent threads write adjacent
  // columns.
  const int64_t sums_size = s.num_experts * s.features;
  Acc* const partial = s.partials + blockIdx.y * (sums_size + s.num_experts);
  const int columns = width * kColumns<T, kVector>;
  const int columns_left = static_cast<int>(min(s.features - first_column, static_cast<int64_t>(columns)));
#pragma unroll  // registers cannot be indexed
  for (int e = 0; e < kExperts; ++e) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns<T, kVector>; ++i) {
      exchange[group * columns + Fragment<T, kVector>::column(0, thread, i)] = sums[e][i];
    }
    __syncthreads();
    if (first_expert + e >= s.num_experts) break;
#pragma unroll 1
    for (int d = group * width + thread; d < columns_left; d += groups * width) {
      Acc sum = 0;
#pragma unroll 4  // independent loads
      for (int g = 0; g < groups; ++g) sum += exchange[g * columns + d];
      partial[(first_expert + e) * s.features + first_column + d] = sum;
    }
  }
  __syncthreads();
  if (thread < kExperts) exchange[group * kExperts + thread] = total;
  __syncthreads();
  const int expert = first_expert + thread;
  if (group == 0 && thread < kExperts && expert < s.num_experts && first_column == 0) {
    Acc sum = 0;
    for (int g = 0; g < groups; ++g) sum += exchange[g * kExperts + thread];
    partial[sums_size + expert] = sum;
  }
}

// One warp per row.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kMaxThreads)
    squared_norm_kernel(const T* h, int64_t row_stride, int64_t rows, int64_t features, AccOf<T>* squared_norms) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kMaxWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  AccOf<T> square = 0;
#pragma unroll 4
  for (int64_t first = 0; first < features; first += kWarp * kColumns<T, kVector>) {
    Fragment<T, kVector> x;
    x.load(h + row * row_stride, true, first, threadIdx.x % kWarp, features);
    square += x.square();
  }
  square = warp_sum(square);
  if (threadIdx.x % kWarp == 0) squared_norms[row] = square;
}

// result[i] = the sum of partials[p][i] over p, for the sums and then the totals. A block processes kReduceWidth
// entries. Each of its kReduceDepth rows of threads adds every kReduceDepth-th partial result, and the first row adds
// these rows in order.
template <typename Acc>
__global__ void add_partials_kernel(
    const Acc* partials, int64_t count, int64_t sums_size, int64_t size, Acc* weighted_sum, Acc* total) {
  __shared__ Acc rows[kReduceDepth][kReduceWidth];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceWidth + threadIdx.x;
  Acc sum = 0;
  if (i < size) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < count; p += kReduceDepth) sum += partials[p * size + i];
  }
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= size) return;
  for (int y = 1; y < kReduceDepth; ++y) sum += rows[y][threadIdx.x];
  (i < sums_size ? weighted_sum[i] : total[i - sums_size]) = sum;
}

// One block per expert.
template <typename Acc>
__global__ void __launch_bounds__(kMaxThreads) memory_update_kernel(
    Acc* memory, int64_t row_stride, int64_t stride, const Acc* weighted_sum, const Acc* total, int64_t features,
    double decay, bool normalize) {
  __shared__ Acc parts[kMaxWarps];
  const int64_t expert = blockIdx.x;
  if (!(total[expert] > 0) || !isfinite(total[expert])) return;
  Acc* const row = memory + expert * row_stride;

  const auto squared_norm = [&](Acc factor) {
    Acc square = 0;
    for (int64_t d = threadIdx.x; d < features; d += kMaxThreads) {
      const Acc value = row[d * stride] * factor;
      square += value * value;
    }
    square = warp_sum(square);
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < kMaxWarps; ++w) square += parts[w];
    return square;
  };
  Acc square = squared_norm(Acc(1)), factor = 1;
  if (normalize && !(square < kLongSquare<Acc>)) {  // the same for all threads
    factor = kShrink<Acc>;
    __syncthreads();  // all threads have read the parts
    square = squared_norm(factor);
  }
  const Acc norm = normalize ? max(sqrt(square), static_cast<Acc>(kNormEps)) : Acc(1);
  const Acc keep = static_cast<Acc>(decay) / norm;
  const Acc take = static_cast<Acc>(1 - decay) / total[expert];
  for (int64_t d = threadIdx.x; d < features; d += kMaxThreads) {
    row[d * stride] = keep * (row[d * stride] * factor) + take * weighted_sum[expert * features + d];
  }
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("rbm::") + op + ": " + cudaGetErrorString(error));
}

int multiprocessors(const Tensor& tensor) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, tensor.get_device_index());
  check_launch("memory_statistics");
  return count;
}

// Launches both stages. kVector: every row starts at a multiple of 16 bytes.
template <typename T, bool kVector>
void launch_statistics(Statistics<T> s, const Tensor& like, Tensor& weighted_sum, Tensor& total) {
  using Acc = AccOf<T>;
  const cudaStream_t stream = current_stream(like);
  const auto warps = std::clamp<int64_t>(ceil_div(s.features, kWarp * kColumns<T, kVector>), 1, kMaxWarps);
  const dim3 block(static_cast<unsigned>(warps * kWarp), static_cast<unsigned>(kMaxWarps / warps));
  s.column_tiles = static_cast<int>(std::max<int64_t>(ceil_div(s.features, block.x * kColumns<T, kVector>), 1));
  const int64_t tiles = s.column_tiles * ceil_div(s.num_experts, kExperts);

  // One wave, with two blocks per multiprocessor and whole steps of rows.
  const int64_t step = block.y * kRows<T, kVector>;
  const int64_t wave = std::max<int64_t>(2 * multiprocessors(like) / tiles, 1);
  s.rows_per_block = ceil_div(ceil_div(s.rows, wave), step) * step;
  const int64_t blocks = s.rows > 0 ? ceil_div(s.rows, s.rows_per_block) : 0;

  const int64_t sums_size = s.num_experts * s.features, size = sums_size + s.num_experts;
  const Tensor partials = torch::stable::new_empty(like, {blocks, size});
  s.partials = static_cast<Acc*>(partials.mutable_data_ptr());
  const Tensor squared_norms = torch::stable::new_empty(like, {s.column_tiles > 1 ? s.rows : 0});
  if (blocks > 0) {
    if (s.column_tiles > 1) {
      auto* const squares = static_cast<Acc*>(squared_norms.mutable_data_ptr());
      squared_norm_kernel<T, kVector><<<static_cast<unsigned>(ceil_div(s.rows, kMaxWarps)), kMaxThreads, 0, stream>>>(
          s.h, s.row_stride, s.rows, s.features, squares);
      s.squared_norms = squares;
    }
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(blocks));
    memory_statistics_kernel<T, kVector><<<grid, block, 0, stream>>>(s);
  }
  add_partials_kernel<Acc>
      <<<static_cast<unsigned>(ceil_div(size, kReduceWidth)), dim3(kReduceWidth, kReduceDepth), 0, stream>>>(
          s.partials, blocks, sums_size, size, static_cast<Acc*>(weighted_sum.mutable_data_ptr()),
          static_cast<Acc*>(total.mutable_data_ptr()));
  check_launch("memory_statistics");
}

template <typename T>
void sum_rows(
    const Tensor& h, const Tensor& gates, const Tensor& experts, bool normalize, Tensor& weighted_sum, Tensor& total) {
  const Statistics<T> s{
      .h = static_cast<const T*>(h.const_data_ptr()),
      .row_stride = h.stride(0),
      .gates = static_cast<const AccOf<T>*>(gates.const_data_ptr()),
      .experts = static_cast<const int32_t*>(experts.const_data_ptr()),
      .rows = h.size(0),
      .features = h.size(1),
      .top_k = gates.size(1),
      .num_experts = total.size(0),
      .normalize = normalize,
  };
  constexpr int kPerLoad = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(s.h) % 16 == 0 && s.row_stride % kPerLoad == 0;
  if (aligned && s.features % kPerLoad == 0) {
    launch_statistics<T, true>(s, gates, weighted_sum, total);
  } else {
    launch_statistics<T, false>(s, gates, weighted_sum, total);
  }
}

template <typename Acc>
void move_memory(Tensor& memory, const Tensor& weighted_sum, const Tensor& total, double decay, bool normalize) {
  memory_update_kernel<Acc><<<static_cast<unsigned>(memory.size(0)), kMaxThreads, 0, current_stream(memory)>>>(
      static_cast<Acc*>(memory.mutable_data_ptr()), memory.stride(0), memory.stride(1),
      static_cast<const Acc*>(weighted_sum.const_data_ptr()), static_cast<const Acc*>(total.const_data_ptr()),
      memory.size(1), decay, normalize);
  check_launch("memory_update_");
}

}  // namespace

std::tuple<Tensor, Tensor> memory_statistics(
    const Tensor& h_any, const Tensor& gates_any, const Tensor& experts_any, int64_t num_experts, bool normalize) {
  check_memory_statistics(h_any, gates_any, experts_any, num_experts);
  const torch::stable::accelerator::DeviceGuard guard(h_any.get_device_index());
  const Tensor h = features_are_adjacent(h_any) ? h_any : torch::stable::contiguous(h_any);
  const Tensor gates = torch::stable::contiguous(gates_any);
  const Tensor experts = torch::stable::contiguous(experts_any);

  Tensor weighted_sum = torch::stable::new_empty(gates, {num_experts, h.size(1)});
  Tensor total = torch::stable::new_empty(gates, {num_experts});
  switch (h.scalar_type()) {
    case ScalarType::Double: sum_rows<double>(h, gates, experts, normalize, weighted_sum, total); break;
    case ScalarType::Float: sum_rows<float>(h, gates, experts, normalize, weighted_sum, total); break;
    case ScalarType::BFloat16: sum_rows<__nv_bfloat16>(h, gates, experts, normalize, weighted_sum, total); break;
    default: sum_rows<__half>(h, gates, experts, normalize, weighted_sum, total); break;
  }
  return {weighted_sum, total};
}

void memory_update_(
    Tensor memory, const Tensor& weighted_sum_any, const Tensor& total_any, double decay, bool normalize) {
  check_memory_update(memory, weighted_sum_any, total_any, decay);
  if (memory.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(memory.get_device_index());
  const Tensor weighted_sum = torch::stable::contiguous(weighted_sum_any);
  const Tensor total = torch::stable::contiguous(total_any);
  if (memory.scalar_type() == ScalarType::Double) {
    move_memory<double>(memory, weighted_sum, total, decay, normalize);
  } else {
    move_memory<float>(memory, weighted_sum, total, decay, normalize);
  }
}

}  // namespace rbm::cuda
