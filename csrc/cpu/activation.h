// The function between the two products of a feed-forward expert.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "bfloat16_pairs.h"
#include "exponential.h"

namespace rbm::cpu {

enum class Activation { kRelu, kGelu, kSilu, kSwiglu };

// By its name in ACTIVATIONS of rbm_kernels/ops/packed_feed_forward/reference.py.
inline std::optional<Activation> activation_named(const std::string& name) {
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "swiglu") return Activation::kSwiglu;
  return std::nullopt;
}

// Outputs of the first product that make one hidden feature.
constexpr int64_t numbers_of(Activation activation) { return activation == Activation::kSwiglu ? 2 : 1; }

// numbers *= 1 / (1 + exp(-numbers)). The exponential of a number up to zero does not overflow.
template <int kBytes, typename Acc>
RBM_INLINE void silu(typename Lanes<Acc, kBytes>::Vector& numbers) {
  typename Lanes<Acc, kBytes>::Vector e = numbers < 0 ? numbers : -numbers;
  exponential<kBytes, Acc>(e);
  const typename Lanes<Acc, kBytes>::Vector part = numbers / (1 + e);
  numbers = numbers < 0 ? part * e : part;
}

#if defined(__x86_64__)

// The same for results that are rounded to bfloat16, with AVX-512: the polynomial is shorter (error 2e-6), and scaling
// by powers of two overflows to infinity, so that negative numbers need no form of their own.
RBM_INLINE void silu_of_bfloat16(Lanes<float, 64>::Vector& numbers) {
  using Vector = Lanes<float, 64>::Vector;
  const Vector least = Vector{} - 126.0f, most = Vector{} + 87.0f;
  Vector inside;
  asm("vmaxps %2, %1, %0" : "=v"(inside) : "v"(least), "v"(numbers));  // NaN if the last operand is
  asm("vminps %2, %1, %0" : "=v"(inside) : "v"(most), "v"(inside));
  const Vector rounded = inside * -1.44269504f + kRound, n = rounded - kRound;
  const Vector rest = -inside - n * kLog2High - n * kLog2Low;
  Vector series = rest * (1.0f / 120) + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  Vector e;
  asm("vscalefps %2, %1, %0" : "=v"(e) : "v"(series), "v"(n));
  numbers /= 1 + e;
}

#endif

// numbers *= the normal distribution function of numbers.
template <int kBytes, typename Acc>
RBM_INLINE void gelu(typename Lanes<Acc, kBytes>::Vector& numbers) {
  using L = Lanes<Acc, kBytes>;
  if constexpr (sizeof(Acc) == 8) {
    L::each(numbers, [](Acc number) { return number * (0.5 * std::erfc(-number * M_SQRT1_2)); });
  } else {
    // Abramowitz and Stegun, formula 7.1.26: the error of erfc is at most 1.5e-7.
    typename L::Vector size = (numbers < 0 ? -numbers : numbers) * 0.70710678f, e = -size * size;
    exponential<kBytes, Acc>(e);
    const typename L::Vector t = 1 / (1 + 0.3275911f * size);
    typename L::Vector series = t * 1.061405429f - 1.453152027f;
    series = series * t + 1.421413741f;
    series = series * t - 0.284496736f;
    series = series * t + 0.254829592f;
    const typename L::Vector tail = 0.5f * series * t * e;
    numbers *= numbers < 0 ? tail : 1 - tail;
  }
}

// numbers = their activation, which multiplies with `factors` if it is gated.
template <int kBytes, typename Acc>
RBM_INLINE void activate_vector(
    Activation activation, const typename Lanes<Acc, kBytes>::Vector& factors,
    typename Lanes<Acc, kBytes>::Vector& numbers) {
  using Vector = typename Lanes<Acc, kBytes>::Vector;
  switch (activation) {
    case Activation::kRelu: numbers = numbers < 0 ? Vector{} : numbers; break;  // keeps NaN
    case Activation::kGelu: gelu<kBytes, Acc>(numbers); break;
    case Activation::kSilu: silu<kBytes, Acc>(numbers); break;
    case Activation::kSwiglu:
      silu<kBytes, Acc>(numbers);
      numbers *= factors;
      break;
  }
}

// target[i] = the activation of source[i], and of values[i] if it is gated. Whole vectors are read.
template <int kBytes, typename Acc, typename Row>
RBM_INLINE void activate_lanes(
    Activation activation, const Acc* source, const Acc* values, int64_t features, Row* target) {
  using L = Lanes<Acc, kBytes>;
  for (int64_t i = 0; i < features; i += L::kCount) {
    typename L::Vector numbers, factors{};
    L::load(numbers, source + i);
    if (activation == Activation::kSwiglu) L::load(factors, values + i);
    activate_vector<kBytes, Acc>(activation, factors, numbers);
    Row rounded[L::kCount];
    if constexpr (std::is_same_v<Row, BFloat16>) {
      store_rounded<kBytes>(rounded, numbers);
    } else {
      L::store(rounded, numbers);
    }
    // A copy of a known size is a single store.
    if (i + L::kCount <= features) {
      std::memcpy(target + i, rounded, sizeof(rounded));
    } else {
      std::memcpy(target + i, rounded, (features - i) * sizeof(Row));
    }
  }
}
RBM_DISPATCH(activate)

}  // namespace rbm::cpu
