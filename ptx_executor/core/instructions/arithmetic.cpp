// PTX ISA 9.7.1 (integer), 9.7.3 to 9.7.5 (floating point): arithmetic, and the functions of the special unit.
//
// `.rn` matches C++. `.approx` and `.full` results are computed in float64 and rounded once; hardware may have an error
// of 2 ulp in ex2, rsqrt and div.full (PTX ISA 9.7.3.8, 9.7.3.18, 9.7.3.21), so results may differ from a GPU's by that
// much.
#include <cfenv>
#include <cstdlib>

#include "../semantics.h"

namespace ptx {
namespace {

using Wide = Types<int16_t, uint16_t, int32_t, uint32_t>;
using Words = Types<int32_t, uint32_t>;

template <typename T>
using Twice =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

void set_unit(Form& form, const std::string& type) {
  if (type[0] == 'f') form.instruction.kind = type == "f64" ? Class::kDouble : Class::kFloat;
}

// d = f(a, b) for any type of number; floats are rounded to nearest, with denormals.
template <int count, typename Set, typename F>
Execute numeric(Set set, Form& form, F f) {
  form.ignore({"rn"});
  const std::string type = form.take_type();
  set_unit(form, type);
  return by_type(set, form, type, [&]<typename T>() -> Execute {
    if constexpr (count == 1) return lanewise<T, T>(form, f);
    if constexpr (count == 2) return lanewise<T, T, T>(form, f);
    if constexpr (count == 3) return lanewise<T, T, T, T>(form, f);
  });
}

template <typename T>
T high_half(T a, T b) {
  return static_cast<T>(static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b) >> 8 * sizeof(T));
}

// Two independent 16-bit integers in a register.
template <typename F>
Execute halves(Form& form, F) {
  return lanewise<uint32_t, uint32_t, uint32_t>(form, [](uint32_t a, uint32_t b) {
    const auto low = static_cast<uint16_t>(F{}(static_cast<uint16_t>(a), static_cast<uint16_t>(b)));
    const auto high = static_cast<uint16_t>(F{}(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16)));
    return static_cast<uint32_t>(high) << 16 | low;
  });
}

// The two numbers of a pair independently: sm_100 and later.
template <typename... Pairs, typename F>
Execute by_pairs(Form& form, F) {
  form.ignore({"rn"});
  form.instruction.kind = Class::kFloat;
  return lanewise<FloatPair, Pairs...>(
      form, [](Pairs... pairs) { return FloatPair{F{}(pairs.low...), F{}(pairs.high...)}; });
}

// d = f(a, b) in float32, where a is in half precision (9.7.5): sm_100 and later.
template <float widened(uint16_t), typename F>
Execute from_half(Form& form, F) {
  form.ignore({"rn"});
  if (form.take_type() != "f32") form.refuse("a half is added to .f32 alone");
  form.instruction.kind = Class::kFloat;
  return lanewise<float, uint16_t, float>(form, [](uint16_t a, float b) { return F{}(widened(a), b); });
}

template <typename F>
Execute sum(Form& form, F f) {
  if (form.take("f32x2")) return by_pairs<FloatPair, FloatPair>(form, f);
  if (form.take("bf16")) return from_half<from_bf16>(form, f);
  if (form.take("f16")) return from_half<from_f16>(form, f);
  return numeric<2>(Numbers{}, form, f);
}

const Define add("add", Class::kInteger, [](Form& form) {
  if (!form.take_any({"s16x2", "u16x2"}).empty()) return halves(form, [](auto a, auto b) { return a + b; });
  return sum(form, [](auto a, auto b) { return a + b; });
});

const Define sub("sub", Class::kInteger,
                 [](Form& form) { return sum(form, [](auto a, auto b) { return a - b; }); });

const Define mul("mul", Class::kInteger, [](Form& form) {
  if (form.take("wide")) {
    return by_type(Wide{}, form, form.take_type(), [&]<typename T>() -> Execute {
      return lanewise<Twice<T>, T, T>(form,
                                      [](T a, T b) { return static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b); });
    });
  }
  if (form.take("hi")) return of_one_type<2>(Integers{}, form, [](auto a, auto b) { return high_half(a, b); });
  form.ignore({"lo"});
  const auto product = [](auto a, auto b) { return a * b; };
  if (form.take("f32x2")) return by_pairs<FloatPair, FloatPair>(form, product);
  return numeric<2>(Numbers{}, form, product);
});

const Define mad("mad", Class::kInteger, [](Form& form) {
  if (form.take("wide")) {
    return by_type(Wide{}, form, form.take_type(), [&]<typename T>() -> Execute {
      return lanewise<Twice<T>, T, T, Twice<T>>(
          form, [](T a, T b, Twice<T> c) { return static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b) + c; });
    });
  }
  if (!form.take("lo")) form.refuse("only .lo and .wide are known");
  return of_one_type<3>(Integers{}, form, [](auto a, auto b, auto c) { return a * b + c; });
});

float fma_down(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float x = a, y = b, z = c;  // otherwise the compiler would compute it before the rounding mode is set
  volatile float result = std::fma(x, y, z);
  std::fesetround(before);
  return result;
}

