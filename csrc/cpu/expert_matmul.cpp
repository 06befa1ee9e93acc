// expert_matmul on the CPU: forward, and the gradients of its rows and gates. Every thread has its own rows and
// processes, for each expert, those that use it. Tiles of products are summed in registers and added, times their
// gates, to rows of the result, which stay in cache from one expert to the next. No row is multiplied with an expert
// that it does not use, and only the result grows with the batch. An earlier version with BLAS spent a third of its
// time gathering and packing the same rows for each expert, and adding up. Few rows: see few_rows.h.
#include "../expert_matmul.h"

#include <algorithm>

#include "bfloat16_pairs.h"
#include "few_rows.h"
#include "outer_tile.h"

namespace rbm::cpu {
namespace {

// Rows of a panel: their results stay in cache, and every expert gets about kRowsOfExpert of them per read of its
// weights.
constexpr int64_t kFewestPanelRows = 256;
constexpr int64_t kRowsOfExpert = 256;
// Block of the inner dimension: this part of one expert's weights stays in a core's own cache.
constexpr int64_t kInnerBlock = 512;

// out_b = sum_j gate_bj (A_e rows_b + bias_e), e = experts[b, j]. Forward: rows are x, A_e is W_e. Backward: rows are
// grad, A_e is the transpose of W_e, and the gradient of the gates is optional:
// <A_e rows_b, x_b> + <rows_b, bias_e>. Tiles read rows and weights as Operand: the type that rows of T are summed in,
// or pairs of bfloat16.
template <typename T, typename Operand = Accumulation<T>>
struct Product {
  using Acc = Accumulation<T>;
  const T* rows;
  int64_t row_stride;
  const Operand* packed;  // A_e transposed, [E] matrices [from, to]
  const T* bias;          // [E, N], or null
  const Acc* gates;
  const int32_t* experts;
  int64_t count, from, to, num_experts, top_k;
  bool with_gates;  // whether to compute the gradient of the gates, and the three members below are set
  const T* x;
  int64_t x_stride;
  Acc* grad_gates;  // [B, k]
  T* out;           // [B, to], contiguous
};

// As the end of multiply_tile, for a panel that is wider than the remaining columns. Products are read back from
// memory, so that these loops are compiled once for all rows of a tile: one copy per row took a third of this file's
// compile time.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand, typename Vector>
RBM_INLINE void add_narrow(
    const Product<T, Operand>& p, const Pair* pairs, int64_t valid, const Vector (&products)[kRows][kVectors],
    Accumulation<T>* const* outs, int64_t column) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  alignas(kBytes) Acc numbers[kRows][kVectors * L::kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) L::store(numbers[r] + v * L::kCount, products[r][v]);
  }
  const int64_t width = p.to - column;
  for (int64_t r = 0; r < valid; ++r) {
    const Acc gate = p.gates[pairs[r].index];
    Acc* const out = outs[r] + column;
    for (int64_t c = 0; c < width; ++c) out[c] += gate * numbers[r][c];
    if (!p.with_gates) continue;
    const T* const x = p.x + pairs[r].row * p.x_stride + column;
    Acc total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t c = 0; c < width; ++c) total += numbers[r][c] * static_cast<Acc>(x[c]);
    p.grad_gates[pairs[r].index] += total;
  }
}

// Adds the products of kRows rows and one panel of columns to `outs`, starting at `column`, and to the gradients of
// their gates.
template <int kBytes, int kRows, int kVectors, typename T, typename Operand>
RBM_INLINE void multiply_tile(
    const Product<T, Operand>& p, const Pair* pairs, int64_t valid, const Operand* const* rows,
    Accumulation<T>* const* outs, const Operand* panel, int64_t column, int64_t steps) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  constexpr int64_t kWidth = kVectors * L::kCount;
  typename L::Vector products[kRows][kVectors] = {};
  product_tile<kBytes, kRows, kVectors, 1>(rows, 1, &panel, kWidth, steps, products);
  if (p.to - column < kWidth) return add_narrow<kBytes>(p, pairs, valid, products, outs, column);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r < valid) {
      const Acc gate = p.gates[pairs[r].index];
      Acc* const out = outs[r] + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename L::Vector sum;
        L::load(sum, out + v * L::kCount);
        sum += gate * products[r][v];
        L::store(out + v * L::kCount, sum);
      }
    }
  }
  if (!p.with_gates) return;
  typename L::Vector totals[8] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r < valid) {
      const T* const x = p.x + pairs[r].row * p.x_stride + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        typename L::Vector part;
        L::load(part, x + v * L::kCount);
        totals[r] += products[r][v] * part;
      }
    }
  }
  Acc sums[8];
  L::template sum_lanes<8>(totals, sums);
  for (int r = 0; r < valid; ++r) p.grad_gates[pairs[r].index] += sums[r];
}

