// Vectors whose squared length could overflow, and vectors too short to have a direction. A vector longer than 1e15
// (1e150 in double) is multiplied by kShrink, a power of two, before it is squared. It stays far longer than kNormEps.
// NaN and infinity count as too long and remain NaN and infinity.
#pragma once

#include <cstdint>

namespace rbm {

// Rows and memory vectors are scaled to n(v) = v / max(|v|, kNormEps): a shorter one is (almost) zero.
constexpr double kNormEps = 1e-12;

template <typename Acc>
constexpr Acc kLongSquare = static_cast<Acc>(sizeof(Acc) == 8 ? 1e300 : 1e30);
template <typename Acc>
constexpr Acc kShrink = static_cast<Acc>(sizeof(Acc) == 8 ? 0x1p-530 : 0x1p-80);

// False for NaN too.
template <typename Acc>
constexpr bool square_is_safe(Acc square) {
  return square < kLongSquare<Acc>;
}

}  // namespace rbm