// Products of two numbers in half precision, added in float32 and rounded once (9.7.5): sm_100 and later.
template <float widened(uint16_t)>
Execute fused_halves(Form& form) {
  if (form.take_type() != "f32") form.refuse("products of halves are added to .f32 alone");
  return lanewise<float, uint16_t, uint16_t, float>(
      form, [](uint16_t a, uint16_t b, float c) { return std::fma(widened(a), widened(b), c); });
}

const Define fma_("fma", Class::kFloat, [](Form& form) {
  if (form.take("rm")) {
    if (form.take_type() != "f32") form.refuse("only fma.rm.f32 is known");
    return lanewise<float, float, float, float>(form, [](float a, float b, float c) { return fma_down(a, b, c); });
  }
  if (!form.take("rn")) form.refuse("only .rn and .rm are known");
  const auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
  if (form.take("f32x2")) return by_pairs<FloatPair, FloatPair, FloatPair>(form, fused);
  if (form.take("bf16")) return fused_halves<from_bf16>(form);
  if (form.take("f16")) return fused_halves<from_f16>(form);
  return numeric<3>(Floats{}, form, fused);
});

// Division by zero gives all ones: PTX leaves it open, and GPUs do so. The smallest number divided by -1 is itself.
const Define div_("div", Class::kInteger, [](Form& form) {
  if (form.take("full")) {
    form.instruction.kind = Class::kSpecial;
    if (form.take_type() != "f32") form.refuse("only div.full.f32 is known");
    return lanewise<float, float, float>(
        form, [](float a, float b) { return static_cast<float>(static_cast<double>(a) / b); });
  }
  return numeric<2>(Numbers{}, form, [](auto a, auto b) {
    using T = decltype(a);
    if constexpr (std::is_floating_point_v<T>) return a / b;
    else
      return b == 0                                           ? static_cast<T>(-1)
             : std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(T{0} - a)
                                                              : static_cast<T>(a / b);
  });
});

const Define rem("rem", Class::kInteger, [](Form& form) {
  return of_one_type<2>(Integers{}, form, [](auto a, auto b) {
    using T = decltype(a);
    return b == 0 ? a : std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
  });
});

// If one operand is NaN, the result is the other; +0 is larger than -0.
template <bool larger, typename T>
T chosen(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) == larger ? b : a;
  }
  return (a < b) == larger ? b : a;
}

// For float32 also with three operands, on sm_100 and later. With .NaN, the result is NaN if one operand is.
template <bool larger>
Execute choose(Form& form) {
  if (form.take("NaN")) {
    return numeric<2>(Types<float>{}, form, [](float a, float b) {
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<float>::quiet_NaN() : chosen<larger>(a, b);
    });
  }
  if (form.instruction.operands.size() < 4)
    return numeric<2>(Numbers{}, form, [](auto a, auto b) { return chosen<larger>(a, b); });
  form.instruction.kind = Class::kFloat;
  if (form.take_type() != "f32") form.refuse("only .f32 has three operands");
  return lanewise<float, float, float, float>(
      form, [](float a, float b, float c) { return chosen<larger>(chosen<larger>(a, b), c); });
}

const Define max_("max", Class::kInteger, [](Form& form) {
  if (form.take("relu")) {
    if (form.take_type() != "s32") form.refuse("only max.relu.s32 is known");
    return lanewise<int32_t, int32_t, int32_t>(
        form, [](int32_t a, int32_t b) { return chosen<true>(chosen<true>(a, b), 0); });
  }
  return choose<true>(form);
});

const Define min_("min", Class::kInteger, choose<false>);

const Define neg("neg", Class::kInteger, [](Form& form) {
  return numeric<1>(Types<int16_t, int32_t, int64_t, float, double>{}, form, [](auto a) { return -a; });
});

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

const Define abs_("abs", Class::kInteger, [](Form& form) {
  if (form.take("ftz")) return numeric<1>(Types<float>{}, form, [](float a) { return std::abs(flushed(a)); });
  return numeric<1>(Types<int16_t, int32_t, int64_t, float, double>{}, form, [](auto a) { return std::abs(a); });
});

// f(a) in float64, rounded once to float32; `.ftz` flushes denormal inputs and outputs to 0.
template <typename F>
Execute special(Form& form, F) {
  if (!form.take("approx")) form.refuse("only .approx is known");
  const bool flush = form.take("ftz");
  if (form.take_type() != "f32") form.refuse("only .f32 is known");
  if (flush)
    return lanewise<float, float>(
        form, [](float a) { return flushed(static_cast<float>(F{}(static_cast<double>(flushed(a))))); });
  return lanewise<float, float>(form, [](float a) { return static_cast<float>(F{}(static_cast<double>(a))); });
}

const Define ex2("ex2", Class::kSpecial,
                 [](Form& form) { return special(form, [](double a) { return std::exp2(a); }); });

const Define rsqrt("rsqrt", Class::kSpecial,
                   [](Form& form) { return special(form, [](double a) { return 1 / std::sqrt(a); }); });

const Define sqrt_("sqrt", Class::kSpecial, [](Form& form) {
  if (!form.take("rn")) form.refuse("only .rn is known");
  return of_one_type<1>(Floats{}, form, [](auto a) { return std::sqrt(a); });
});

const Define rcp("rcp", Class::kSpecial, [](Form& form) {
  if (!form.take("rn")) form.refuse("only .rn is known");
  return of_one_type<1>(Floats{}, form, [](auto a) { return 1 / a; });
});

}  // namespace
}  // namespace ptx