// The left side of a tile: `count` elements of a row, in place if possible, otherwise converted into `copy`.
template <typename Operand, typename T>
RBM_INLINE const Operand* left_side(const T* source, int64_t count, Operand* copy) {
  if constexpr (std::is_same_v<T, Operand>) {
    return source;
  } else if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
    if (count % 2 == 0) return reinterpret_cast<const BFloat16Pair*>(source);
    pair_neighbours(source, count, copy);
  } else {
    for (int64_t i = 0; i < count; ++i) copy[i] = static_cast<Operand>(source[i]);
  }
  return copy;
}

// The first `valid` of kRows pairs of one expert; `inner` elements of the inner dimension starting at `first`; all
// columns.
template <int kBytes, int kRows, typename T, typename Operand>
RBM_INLINE void multiply_rows(
    const Product<T, Operand>& p, int64_t expert, const Pair* pairs, int64_t valid, int64_t first, int64_t inner,
    int64_t first_row, Accumulation<T>* sums, Operand* converted) {
  using Acc = Accumulation<T>;
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const Operand* rows[kRows];
  Acc* outs[kRows];
  for (int r = 0; r < kRows; ++r) {
    // A partial tile repeats its last row, whose extra sums are discarded.
    const int64_t row = pairs[std::min<int64_t>(r, valid - 1)].row;
    rows[r] = left_side(p.rows + row * p.row_stride + first, inner, converted + r * kInnerBlock);
    outs[r] = sums + (row - first_row) * p.to;
  }
  const int64_t padded = padded_columns<Acc, kBytes>(p.to);
  const int64_t all_steps = operands_of<Operand>(p.from), first_step = first / kNumbersOf<Operand>;
  const int64_t steps = operands_of<Operand>(inner);
  const Operand* const matrix = p.packed + expert * all_steps * padded;
  int64_t column = 0;
  for (; column + kWidth <= padded; column += kWidth) {
    const Operand* const panel = matrix + column * all_steps + first_step * kWidth;
    multiply_tile<kBytes, kRows, tile_vectors<kBytes>()>(p, pairs, valid, rows, outs, panel, column, steps);
  }
  const Operand* const panel = matrix + column * all_steps + first_step * (padded - column);
  with_last_vectors<kBytes>((padded - column) / kCount, [&]<int kVectors>() __attribute__((always_inline)) {
    multiply_tile<kBytes, kRows, kVectors>(p, pairs, valid, rows, outs, panel, column, steps);
  });
}

// Adds the contribution of the bias to the rows, or to the gradient of their gates.
template <typename T, typename Operand>
RBM_INLINE void add_bias(const Product<T, Operand>& p, int64_t expert, const Pair& pair, Accumulation<T>* out) {
  using Acc = Accumulation<T>;
  if (p.bias == nullptr) return;
  if (!p.with_gates) {
    const T* const bias = p.bias + expert * p.to;
    const Acc gate = p.gates[pair.index];
    for (int64_t n = 0; n < p.to; ++n) out[n] += gate * static_cast<Acc>(bias[n]);
  } else {
    const T* const bias = p.bias + expert * p.from;
    const T* const grad = p.rows + pair.row * p.row_stride;
    Acc total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t n = 0; n < p.from; ++n) total += static_cast<Acc>(grad[n]) * static_cast<Acc>(bias[n]);
    p.grad_gates[pair.index] += total;
  }
}

