// The gradient of expert_matmul's weights and biases on the CPU. Each thread has its own output features and processes
// all rows of an expert for them, so every gradient is summed in place, in the order of the rows.
#include "../expert_matmul.h"

#include <algorithm>

#include "amx.h"
#include "pairs.h"

namespace rbm::cpu {
namespace {

// Rows processed at once, an even number: the part of them that a tile multiplies stays in the L1 cache.
constexpr int64_t kPieceRows = 128;

template <typename T>
struct WeightGrad {
  using Acc = Accumulation<T>;
  const T* x;
  int64_t x_stride;
  const T* grad;
  int64_t grad_stride;
  const Acc* gates;
  const PairsByExpert* pairs;
  int64_t in_features, out_features;
  Acc* grad_weight;  // [E, N, D]
  Acc* grad_bias;    // [E, N]
};

// For kRows output features, of which `valid` exist, and one panel of input features: grad_weight is set to, or
// increased by, the contribution of `steps` operands (rows or pairs of rows). `gated` and `panel` start at the first of
// those features, in the first row.
template <int kBytes, int kRows, int kVectors, typename Operand, typename Acc>
RBM_INLINE void sum_tile(
    const Operand* gated, int64_t gated_stride, const Operand* panel, int64_t steps, bool first, int64_t valid,
    int64_t width, Acc* grad_weight, int64_t features) {
  using L = Lanes<Acc, kBytes>;
  typename L::Vector sums[kRows][kVectors] = {};
  const Operand* left[kRows];
  for (int r = 0; r < kRows; ++r) left[r] = gated + std::min<int64_t>(r, valid - 1);
  product_tile<kBytes, kRows, kVectors, 1>(left, gated_stride, &panel, kVectors * L::kCount, steps, sums);
  alignas(kBytes) Acc numbers[kRows][kVectors * L::kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) L::store(numbers[r] + v * L::kCount, sums[r][v]);
  }
  for (int64_t r = 0; r < valid; ++r) {
    Acc* const target = grad_weight + r * features;
    if (first) {
      for (int64_t d = 0; d < width; ++d) target[d] = numbers[r][d];
    } else {
      for (int64_t d = 0; d < width; ++d) target[d] += numbers[r][d];
    }
  }
}

template <int kBytes, int kVectors, typename Operand, typename Acc>
RBM_INLINE void sum_panel(
    const Operand* gated, int64_t outputs, const Operand* panel, int64_t steps, bool first, int64_t width,
    Acc* grad_weight, int64_t features) {
  int64_t n = 0;
  for (; n + kTileRows / 2 < outputs; n += kTileRows) {
    const int64_t valid = std::min<int64_t>(kTileRows, outputs - n);
    sum_tile<kBytes, kTileRows, kVectors>(
        gated + n, outputs, panel, steps, first, valid, width, grad_weight + n * features, features);
  }
  if (n < outputs) {
    sum_tile<kBytes, kTileRows / 2, kVectors>(
        gated + n, outputs, panel, steps, first, outputs - n, width, grad_weight + n * features, features);
  }
}

// Multiplies the gradients of `count` rows by their gates, into `gated` [steps, `outputs` of `stride`], and adds them
// to `bias_sum`.
template <typename T, typename Operand>
RBM_INLINE void gate_rows(
    const WeightGrad<T>& w, const Pair* pairs, int64_t count, int64_t begin, int64_t outputs, int64_t stride,
    Accumulation<T>* bias_sum, Operand* gated) {
  using Acc = Accumulation<T>;
  const auto grad_of = [&](int64_t i) { return w.grad + pairs[i].row * w.grad_stride + begin; };
  for (int64_t i = 0; i < count; i += kNumbersOf<Operand>) {
    const Acc gate = w.gates[pairs[i].index];
    const T* const grad = grad_of(i);
    Operand* const row = gated + i / kNumbersOf<Operand> * stride;
    if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
      // The products are rounded to bfloat16 for the tile; the bias sums them before rounding.
      const bool has_next = i + 1 < count;
      const Acc next_gate = has_next ? w.gates[pairs[i + 1].index] : Acc(0);
      const T* const next_grad = has_next ? grad_of(i + 1) : grad;
      for (int64_t n = 0; n < outputs; ++n) {
        const Acc number = gate * static_cast<Acc>(grad[n]);
        const Acc next = has_next ? next_gate * static_cast<Acc>(next_grad[n]) : Acc(0);
        bias_sum[n] = bias_sum[n] + number + next;
        row[n].bits = bfloat16_bits(number) | static_cast<uint32_t>(bfloat16_bits(next)) << 16;
      }
    } else {
      for (int64_t n = 0; n < outputs; ++n) {
        row[n] = gate * static_cast<Acc>(grad[n]);
        bias_sum[n] += row[n];
      }
    }
  }
}

