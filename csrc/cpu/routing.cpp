// Routing for all operators. Compiled once, for rows of each type: these are the slowest templates to compile.
#include "routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "dot_tile.h"
#include "exponential.h"

namespace rbm::cpu {
namespace {

template <typename Acc>
RBM_INLINE Acc inverse_norm(Acc square) {
  return 1 / std::max(std::sqrt(square), static_cast<Acc>(kNormEps));
}

// Integers with the same order as the numbers. NaN counts as the largest, as in PyTorch's sort, and both zeros are
// equal.
template <int kBytes, typename Acc>
RBM_INLINE void to_order(const typename Lanes<Acc, kBytes>::Vector& number, typename Lanes<Acc, kBytes>::Mask& order) {
  using Mask = typename Lanes<Acc, kBytes>::Mask;
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  constexpr Int kMost = std::numeric_limits<Int>::max();
  const typename Lanes<Acc, kBytes>::Vector positive_zero = number + Acc(0);
  std::memcpy(&order, &positive_zero, sizeof(order));
  order ^= (order >> (8 * sizeof(Acc) - 1)) & kMost;
  const Mask is_nan = number != number;
  order = (is_nan & kMost) | (~is_nan & order);
}

// The number for such an integer.
template <int kBytes, typename Acc>
RBM_INLINE void from_order(
    const typename Lanes<Acc, kBytes>::Mask& order, typename Lanes<Acc, kBytes>::Vector& number) {
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  const typename Lanes<Acc, kBytes>::Mask bits =
      order ^ ((order >> (8 * sizeof(Acc) - 1)) & std::numeric_limits<Int>::max());
  std::memcpy(&number, &bits, sizeof(number));
}

// Finds the k largest `cosines`, [E, lanes], of the `rows` rows starting at row b, and their softmax. Ties go to the
// lower expert. `order` is scratch as large as `cosines`.
template <int kBytes, typename T>
RBM_INLINE void choose(
    const Routing<T>& r, int64_t b, int64_t rows, const Accumulation<T>* cosines, Accumulation<T>* order) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  constexpr Int kTaken = std::numeric_limits<Int>::min();
  const auto load = [&](typename L::Mask& keys, int64_t e) { std::memcpy(&keys, order + e * L::kCount, sizeof(keys)); };
  const auto store = [&](const typename L::Mask& keys, int64_t e) {
    std::memcpy(order + e * L::kCount, &keys, sizeof(keys));
  };
  for (int64_t e = 0; e < r.num_experts; ++e) {
    typename L::Vector cosine;
    typename L::Mask keys;
    L::load(cosine, cosines + e * L::kCount);
    to_order<kBytes, Acc>(cosine, keys);
    store(keys, e);
  }
  Acc* const chosen = r.cosines + b * r.top_k;
  Acc* const gates = r.gates + b * r.top_k;
  int32_t* const experts = r.experts + b * r.top_k;
  typename L::Vector first{}, total{};
  const typename L::Mask none{};
  for (int64_t j = 0; j < r.top_k; ++j) {
    typename L::Mask best = none + kTaken, place = none;
    for (int64_t e = 0; e < r.num_experts; ++e) {
      typename L::Mask keys;
      load(keys, e);
      const typename L::Mask is_better = keys > best;
      best = (is_better & keys) | (~is_better & best);
      place = (is_better & static_cast<Int>(e)) | (~is_better & place);
    }
    for (int64_t e = 0; e < r.num_experts && j + 1 < r.top_k; ++e) {
      typename L::Mask keys;
      load(keys, e);
      const typename L::Mask is_taken = place == static_cast<Int>(e);
      keys = (is_taken & kTaken) | (~is_taken & keys);
      store(keys, e);
    }
    typename L::Vector cosine;
    from_order<kBytes, Acc>(best, cosine);
    if (j == 0) first = cosine;
    typename L::Vector gate = (cosine - first) / r.temperature;
    exponential<kBytes, Acc>(gate);
    total += gate;
    alignas(kBytes) Acc cosine_lanes[L::kCount], gate_lanes[L::kCount];
    alignas(kBytes) Int place_lanes[L::kCount];
    L::store(cosine_lanes, cosine);
    L::store(gate_lanes, gate);
    std::memcpy(place_lanes, &place, sizeof(place));
    for (int64_t i = 0; i < rows; ++i) {
      chosen[i * r.top_k + j] = cosine_lanes[i];
      gates[i * r.top_k + j] = gate_lanes[i];
      experts[i * r.top_k + j] = static_cast<int32_t>(place_lanes[i]);
    }
  }
  if (r.over_all) {
    total = typename L::Vector{};
    for (int64_t e = 0; e < r.num_experts; ++e) {
      typename L::Vector gate;
      L::load(gate, cosines + e * L::kCount);
      gate = (gate - first) / r.temperature;
      exponential<kBytes, Acc>(gate);
      total += gate;
    }
  }
  alignas(kBytes) Acc totals[L::kCount];
  L::store(totals, total);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < r.top_k; ++j) gates[i * r.top_k + j] /= totals[i];
  }
}