template <int kBytes, typename T, typename Operand>
RBM_INLINE void multiply_panel_lanes(
    const Product<T, Operand>& p, int64_t first_row, int64_t last_row, const PairsByExpert& by_expert,
    Accumulation<T>* sums, Operand* converted) {
  using Acc = Accumulation<T>;
  constexpr int kRows = kTileRows;
  if constexpr (std::is_same_v<T, Acc>) sums = p.out + first_row * p.to;
  std::fill_n(sums, (last_row - first_row) * p.to, Acc(0));
  if (p.with_gates) std::fill_n(p.grad_gates + first_row * p.top_k, (last_row - first_row) * p.top_k, Acc(0));
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const Pair* const pairs = by_expert.of(e);
    const int64_t count = by_expert.count(e);
    for (int64_t i = 0; i < count; ++i) add_bias(p, e, pairs[i], sums + (pairs[i].row - first_row) * p.to);
    for (int64_t first = 0; first < p.from; first += kInnerBlock) {
      const int64_t inner = std::min(kInnerBlock, p.from - first);
      int64_t i = 0;
      for (; i + kRows / 2 < count; i += kRows) {
        multiply_rows<kBytes, kRows>(
            p, e, pairs + i, std::min<int64_t>(kRows, count - i), first, inner, first_row, sums, converted);
      }
      if (i < count) {
        multiply_rows<kBytes, kRows / 2>(p, e, pairs + i, count - i, first, inner, first_row, sums, converted);
      }
    }
  }
  if constexpr (!std::is_same_v<T, Acc>) {
    T* const out = p.out + first_row * p.to;
    for (int64_t i = 0; i < (last_row - first_row) * p.to; ++i) out[i].x = bfloat16_bits(sums[i]);
  }
}
RBM_DISPATCH(multiply_panel)

// Panels of equal height, the same number for every thread.
int64_t count_panel_rows(int64_t rows, int64_t num_experts, int64_t top_k) {
  const int64_t most = std::max(kFewestPanelRows, kRowsOfExpert * num_experts / std::max<int64_t>(1, top_k));
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t rounds = ceil_div(rows, most * threads);
  return ceil_div(rows, rounds * threads);
}

template <typename T, typename Operand>
void multiply(const Product<T, Operand>& p) {
  using Acc = Accumulation<T>;
  if (p.count == 0) return;
  const int64_t panel_rows = count_panel_rows(p.count, p.num_experts, p.top_k);
  parallel_for(0, ceil_div(p.count, panel_rows), 1, [&](int64_t begin, int64_t end) {
    constexpr bool kConverts = !std::is_same_v<T, Acc>;
    PairsByExpert pairs(panel_rows, p.top_k, p.num_experts);
    const auto sums = scratch<Acc>(kConverts ? panel_rows * p.to : 0);
    const auto converted = scratch<Operand>(kConverts ? kTileRows * kInnerBlock : 0);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * panel_rows, last = std::min(first + panel_rows, p.count);
      pairs.list(p.experts, first, last);
      multiply_panel(p, first, last, pairs, sums.get(), converted.get());
    }
  });
}

// Weights [E, N, D] as matrices [D, N], or [N, D] for the gradient of the rows.
template <typename T>
Unpacked<T> unpacked_weight(const Tensor& weight, bool for_gradient) {
  const int64_t outputs = weight.size(1), features = weight.size(2);
  return for_gradient
             ? Unpacked<T>{data<T>(weight), weight.size(0), outputs, features, outputs * features, features, 1}
             : Unpacked<T>{data<T>(weight), weight.size(0), features, outputs, outputs * features, 1, features};
}

// Packs the weights for this processor and multiplies; `product` makes a Product from the packed weights.
template <typename T, typename Make>
void pack_and_multiply(const Unpacked<T>& weight, const Make& product) {
  with_operand<T>([&]<typename Operand>(Operand) {
    const auto packed = pack_operands<Operand>(weight);
    multiply(product(static_cast<const Operand*>(packed.get())));
  });
}