// Copies features [first, first + filled) of `count` rows into a panel of `width` columns, with zeros past the last
// one.
template <typename T, typename Operand>
RBM_INLINE void panel_of_rows(
    const WeightGrad<T>& w, const Pair* pairs, int64_t count, int64_t first, int64_t filled, int64_t width,
    Operand* panel) {
  constexpr int64_t kNumbers = kNumbersOf<Operand>;
  for (int64_t i = 0; i < count; i += kNumbers) {
    const T* const x = w.x + pairs[i].row * w.x_stride + first;
    Operand* const row = panel + i / kNumbers * width;
    if constexpr (std::is_same_v<Operand, BFloat16Pair>) {
      pair_rows(x, i + 1 < count ? w.x + pairs[i + 1].row * w.x_stride + first : nullptr, filled, row);
    } else {
      for (int64_t c = 0; c < filled; ++c) row[c] = static_cast<Operand>(x[c]);
    }
    std::fill_n(row + filled, width - filled, Operand{});
  }
}

// Output features [begin, end) of one expert. `gated` has room for [kPieceRows, end - begin] and `panels` for
// [kPieceRows, features, padded to whole vectors].
template <int kBytes, typename T, typename Operand>
RBM_INLINE void sum_expert_lanes(
    const WeightGrad<T>& w, int64_t expert, int64_t begin, int64_t end, Operand* gated, Operand* panels) {
  using Acc = Accumulation<T>;
  constexpr int64_t kCount = Lanes<Acc, kBytes>::kCount, kWidth = panel_width<Acc, kBytes>();
  const int64_t outputs = end - begin, features = w.in_features;
  const int64_t padded = padded_columns<Acc, kBytes>(features), pairs = w.pairs->count(expert);
  Acc* const bias_sum = w.grad_bias + expert * w.out_features + begin;
  Acc* const weight_sum = w.grad_weight + (expert * w.out_features + begin) * features;
  std::fill_n(bias_sum, outputs, Acc(0));
  if (pairs == 0) std::fill_n(weight_sum, outputs * features, Acc(0));

  for (int64_t first = 0; first < pairs; first += kPieceRows) {
    const int64_t count = std::min(kPieceRows, pairs - first), steps = operands_of<Operand>(count);
    const Pair* const piece = w.pairs->of(expert) + first;
    gate_rows(w, piece, count, begin, outputs, outputs, bias_sum, gated);
    for (int64_t d = 0; d < padded; d += kWidth) {
      const int64_t width = std::min(kWidth, padded - d);
      panel_of_rows(w, piece, count, d, std::min(width, features - d), width, panels + d * kPieceRows);
    }
    for (int64_t d = 0; d < padded; d += kWidth) {
      const int64_t vectors = std::min(kWidth, padded - d) / kCount, width = std::min(kWidth, features - d);
      const Operand* const panel = panels + d * kPieceRows;
      Acc* const target = weight_sum + d;
      const auto sum = [&]<int kVectors>() __attribute__((always_inline)) {
        sum_panel<kBytes, kVectors>(gated, outputs, panel, steps, first == 0, width, target, features);
      };
      if (vectors == tile_vectors<kBytes>()) {
        sum.template operator()<tile_vectors<kBytes>()>();
      } else {
        with_last_vectors<kBytes>(vectors, sum);
      }
    }
  }
}
RBM_DISPATCH(sum_expert)

