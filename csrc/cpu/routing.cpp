// Routing for all operators. Compiled once, for rows of each type: these are the slowest templates to compile.
#include "routing.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "exponential.h"
#include "routing_products.h"

namespace rbm::cpu {
namespace {

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

// Routes rows [begin, end). `work` has room for routing_scratch.
template <int kBytes, typename T>
RBM_INLINE void route_lanes(const Routing<T>& r, int64_t begin, int64_t end, Accumulation<T>* work) {
  using Acc = Accumulation<T>;
  using Panel = RowPanel<kBytes, Acc>;
  constexpr int64_t kLanes = Lanes<Acc, kBytes>::kCount;
  const int64_t panels = panels_for(r, end - begin), vectors = vectors_at_once(panels);
  const int64_t stride = r.num_experts * kLanes;
  Acc* const products = work;  // [vectors of rows, E, lanes]
  Acc* const inverse = products + vectors * stride;
  Acc* const keys = inverse + vectors * kLanes;
  Acc* const numbers = keys + 2 * r.top_k * kLanes;
  const Largest<kBytes, Acc> largest{keys, keys + r.top_k * kLanes, r.top_k};
  for (int64_t b = begin; b < end;) {
    const int64_t filled = std::min(panels, (end - b) / Panel::kRows);
    const int64_t count = filled > 0 ? filled * Panel::kRows : std::min(kLanes, end - b);
    const T* const rows = r.h + b * r.row_stride;
    if (filled > 0) {
      products_of_panels<kBytes>(r, b, filled, numbers, products);
    } else {
      const T* each[kLanes];
      for (int64_t i = 0; i < count; ++i) each[i] = rows + i * r.row_stride;
      if (count < kLanes) std::fill_n(products, stride, Acc(0));
      products_of<kBytes, kLanes>(r, each, count, products);
    }
    squares_of<kBytes>(rows, r.row_stride, count, r.features, inverse);
    if (count < kLanes) std::fill(inverse + count, inverse + kLanes, Acc(0));
    for (int64_t v = 0; v * kLanes < count; ++v) {
      const int64_t first = b + v * kLanes, own = std::min(kLanes, count - v * kLanes);
      invert_squares<kBytes, kLanes>(r, first, own, products + v * stride, inverse + v * kLanes);
      choose<kBytes>(r, first, own, products + v * stride, inverse + v * kLanes, largest);
    }
    b += count;
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
int64_t routing_scratch(const Routing<T>& r, int64_t rows) {
  const int64_t panels = panels_for(r, rows), vectors = vectors_at_once(panels);
  const int64_t of_panels = panels * kRowVectors * round_up(r.features, kMostLanes);
  return (vectors * (r.num_experts + 1) + 2 * r.top_k + of_panels) * kMostLanes;
}
template int64_t routing_scratch(const Routing<float>&, int64_t);
template int64_t routing_scratch(const Routing<double>&, int64_t);
template int64_t routing_scratch(const Routing<BFloat16>&, int64_t);

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
