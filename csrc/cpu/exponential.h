// The exponential of a vector of numbers.
#pragma once

#include <cmath>
#include <cstring>

#include "vectors.h"

namespace rbm::cpu {

// Adding and subtracting kRound rounds to an integer. The sum of the other two is log(2).
constexpr float kRound = 12582912.0f, kLog2High = 0.693359375f, kLog2Low = -2.12194440e-4f;

// numbers = exp(numbers), for NaN and numbers up to 0.
template <int kBytes, typename Acc>
RBM_INLINE void exponential(typename Lanes<Acc, kBytes>::Vector& numbers) {
  using L = Lanes<Acc, kBytes>;
  if constexpr (sizeof(Acc) == 8) {
    L::each(numbers, [](Acc number) { return std::exp(number); });
  } else {
    // exp(x) = 2^n exp(x - n log 2). The last argument is at most log(2) / 2 in size, where the Taylor polynomial of
    // degree seven has error 5e-9. Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
    constexpr float kLeast = -87.0f;
    const typename L::Mask vanishes = numbers < kLeast;
    const typename L::Vector above = vanishes ? kLeast + typename L::Vector{} : numbers;  // no exponent overflows
    const typename L::Vector rounded = above * 1.44269504f + kRound, n = rounded - kRound;
    const typename L::Vector rest = above - n * kLog2High - n * kLog2Low;
    typename L::Vector series = rest * (1.0f / 5040) + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    typename L::Mask bits, exponent;
    std::memcpy(&bits, &series, sizeof(bits));
    std::memcpy(&exponent, &rounded, sizeof(exponent));
    const typename L::Mask is_nan = numbers != numbers;
    bits = (bits + ((exponent << 23) & ~is_nan)) & ~vanishes;
    std::memcpy(&numbers, &bits, sizeof(numbers));
  }
}

}  // namespace rbm::cpu