// As kPieceRows, with AMX: products are so fast that adding them up should be rare.
constexpr int64_t kAmxPieceRows = 512, kAmxPieceSteps = kAmxPieceRows / 2;

// As sum_expert, with the tile registers of AMX. `gated` has room for [kAmxPieceSteps, end - begin rounded up to 16],
// and `panels` for [kAmxPieceSteps, features, padded to whole vectors].
template <int kBytes, typename Tiles>
RBM_INLINE void sum_expert_amx_lanes(
    Tiles tiles, const WeightGrad<BFloat16>& w, int64_t expert, int64_t begin, int64_t end, BFloat16Pair* gated,
    BFloat16Pair* panels, LeftBlock* left) {
  using L = Lanes<float, kBytes>;
  const int64_t outputs = end - begin, features = w.in_features, stride = round_up(outputs, kRegisterRows);
  const int64_t padded = padded_columns<float, kBytes>(features), pairs = w.pairs->count(expert);
  float* const bias_sum = w.grad_bias + expert * w.out_features + begin;
  float* const weight_sum = w.grad_weight + (expert * w.out_features + begin) * features;
  std::fill_n(bias_sum, outputs, 0.0f);
  if (pairs == 0) std::fill_n(weight_sum, outputs * features, 0.0f);
  for (int64_t first = 0; first < pairs; first += kAmxPieceRows) {
    const int64_t count = std::min(kAmxPieceRows, pairs - first), steps = operands_of<BFloat16Pair>(count);
    const Pair* const piece = w.pairs->of(expert) + first;
    gate_rows(w, piece, count, begin, outputs, stride, bias_sum, gated);
    // Zeros up to a whole register: the left side multiplies them.
    const int64_t whole_steps = round_up(steps, kRegisterWidth);
    std::fill_n(gated + steps * stride, (whole_steps - steps) * stride, BFloat16Pair{});
    for (int64_t d = 0; d < padded; d += kBlockColumns) {
      const int64_t width = std::min(kBlockColumns, padded - d);
      panel_of_rows(w, piece, count, d, std::min(width, features - d), width, panels + d * kAmxPieceSteps);
    }
    for (int64_t n = 0; n < outputs; n += kBlockRows) {
      const int64_t valid = std::min(kBlockRows, outputs - n);
      for (int64_t r = 0; r < valid; r += kRegisterRows) {
        for (int64_t k = 0; k < whole_steps; k += kRegisterWidth) {
          const auto* const source = reinterpret_cast<const float*>(gated + k * stride + n + r);
          transpose<kBytes>(source, stride, reinterpret_cast<float*>(left->row(r) + k), left->stride());
        }
      }
      for (int64_t d = 0; d < padded; d += kBlockColumns) {
        const int64_t width = std::min(kBlockColumns, padded - d);
        const auto add = [&]<int kColumns>(int64_t offset, const float* numbers) __attribute__((always_inline)) {
          float* const target = weight_sum + n * features + d + offset;
          const int64_t filled = std::min<int64_t>(kColumns, features - d - offset);
          for (int64_t r = 0; r < valid; ++r) {
            if (filled < kColumns) {
              for (int64_t c = 0; c < filled; ++c) {
                const float before = first == 0 ? 0 : target[r * features + c];
                target[r * features + c] = before + numbers[r * kColumns + c];
              }
              continue;
            }
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; c += L::kCount) {
              typename L::Vector product, sum{};
              L::load(product, numbers + r * kColumns + c);
              if (first > 0) L::load(sum, target + r * features + c);
              L::store(target + r * features + c, sum + product);
            }
          }
        };
        left->multiply(tiles, valid, panels + d * kAmxPieceSteps, width, steps, width, false, add);
      }
    }
  }
}
RBM_DISPATCH(sum_expert_amx)

