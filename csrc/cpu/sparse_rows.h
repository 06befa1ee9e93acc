// Rows in CSR form for the CPU kernels, and how they are processed. A stored entry needs a row of N weights from
// anywhere in memory, so the work is limited by memory, not arithmetic. Outputs are therefore divided into blocks, and
// one expert's weights for one block, transposed to [D, block], stay in a core's own cache while all rows of that
// expert are processed. The backward pass is the same loop with reads and writes exchanged. Each element of a result is
// summed by one thread in a fixed order, so any number of threads gives the same bits.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>

#include "../sparse_expert_matmul.h"
#include "pairs.h"
#include "rows.h"
#include "vectors.h"

namespace rbm::cpu::sparse {

// Outputs of a block, as cache lines of its rows. Eight was faster than two and four at 8,415 features and 256 outputs:
// a wider block goes through the entries less often, and features are used so unevenly that a core's cache holds the
// important ones. A layer with few outputs gets fewer, because blocks are padded.
constexpr int64_t kLineBytes = 64, kWideLines = 8, kMediumLines = 4, kNarrowLines = 1;
template <typename T>
constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));
// Vectors that stay in registers while the entries of a row are read: half of the registers of AVX2. A block that is
// wider than these goes through the row's entries several times.
constexpr int64_t kMostVectors = 8;
template <typename T, int kBytes, int64_t kWidth>
constexpr int64_t kVectors = std::min(kMostVectors, kWidth / Lanes<T, kBytes>::kCount);
// Features that are transposed at once: a cache line of float32.
constexpr int64_t kTileFeatures = 16;
// Transposing an expert's weights touches N * D numbers in order; using them in place fetches a cache line for each of
// entries * N. So the weights are used in place if there are few entries.
constexpr int64_t kLineCost = 8;
// Products with fewer multiplications than this use one thread, because every thread transposes weights.
constexpr int64_t kFewMultiplications = 65536;

constexpr size_t kBlockAlignment = 4096;

// All tensors are contiguous except the weights, whose features are adjacent.
template <typename T>
struct Problem {
  const int32_t* crow;
  const int32_t* col;
  const T* values;
  const T* weight;  // [E, N, D]
  int64_t expert_stride, output_stride;
  const T* bias;   // [E, N], or null
  const T* scale;  // [E, D], or null
  const T* gates;
  const int32_t* experts;
  int64_t rows, entries, features, outputs, num_experts, top_k;

  int64_t entries_of(int64_t row) const { return crow[row + 1] - crow[row]; }
};

template <typename T>
int64_t lines_of_block(int64_t outputs) {
  if (outputs <= kNarrowLines * kLine<T>) return kNarrowLines;
  return outputs <= kMediumLines * kLine<T> ? kMediumLines : kWideLines;
}

// Calls function(width) with the outputs of a block of so many lines as a constant.
template <typename T, typename Function>
void with_width(int64_t lines, const Function& function) {
  switch (lines) {
    case kWideLines: return function(std::integral_constant<int64_t, kWideLines * kLine<T>>{});
    case kMediumLines: return function(std::integral_constant<int64_t, kMediumLines * kLine<T>>{});
    default: return function(std::integral_constant<int64_t, kNarrowLines * kLine<T>>{});
  }
}

// Called before the parallel part, because an exception must not leave it.
inline void check_indices(
    const Checks& check, const Tensor& crow, const Tensor& col, const Tensor& experts, int64_t num_experts,
    int64_t features) {
  const auto* const starts = data<int32_t>(crow);
  const int64_t rows = crow.size(0) - 1, entries = col.size(0);
  if (starts[0] != 0 || starts[rows] != entries || !std::is_sorted(starts, starts + rows + 1)) {
    check.fail("crow does not rise from 0 to the number of entries, ", entries);
  }
  const auto outside = [](const Tensor& tensor, int64_t limit) {
    const auto* const values = data<int32_t>(tensor);
    const int64_t count = tensor.numel();
    int32_t least = 0, most = 0;
    for (int64_t i = 0; i < count; ++i) {
      least = std::min(least, values[i]);
      most = std::max(most, values[i]);
    }
    if (least < 0) return std::optional<int32_t>(least);
    return count > 0 && most >= limit ? std::optional<int32_t>(most) : std::nullopt;
  };
  if (const auto bad = outside(col, features)) {
    check.fail("col holds ", *bad, ", expected between 0 and ", features - 1);
  }
  check_experts(check, experts, num_experts);
}

// The arguments of an operator, checked and contiguous. They must outlive a Problem, which points into them.
struct Arguments {
  Tensor crow, col, values, weight;
  std::optional<Tensor> bias, scale;
  Tensor gates, experts;

  Arguments(
      const char* op, const Tensor& crow_any, const Tensor& col_any, const Tensor& values_any, const Tensor& weight_any,
      const std::optional<Tensor>& bias_any, const std::optional<Tensor>& scale_any, const Tensor& gates_any,
      const Tensor& experts_any)
      : crow(crow_any),
        col(col_any),
        values(values_any),
        weight(weight_any),
        bias(bias_any),
        scale(scale_any),
        gates(gates_any),
        experts(experts_any) {
    const Checks check(op);
    check_sparse_rows(check, crow, col, values, gates, experts);
    check_sparse_weights(check, values, weight, bias, scale);
    // Copy only after all checks have passed.
    for (Tensor* const tensor : {&crow, &col, &values, &gates, &experts}) *tensor = dense(*tensor);
    bias = dense(bias), scale = dense(scale);
    if (weight.size(2) > 1 && weight.stride(2) != 1) weight = dense(weight);
    check_indices(check, crow, col, experts, weight.size(0), weight.size(2));
  }

  template <typename T>
  Problem<T> problem() const {
    return {
        .crow = data<int32_t>(crow),
        .col = data<int32_t>(col),
        .values = data<T>(values),
        .weight = data<T>(weight),
        .expert_stride = weight.stride(0),
        .output_stride = weight.stride(1),
        .bias = bias ? data<T>(*bias) : nullptr,
        .scale = scale ? data<T>(*scale) : nullptr,
        .gates = data<T>(gates),
        .experts = data<int32_t>(experts),
        .rows = gates.size(0),
        .entries = values.size(0),
        .features = weight.size(2),
        .outputs = weight.size(1),
        .num_experts = weight.size(0),
        .top_k = gates.size(1),
    };
  }
};

inline Tensor checked_grad(const char* op, const Tensor& grad, const Arguments& arguments) {
  const Checks check(op);
  check.dtype("grad", grad, {arguments.values.scalar_type()});
  check.shape("grad", grad, {arguments.gates.size(0), arguments.weight.size(1)}, "rows by outputs");
  check.same_device("grad", grad, "values", arguments.values);
  return dense(grad);
}

}  // namespace rbm::cpu::sparse
