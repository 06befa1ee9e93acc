// PTX ISA 9.7.8 (logic and shifts), 9.7.1 (bit fields, population count), 9.7.9.7 (prmt).
#include <bit>

#include "../semantics.h"

namespace ptx {
namespace {

template <int count, typename F>
Execute logic(Form& form, F f) {
  const std::string type = form.take_type();
  if (type == "pred") form.instruction.kind = Class::kPredicate;
  return by_type(Bits{}, form, type, [&]<typename T>() -> Execute {
    if constexpr (count == 1) return lanewise<T, T>(form, f);
    if constexpr (count == 2) return lanewise<T, T, T>(form, f);
  });
}

const Define and_("and", Class::kInteger,
                  [](Form& form) { return logic<2>(form, [](auto a, auto b) { return a & b; }); });

const Define or_("or", Class::kInteger,
                 [](Form& form) { return logic<2>(form, [](auto a, auto b) { return a | b; }); });

const Define xor_("xor", Class::kInteger,
                  [](Form& form) { return logic<2>(form, [](auto a, auto b) { return a ^ b; }); });

const Define not_("not", Class::kInteger, [](Form& form) {
  return logic<1>(form, [](auto a) {
    if constexpr (std::is_same_v<decltype(a), bool>) return !a;
    else return ~a;
  });
});

// A shift by at least the width of the type leaves only the sign.
template <typename T>
T shifted_right(T a, uint32_t by) {
  constexpr uint32_t width = 8 * sizeof(T);
  if (by >= width) return std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> by);
}

const Define shl("shl", Class::kInteger, [](Form& form) {
  return by_type(Types<uint16_t, uint32_t, uint64_t>{}, form, form.take_type(), [&]<typename T>() -> Execute {
    return lanewise<T, T, uint32_t>(
        form, [](T a, uint32_t by) { return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by); });
  });
});

const Define shr("shr", Class::kInteger, [](Form& form) {
  return by_type(Integers{}, form, form.take_type(), [&]<typename T>() -> Execute {
    return lanewise<T, T, uint32_t>(form, [](T a, uint32_t by) { return shifted_right(a, by); });
  });
});

// `length` bits of a, starting at `start`; a field that extends past the end is filled with the sign.
template <typename T>
T bit_field(T a, uint32_t start, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  start &= 255;
  length &= 255;
  if (length == 0) return 0;
  const T field = shifted_right(a, start);
  if (length >= width) return field;
  const uint32_t drop = width - length;
  if (std::is_signed_v<T> && start + length > width) return field;
  return static_cast<T>(static_cast<T>(field << drop) >> drop);
}

const Define bfe("bfe", Class::kInteger, [](Form& form) {
  return by_type(Types<int32_t, uint32_t, int64_t, uint64_t>{}, form, form.take_type(), [&]<typename T>() -> Execute {
    return lanewise<T, T, uint32_t, uint32_t>(
        form, [](T a, uint32_t start, uint32_t length) { return bit_field(a, start, length); });
  });
});

const Define popc("popc", Class::kInteger, [](Form& form) {
  return by_type(Types<uint32_t, uint64_t>{}, form, form.take_type(), [&]<typename T>() -> Execute {
    return lanewise<uint32_t, T>(form, [](T a) { return std::popcount(a); });
  });
});

// Each nibble of c selects one of the eight bytes of b:a, or, with its highest bit, copies that byte's sign.
uint32_t permuted(uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = c >> 4 * i & 15;
    const auto byte = static_cast<uint8_t>(bytes >> 8 * (selector & 7));
    result |= static_cast<uint32_t>(selector & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return result;
}

const Define prmt("prmt", Class::kInteger, [](Form& form) {
  if (form.take_type() != "b32") form.refuse("only prmt.b32 is known");
  return lanewise<uint32_t, uint32_t, uint32_t, uint32_t>(
      form, [](uint32_t a, uint32_t b, uint32_t c) { return permuted(a, b, c); });
});

}  // namespace
}  // namespace ptx
