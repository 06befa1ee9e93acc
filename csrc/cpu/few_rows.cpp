// The kernel for few rows, compiled once for expert_matmul and routed_matmul. The interface is in few_rows.h.
#include "few_rows.h"

#include <algorithm>

#include "dot_tile.h"

namespace rbm::cpu {
namespace {

// Output features processed at once: with D = 256 their weights fill a third of the L1 cache, and every row, which
// comes from further away, is multiplied with all of them.
constexpr int64_t kColumnBlock = 16;

// Adds the contribution of kRows pairs of one expert to kColumns columns starting at n. `sums` [B, kColumnBlock] starts
// there.
template <int kBytes, int kRows, int kColumns, typename T>
RBM_INLINE void add_tile(const FewRows<T>& f, int64_t expert, const Pair* pairs, int64_t n, Accumulation<T>* sums) {
  using Acc = Accumulation<T>;
  const T* rows[kRows];
  Acc products[kRows * kColumns];
  for (int i = 0; i < kRows; ++i) rows[i] = f.x + pairs[i].row * f.row_stride;
  const int64_t column = expert * f.out_features + n;
  dot_tile<kBytes, kRows, kColumns>(rows, f.weight + column * f.in_features, f.in_features, f.in_features, products);
  for (int i = 0; i < kRows; ++i) {
    Acc* const sum = sums + pairs[i].row * kColumnBlock;
    const Acc gate = f.gates[pairs[i].index];
    for (int c = 0; c < kColumns; ++c) {
      const Acc bias = f.bias == nullptr ? 0 : static_cast<Acc>(f.bias[column + c]);
      sum[c] += gate * (products[c * kRows + i] + bias);
    }
  }
}

// The same for columns [n, last).
template <int kBytes, int kRows, int kColumns, typename T>
RBM_INLINE void add_columns(
    const FewRows<T>& f, int64_t expert, const Pair* pairs, int64_t n, int64_t last, Accumulation<T>* sums) {
  const int64_t first = n;
  for (; n + kColumns <= last; n += kColumns) add_tile<kBytes, kRows, kColumns>(f, expert, pairs, n, sums + n - first);
  for (; n < last; ++n) add_tile<kBytes, kRows, 1>(f, expert, pairs, n, sums + n - first);
}

// Blocks of columns, [begin, end). `sums` has room for [B, kColumnBlock].
template <int kBytes, typename T>
RBM_INLINE void few_rows_lanes(const FewRows<T>& f, int64_t begin, int64_t end, Accumulation<T>* sums) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t n = block * kColumnBlock, last = std::min(n + kColumnBlock, f.out_features);
    std::fill_n(sums, f.rows * kColumnBlock, 0);
    for (int64_t e = 0; e < f.num_experts; ++e) {
      const Pair* const pairs = f.pairs->of(e);
      const int64_t count = f.pairs->count(e);
      int64_t i = 0;
      // 16 running sums and their operands take 21 of the 32 registers of AVX-512; AVX2 only has 16.
      if constexpr (kBytes == 64) {
        for (; i + 4 <= count; i += 4) add_columns<kBytes, 4, 4>(f, e, pairs + i, n, last, sums);
      }
      for (; i + 2 <= count; i += 2) add_columns<kBytes, 2, 4>(f, e, pairs + i, n, last, sums);
      for (; i < count; ++i) add_columns<kBytes, 1, 8>(f, e, pairs + i, n, last, sums);
    }
    for (int64_t b = 0; b < f.rows; ++b) {
      T* const y = f.y + b * f.out_features + n;
      for (int64_t c = 0; c < last - n; ++c) y[c] = static_cast<T>(sums[b * kColumnBlock + c]);
    }
  }
}
RBM_DISPATCH(few_rows)

}  // namespace

template <typename T>
void multiply_few_rows(const FewRows<T>& f) {
  const int64_t blocks = ceil_div(f.out_features, kColumnBlock);
  const int64_t work = std::max<int64_t>(1, kColumnBlock * f.rows * f.top_k * f.in_features);
  parallel_for(0, blocks, std::max<int64_t>(1, kMultiplicationsOfThread / work), [&](int64_t begin, int64_t end) {
    const auto sums = scratch<Accumulation<T>>(f.rows * kColumnBlock);
    few_rows(f, begin, end, sums.get());
  });
}

template void multiply_few_rows(const FewRows<float>&);
template void multiply_few_rows(const FewRows<double>&);
template void multiply_few_rows(const FewRows<BFloat16>&);

}  // namespace rbm::cpu
