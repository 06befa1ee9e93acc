// Number formats of PTX (PTX ISA 5.2, "Types") as C++ types, and conversions missing in C++.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ptx {

// Two float32 numbers in a 64-bit register, the first in the lower half: `.f32x2` of sm_100 and later.
struct FloatPair {
  float low, high;
};

// A result of type T in a 64-bit register: signed integers are sign-extended, all other types zero-extended.
//
// Every float32 NaN becomes 0x7fffffff, as on GPUs, which discard the sign and the payload of an operand. With the
// CPU's own NaNs, lanes that compute the same could differ. Moves use Unchanged<T> and keep all bits.
template <typename T>
uint64_t to_bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::isnan(value) ? 0x7fffffffu : std::bit_cast<uint32_t>(value);
  } else if constexpr (std::is_same_v<T, FloatPair>) {
    return to_bits(value.high) << 32 | to_bits(value.low);
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<uint64_t>(value);
  } else {
    return static_cast<uint64_t>(static_cast<int64_t>(value));
  }
}

// The type used to move a T.
template <typename T>
using Unchanged =
    std::conditional_t<std::is_same_v<T, float>, uint32_t, std::conditional_t<std::is_same_v<T, double>, uint64_t, T>>;

template <typename T>
T from_bits(uint64_t bits) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits));
  } else if constexpr (std::is_same_v<T, FloatPair>) {
    return {from_bits<float>(bits), from_bits<float>(bits >> 32)};
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<double>(bits);
  } else if constexpr (std::is_same_v<T, bool>) {
    return bits != 0;
  } else {
    return static_cast<T>(bits);
  }
}

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even; every NaN becomes 0x7fff, as with cvt.
inline uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? std::nanf("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// To nearest, ties to even; every NaN becomes 0x7fff.
inline uint16_t to_f16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;  // rounds past the largest number, 65504
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  int exponent = 0;
  const float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  // If rounding the mantissa carries into the exponent, the result is still correct.
  return sign |
         static_cast<uint16_t>((exponent + 13) * 1024 + static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))));
}

// To nearest, ties away from zero: the low 13 bits of the result are 0. Every NaN becomes 0x7fffffff.
inline uint32_t to_tf32(float value) {
  if (std::isnan(value)) return 0x7fffffff;
  return (std::bit_cast<uint32_t>(value) + 0x1000) & 0xffffe000u;
}

// How a tensor core reads a float32 register: the low 13 bits are ignored (PTX ISA 9.7.14.5.1, ".tf32").
inline float from_tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

}  // namespace ptx