// The gradients of all experts, with tiles of Operand.
template <typename Operand, typename T>
void sum_experts(const WeightGrad<T>& w, int64_t num_experts) {
  // As many slices of output features as threads, or as there are tiles. Work is divided by slice rather than by
  // expert, so that threads get equal shares even if experts do not.
  const int64_t threads = torch::stable::get_num_threads(), tiles = ceil_div(w.out_features, kTileRows);
  const int64_t width = ceil_div(tiles, threads) * kTileRows;
  const int64_t slices = width > 0 ? ceil_div(w.out_features, width) : 0;
  parallel_for(0, slices * num_experts, 1, [&](int64_t begin, int64_t end) {
    const auto each_task = [&](const auto& sum) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task / num_experts * width, last = std::min(first + width, w.out_features);
        sum(task % num_experts, first, last);
      }
    };
    const bool with_amx = with_tiles<Operand>([&](auto tiles) {
      LeftBlock left(kAmxPieceSteps);
      const auto gated = scratch<BFloat16Pair>(kAmxPieceSteps * round_up(width, kRegisterRows));
      const auto panels = scratch<BFloat16Pair>(kAmxPieceSteps * (w.in_features + 64));
      each_task([&](int64_t expert, int64_t first, int64_t last) {
        sum_expert_amx(tiles, w, expert, first, last, gated.get(), panels.get(), &left);
      });
    });
    if (with_amx) return;
    const auto gated = scratch<Operand>(kPieceRows * width);
    // No vector is longer than 64 bytes.
    const auto panels = scratch<Operand>(kPieceRows * (w.in_features + 64));
    each_task([&](int64_t expert, int64_t first, int64_t last) {
      sum_expert(w, expert, first, last, gated.get(), panels.get());
    });
  });
}

template <typename T>
std::tuple<Tensor, Tensor> backward_weight(
    const Tensor& grad, const Tensor& x, const Tensor& gates, const Tensor& experts, int64_t num_experts,
    bool with_bias) {
  using Acc = Accumulation<T>;
  const int64_t rows = x.size(0), in_features = x.size(1), out_features = grad.size(1);
  Tensor grad_weight = new_tensor(gates.scalar_type(), {num_experts, out_features, in_features});
  Tensor grad_bias = new_tensor(gates.scalar_type(), {num_experts, out_features});
  PairsByExpert pairs(rows, gates.size(1), num_experts);
  pairs.list(data<int32_t>(experts), 0, rows);
  const WeightGrad<T> sums{
      .x = data<T>(x),
      .x_stride = x.stride(0),
      .grad = data<T>(grad),
      .grad_stride = grad.stride(0),
      .gates = data<Acc>(gates),
      .pairs = &pairs,
      .in_features = in_features,
      .out_features = out_features,
      .grad_weight = mutable_data<Acc>(grad_weight),
      .grad_bias = mutable_data<Acc>(grad_bias),
  };
  with_operand<T>([&]<typename Operand>(Operand) { sum_experts<Operand>(sums, num_experts); });
  if (!with_bias) grad_bias = new_tensor(gates.scalar_type(), {0});
  return {grad_weight, grad_bias};
}

}  // namespace

std::tuple<Tensor, Tensor> expert_matmul_backward_weight(
    const Tensor& grad_any, const Tensor& x_any, const Tensor& gates_any, const Tensor& experts_any,
    int64_t num_experts, bool with_bias) {
  const Checks check("expert_matmul_backward_weight");
  check.shape("x", x_any, {kAnySize, kAnySize}, "rows by features");
  check.shape("grad", grad_any, {kAnySize, kAnySize}, "rows by outputs");
  check_grad(check, grad_any, x_any, grad_any.size(1));
  check_pairs(check, x_any, gates_any, experts_any);
  check_num_experts(check, num_experts);
  const ScalarType dtype = served_dtype(x_any.scalar_type());
  const Tensor x = with_adjacent_features(as_dtype(x_any, dtype)),
               grad = with_adjacent_features(as_dtype(grad_any, dtype));
  const Tensor gates = dense(gates_any), experts = dense(experts_any);
  check_experts(check, experts, num_experts);
  const auto [grad_weight, grad_bias] = with_type(
      dtype, [&]<typename T>(T) { return backward_weight<T>(grad, x, gates, experts, num_experts, with_bias); });
  return {as_dtype(grad_weight, x_any.scalar_type()), as_dtype(grad_bias, x_any.scalar_type())};
}

}  // namespace rbm::cpu
