// Number formats of PTX (PTX ISA 5.2, "Types") as C++ types, and conversions that C++ does not have.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ptx {

// Two float32 numbers in a register of 64 bits, the first in the lower half: `.f32x2` of sm_100 and later.
struct FloatPair {
  float low, high;
};

// A result of type T in a register, which holds 64 bits: signed integers extended by their sign, all else by zeros.
//
// Every NaN of float32 is 0x7fffffff, as on GPUs, where the sign and the payload of an operand do not show: a
// processor's own would make NaNs differ that equal lanes compute. Moves take Unchanged<T> and keep all bits.
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

// The type by which a T is moved.
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

// To nearest, ties to even; every NaN is 0x7fff, as cvt has it.
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

// To nearest, ties to even; every NaN is 0x7fff.
inline uint16_t to_f16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;  // what rounds past the largest number, 65504
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  int exponent = 0;
  const float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  // The carry of a rounded mantissa goes into the exponent: that is the number that it should be.
  return sign |
         static_cast<uint16_t>((exponent + 13) * 1024 + static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))));
}

// What a tensor core reads of a float32 register: the low 13 bits are ignored (PTX ISA 9.7.14.5.1, ".tf32").
inline float from_tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

}  // namespace ptx