// Inner products of kRows rows with all memory vectors, `products` [E, kStride], and the inverse norms of the rows.
// Returns whether the squares of the rows are safe; if not, the results are invalid.
template <int kBytes, int kRows, int kStride, typename T, typename Row>
RBM_INLINE bool products_of(
    const Routing<T>& r, const Row* const* rows, Accumulation<T>* products, Accumulation<T>* inverse) {
  using Acc = Accumulation<T>;
  constexpr int kColumns = 4;
  // 4 x 4 sums and their operands take 21 of the 32 registers of AVX-512; other processors have 16 registers.
  constexpr int kTile = kBytes == 64 ? kRows : std::min(kRows, 2);
  Acc sums[kRows * kColumns];
  square_tile<kBytes, kRows>(rows, r.features, inverse);
  bool safe = true;
  for (int i = 0; i < kRows; ++i) {
    safe = safe && square_is_safe(inverse[i]);
    inverse[i] = inverse_norm(inverse[i]);
  }
  int64_t e = 0;
  for (; e + kColumns <= r.num_experts; e += kColumns) {
    const Acc* const memory = r.memory + e * r.features;
    for (int i = 0; i < kRows; i += kTile) {
      dot_tile<kBytes, kTile, kColumns>(rows + i, memory, r.features, r.features, sums + i * kColumns);
    }
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kColumns; ++c) products[(e + c) * kStride + i] = sums[i * kColumns + c];
    }
  }
  for (; e < r.num_experts; ++e) {
    dot_tile<kBytes, kRows, 1>(rows, r.memory + e * r.features, 0, r.features, sums);
    for (int i = 0; i < kRows; ++i) products[e * kStride + i] = sums[i];
  }
  return safe;
}

// The same for kRows rows starting at row b, which may include long ones.
template <int kBytes, int kRows, int kStride, typename T>
RBM_INLINE void all_products(const Routing<T>& r, int64_t b, Accumulation<T>* products, Accumulation<T>* inverse) {
  const T* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = r.h + (b + i) * r.row_stride;
  if (products_of<kBytes, kRows, kStride>(r, rows, products, inverse)) return;
  for (int i = 0; i < kRows; ++i) {
    if (products_of<kBytes, 1, kStride>(r, rows + i, products + i, inverse + i)) continue;
    const auto copy = shrunk(rows[i], r.features);
    const Accumulation<T>* const row = copy.get();
    products_of<kBytes, 1, kStride>(r, &row, products + i, inverse + i);
  }
}

// Routes rows [begin, end). `work` has room for routing_scratch.
template <int kBytes, typename T>
RBM_INLINE void route_lanes(const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* work) {
  using L = Lanes<Accumulation<T>, kBytes>;
  Accumulation<T>* const cosines = work;
  Accumulation<T>* const order = cosines + r.num_experts * L::kCount;
  Accumulation<T>* const inverse = order + r.num_experts * L::kCount;
  for (int64_t b = begin; b < end; b += L::kCount) {
    const int64_t rows = std::min<int64_t>(L::kCount, end - b);
    if (rows < L::kCount) std::fill_n(work, (2 * r.num_experts + 1) * L::kCount, Accumulation<T>(0));
    int64_t i = 0;
    if constexpr (L::kCount >= 4) {
      for (; i + 4 <= rows; i += 4) all_products<kBytes, 4, L::kCount>(r, b + i, cosines + i, inverse + i);
    }
    for (; i < rows; ++i) all_products<kBytes, 1, L::kCount>(r, b + i, cosines + i, inverse + i);
    typename L::Vector of_rows;
    L::load(of_rows, inverse);
    for (int64_t e = 0; e < r.num_experts; ++e) {
      typename L::Vector cosine;
      L::load(cosine, cosines + e * L::kCount);
      cosine = cosine * of_rows * r.inverse_norms[e];
      L::store(cosines + e * L::kCount, cosine);
    }
    choose<kBytes>(r, b, rows, cosines, order);
  }
}
RBM_DISPATCH(route)

// inverse_norms[e] = 1 / |memory[e]|.
template <int kBytes, typename Acc>
RBM_INLINE void invert_norms_lanes(const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms) {
  constexpr int64_t kRows = 4;
  const Acc* rows[kRows];
  int64_t e = 0;
  for (; e + kRows <= num_experts; e += kRows) {
    for (int i = 0; i < kRows; ++i) rows[i] = memory + (e + i) * features;
    square_tile<kBytes, kRows>(rows, features, inverse_norms + e);
  }
  for (; e < num_experts; ++e) {
    rows[0] = memory + e * features;
    square_tile<kBytes, 1>(rows, features, inverse_norms + e);
  }
  for (e = 0; e < num_experts; ++e) inverse_norms[e] = inverse_norm(inverse_norms[e]);
}
RBM_DISPATCH(invert_norms)

}  // namespace

template <typename T>
void route_rows(const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* work) {
  route(r, begin, end, work);
}
template void route_rows(const Routing<float>&, int64_t, int64_t, float*);
template void route_rows(const Routing<double>&, int64_t, int64_t, double*);
template void route_rows(const Routing<BFloat16>&, int64_t, int64_t, float*);

template <typename Acc>
const Acc* measured(
    const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms, Scratch<Acc>& copies) {
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
template const float* measured(const float*, int64_t, int64_t, float*, Scratch<float>&);
template const double* measured(const double*, int64_t, int64_t, double*, Scratch<double>&);

}  // namespace rbm::cpu
