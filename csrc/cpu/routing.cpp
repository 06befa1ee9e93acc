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

// Rows and memory vectors with more features than this are multiplied in parts, which stay in the first cache (32 KiB):
// eight memory vectors with four rows at a time, and the sums of all rows.
constexpr int64_t kLongFeatures = 1024;
constexpr int64_t kFeaturesAtOnce = 512;
constexpr int kGroups = 2;

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

// Whether a comparison holds in some lane.
template <int kBytes, typename Mask>
RBM_INLINE bool any(const Mask& is_true) {
#if defined(__x86_64__) && !defined(__clang__)
  // GCC 12 would store the lanes and load them one by one.
  bool found;
  if constexpr (kBytes == 64) {
    asm("vptestmd %1, %1, %%k1\n\tkortestw %%k1, %%k1" : "=@ccnz"(found) : "v"(is_true) : "k1");
    return found;
  } else if constexpr (kBytes == 32) {
    asm("vptest %1, %1" : "=@ccnz"(found) : "x"(is_true));
    return found;
  }
#endif
  uint64_t words[kBytes / 8], all = 0;
  std::memcpy(words, &is_true, sizeof(words));
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

// The k largest keys of each lane and their experts, in descending order. Of equal keys, that of the lower expert is
// first.
template <int kBytes, typename Acc>
struct Largest {
  using L = Lanes<Acc, kBytes>;
  using Mask = typename L::Mask;
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  // [k, lanes] each. They hold integers, in memory for numbers.
  Acc* keys;
  Acc* experts;
  int64_t top_k;

  static RBM_INLINE void load(Mask& mask, const Acc* source) { std::memcpy(&mask, source, sizeof(mask)); }
  static RBM_INLINE void store(Acc* target, const Mask& mask) { std::memcpy(target, &mask, sizeof(mask)); }

  RBM_INLINE void clear() {
    for (int64_t j = 0; j < top_k; ++j) {
      store(keys + j * L::kCount, Mask{} + std::numeric_limits<Int>::min());
      store(experts + j * L::kCount, Mask{});
    }
  }

  // Experts are offered in ascending order. If there are many, most of them are below the largest of all lanes.
  RBM_INLINE void offer(Mask& key, int64_t expert) {
    Mask kept_key;
    load(kept_key, keys + (top_k - 1) * L::kCount);
    if (!any<kBytes>(key > kept_key)) return;
    Mask place = Mask{} + static_cast<Int>(expert), is_placed{}, kept_place;
    for (int64_t j = 0; j < top_k; ++j) {
      load(kept_key, keys + j * L::kCount);
      load(kept_place, experts + j * L::kCount);
      is_placed |= key > kept_key;  // what is displaced goes ahead of equal keys, whose experts are higher
      store(keys + j * L::kCount, is_placed ? key : kept_key);
      store(experts + j * L::kCount, is_placed ? place : kept_place);
      key = is_placed ? kept_key : key;
      place = is_placed ? kept_place : place;
    }
  }
};

// Finds the k largest cosines of the `rows` rows starting at row b, and their softmax. `products` [E, lanes] are the
// rows' inner products with the memory vectors, and `inverse` [lanes] the rows' inverse norms.
template <int kBytes, typename T>
RBM_INLINE void choose(
    const Routing<T>& r, int64_t b, int64_t rows, Accumulation<T>* products, const Accumulation<T>* inverse,
    Largest<kBytes, Accumulation<T>> largest) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  typename L::Vector of_rows;
  L::load(of_rows, inverse);
  largest.clear();
  for (int64_t e = 0; e < r.num_experts; ++e) {
    typename L::Vector cosine;
    typename L::Mask key;
    L::load(cosine, products + e * L::kCount);
    cosine = cosine * of_rows * r.inverse_norms[e];
    if (r.over_all) L::store(products + e * L::kCount, cosine);
    to_order<kBytes, Acc>(cosine, key);
    largest.offer(key, e);
  }
  Acc* const chosen = r.cosines + b * r.top_k;
  Acc* const gates = r.gates + b * r.top_k;
  int32_t* const experts = r.experts + b * r.top_k;
  typename L::Vector first{}, total{};
  for (int64_t j = 0; j < r.top_k; ++j) {
    typename L::Mask key;
    largest.load(key, largest.keys + j * L::kCount);
    typename L::Vector cosine;
    from_order<kBytes, Acc>(key, cosine);
    if (j == 0) first = cosine;
    typename L::Vector gate = (cosine - first) / r.temperature;
    exponential<kBytes, Acc>(gate);
    total += gate;
    alignas(kBytes) Acc cosine_lanes[L::kCount], gate_lanes[L::kCount];
    Int places[L::kCount];
    L::store(cosine_lanes, cosine);
    L::store(gate_lanes, gate);
    std::memcpy(places, largest.experts + j * L::kCount, sizeof(places));
    for (int64_t i = 0; i < rows; ++i) {
      chosen[i * r.top_k + j] = cosine_lanes[i];
      gates[i * r.top_k + j] = gate_lanes[i];
      experts[i * r.top_k + j] = static_cast<int32_t>(places[i]);
    }
  }
  if (r.over_all) {
    total = typename L::Vector{};
    for (int64_t e = 0; e < r.num_experts; ++e) {
      typename L::Vector gate;
      L::load(gate, products + e * L::kCount);
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

// products[(expert + c) * kStride + i] = the sum of the lanes of totals[c * kRows + i]
template <int kBytes, int kRows, int kColumns, int kStride, typename Acc, typename Vector>
RBM_INLINE void store_products(Vector (&totals)[kRows * kColumns], int64_t expert, Acc* products) {
  Acc sums[kRows * kColumns];
  Lanes<Acc, kBytes>::template sum_lanes<kRows * kColumns>(totals, sums);
  for (int c = 0; c < kColumns; ++c) std::copy_n(sums + c * kRows, kRows, products + (expert + c) * kStride);
}

// products[(expert + c) * kStride + i] = <rows[i], memory[expert + c]>, for `count` rows, kTile at a time.
template <int kBytes, int kTile, int kColumns, int kStride, typename T, typename Row>
RBM_INLINE void multiply(
    const Routing<T>& r, const Row* const* rows, int64_t count, int64_t expert, Accumulation<T>* products) {
  using Acc = Accumulation<T>;
  const auto tile = [&]<int kRows>(int64_t i) __attribute__((always_inline)) {
    typename Lanes<Acc, kBytes>::Vector totals[kRows * kColumns] = {};
    const Acc* const memory = r.memory + expert * r.features;
    add_tile<kBytes, kRows, kColumns>(rows + i, memory, r.features, 0, r.features, totals);
    store_products<kBytes, kRows, kColumns, kStride>(totals, expert, products + i);
  };
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) tile.template operator()<kTile>(i);
  for (; i < count; ++i) tile.template operator()<1>(i);
}

// The same for kStride rows and kGroups times as many memory vectors, in parts of the features.
template <int kBytes, int kTile, int kColumns, int kStride, typename T, typename Row>
RBM_INLINE void multiply_long(const Routing<T>& r, const Row* const* rows, int64_t expert, Accumulation<T>* products) {
  using Acc = Accumulation<T>;
  constexpr int kTiles = kStride / kTile;
  const Acc* const memory = r.memory + expert * r.features;
  typename Lanes<Acc, kBytes>::Vector totals[kTiles][kGroups][kTile * kColumns] = {};
  for (int64_t begin = 0; begin < r.features; begin += kFeaturesAtOnce) {
    const int64_t end = std::min(begin + kFeaturesAtOnce, r.features);
    for (int i = 0; i < kTiles; ++i) {
      for (int g = 0; g < kGroups; ++g) {
        const Acc* const columns = memory + g * kColumns * r.features;
        typename Lanes<Acc, kBytes>::Vector own[kTile * kColumns];  // in registers
        std::copy_n(totals[i][g], kTile * kColumns, own);
        add_tile<kBytes, kTile, kColumns>(rows + i * kTile, columns, r.features, begin, end, own);
        std::copy_n(own, kTile * kColumns, totals[i][g]);
      }
    }
  }
  for (int i = 0; i < kTiles; ++i) {
    for (int g = 0; g < kGroups; ++g) {
      store_products<kBytes, kTile, kColumns, kStride>(totals[i][g], expert + g * kColumns, products + i * kTile);
    }
  }
}

// Inner products of `count` rows with all memory vectors, `products` [E, kStride]. All rows use a memory vector before
// the next one is loaded: together, memory vectors may be larger than a core's cache.
template <int kBytes, int kStride, typename T, typename Row>
RBM_INLINE void products_of(const Routing<T>& r, const Row* const* rows, int64_t count, Accumulation<T>* products) {
  constexpr int kColumns = 4;
  // 4 x 4 sums and their operands take 21 of the 32 registers of AVX-512; other processors have 16 registers.
  constexpr int kTile = kStride < 4 ? 1 : kBytes == 64 ? 4 : 2;
  int64_t e = 0;
  if (count == kStride && r.features > kLongFeatures) {
    for (; e + kGroups * kColumns <= r.num_experts; e += kGroups * kColumns) {
      multiply_long<kBytes, kTile, kColumns, kStride>(r, rows, e, products);
    }
  }
  for (; e + kColumns <= r.num_experts; e += kColumns) {
    multiply<kBytes, kTile, kColumns, kStride>(r, rows, count, e, products);
  }
  for (; e < r.num_experts; ++e) multiply<kBytes, kTile, 1, kStride>(r, rows, count, e, products);
}

// squares[i] = the squared length of the row at first + i * stride
template <int kBytes, typename Row, typename Acc>
RBM_INLINE void squares_of(const Row* first, int64_t stride, int64_t count, int64_t features, Acc* squares) {
  constexpr int64_t kRows = 4;
  const Row* rows[kRows];
  int64_t i = 0;
  for (; i + kRows <= count; i += kRows) {
    for (int64_t r = 0; r < kRows; ++r) rows[r] = first + (i + r) * stride;
    square_tile<kBytes, kRows>(rows, features, squares + i);
  }
  for (; i < count; ++i) {
    rows[0] = first + i * stride;
    square_tile<kBytes, 1>(rows, features, squares + i);
  }
}

// Inner products of the rows starting at row b, which may include long ones, and the inverse norms of these rows.
template <int kBytes, int kStride, typename T>
RBM_INLINE void all_products(
    const Routing<T>& r, int64_t b, int64_t count, Accumulation<T>* products, Accumulation<T>* inverse) {
  using Acc = Accumulation<T>;
  const T* rows[kStride];
  for (int64_t i = 0; i < count; ++i) rows[i] = r.h + (b + i) * r.row_stride;
  squares_of<kBytes>(rows[0], r.row_stride, count, r.features, inverse);
  products_of<kBytes, kStride>(r, rows, count, products);
  for (int64_t i = 0; i < count; ++i) {
    if (!square_is_safe(inverse[i])) {
      const auto copy = shrunk(rows[i], r.features);
      const Acc* const row = copy.get();
      square_tile<kBytes, 1>(&row, r.features, inverse + i);
      products_of<kBytes, kStride>(r, &row, 1, products + i);
    }
    inverse[i] = inverse_norm(inverse[i]);
  }
}

// Routes rows [begin, end). `work` has room for routing_scratch.
template <int kBytes, typename T>
RBM_INLINE void route_lanes(const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* work) {
  using Acc = Accumulation<T>;
  using L = Lanes<Acc, kBytes>;
  Acc* const products = work;
  Acc* const inverse = products + r.num_experts * L::kCount;
  Acc* const keys = inverse + L::kCount;
  const Largest<kBytes, Acc> largest{keys, keys + r.top_k * L::kCount, r.top_k};
  for (int64_t b = begin; b < end; b += L::kCount) {
    const int64_t rows = std::min<int64_t>(L::kCount, end - b);
    if (rows < L::kCount) std::fill_n(work, (r.num_experts + 1) * L::kCount, Acc(0));
    all_products<kBytes, L::kCount>(r, b, rows, products, inverse);
    choose<kBytes>(r, b, rows, products, inverse, largest);
  }
}
RBM_DISPATCH(route)

// inverse_norms[e] = 1 / |memory[e]|.
template <int kBytes, typename Acc>
RBM_INLINE void invert_norms_lanes(const Acc* memory, int64_t num_experts, int64_t features, Acc* inverse_norms) {
  squares_of<kBytes>(memory, features, num_experts, features, inverse_norms);
  for (int64_t e = 0; e < num_experts; ++e) inverse_norms[e] = inverse_norm(inverse_norms[e]);
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