template <typename T>
Tensor forward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), top_k = gates.size(1);
  Tensor y = new_tensor(x.scalar_type(), {rows, weight.size(1)});
  if (are_few<T>(rows, top_k, weight.size(0))) {
    PairsByExpert pairs(rows, top_k, weight.size(0));
    pairs.list(data<int32_t>(experts), 0, rows);
    const FewRows<T> few{
        .x = data<T>(x),
        .row_stride = x.stride(0),
        .weight = data<T>(weight),
        .bias = bias ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .pairs = &pairs,
        .rows = rows,
        .top_k = top_k,
        .in_features = x.size(1),
        .out_features = weight.size(1),
        .num_experts = weight.size(0),
        .y = mutable_data<T>(y),
    };
    multiply_few_rows(few);
    return y;
  }
  pack_and_multiply(unpacked_weight<T>(weight, false), [&]<typename Operand>(const Operand* packed) {
    return Product<T, Operand>{
        .rows = data<T>(x),
        .row_stride = x.stride(0),
        .packed = packed,
        .bias = bias ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .experts = data<int32_t>(experts),
        .count = rows,
        .from = x.size(1),
        .to = weight.size(1),
        .num_experts = weight.size(0),
        .top_k = top_k,
        .with_gates = false,
        .x = nullptr,
        .x_stride = 0,
        .grad_gates = nullptr,
        .out = mutable_data<T>(y),
    };
  });
  return y;
}

template <typename T>
std::tuple<Tensor, Tensor> backward_input(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& gates,
    const Tensor& experts, bool with_gates) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), in_features = x.size(1), top_k = gates.size(1);
  Tensor grad_x = new_tensor(x.scalar_type(), {rows, in_features});
  Tensor grad_gates =
      with_gates ? new_tensor(gates.scalar_type(), {rows, top_k}) : new_tensor(gates.scalar_type(), {0});
  pack_and_multiply(unpacked_weight<T>(weight, true), [&]<typename Operand>(const Operand* packed) {
    return Product<T, Operand>{
        .rows = data<T>(grad),
        .row_stride = grad.stride(0),
        .packed = packed,
        .bias = bias && with_gates ? data<T>(*bias) : nullptr,
        .gates = data<Acc>(gates),
        .experts = data<int32_t>(experts),
        .count = rows,
        .from = weight.size(1),
        .to = in_features,
        .num_experts = weight.size(0),
        .top_k = top_k,
        .with_gates = with_gates,
        .x = data<T>(x),
        .x_stride = x.stride(0),
        .grad_gates = mutable_data<Acc>(grad_gates),
        .out = mutable_data<T>(grad_x),
    };
  });
  return {grad_x, grad_gates};
}
}  // namespace

Tensor expert_matmul(
    const Tensor& x_any, const Tensor& weight_any, const std::optional<Tensor>& bias_any, const Tensor& gates_any,
    const Tensor& experts_any, Order, Order, Order, int64_t) {
  const Checks check("expert_matmul");
  check_weights(check, x_any, weight_any, bias_any);
  check_pairs(check, x_any, gates_any, experts_any);
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)), weight = dense(as_dtype(weight_any, dtype));
  const std::optional<Tensor> bias = dense(as_dtype(bias_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, weight.size(0));
  const Tensor y = with_type(dtype, [&]<typename T>(T) { return forward<T>(x, weight, bias, gates, experts); });
  return as_dtype(y, x_any.scalar_type());
}

std::tuple<Tensor, Tensor> expert_matmul_backward_input(
    const Tensor& grad_any, const Tensor& x_any, const Tensor& weight_any, const std::optional<Tensor>& bias_any,
    const Tensor& gates_any, const Tensor& experts_any, bool with_gates, Order, Order, Order, int64_t) {
  const Checks check("expert_matmul_backward_input");
  check_weights(check, x_any, weight_any, bias_any);
  check_pairs(check, x_any, gates_any, experts_any);
  check_grad(check, grad_any, x_any, weight_any.size(1));
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)), weight = dense(as_dtype(weight_any, dtype));
  const Tensor grad = with_adjacent_features(as_dtype(grad_any, dtype));
  const std::optional<Tensor> bias = dense(as_dtype(bias_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, weight.size(0));
  const auto [grad_x, grad_gates] = with_type(
      dtype, [&]<typename T>(T) { return backward_input<T>(grad, x, weight, bias, gates, experts, with_gates); });
  return {as_dtype(grad_x, x_any.scalar_type()), grad_gates};
}

}  // namespace rbm::cpu
