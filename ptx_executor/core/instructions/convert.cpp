// PTX ISA 9.7.9 (mov, cvt, cvta). Conversions to a narrower float round to nearest, ties to even; to tf32, away from
// zero.
#include "../semantics.h"

namespace ptx {
namespace {

template <typename To>
Execute from_integer_or_float(Form& form, const std::string& from) {
  return by_type(Numbers{}, form, from, [&]<typename From>() -> Execute {
    if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>)
      form.refuse("only numbers that are no floats become integers");
    return lanewise<To, From>(form, [](From a) { return static_cast<To>(a); });
  });
}

template <uint16_t narrowed(float)>
Execute narrow(Form& form) {
  return lanewise<uint16_t, float>(form, [](float a) { return narrowed(a); });
}

// d = {a in the upper half, b in the lower}
template <uint16_t narrowed(float)>
Execute narrow_two(Form& form) {
  return lanewise<uint32_t, float, float>(
      form, [](float a, float b) { return static_cast<uint32_t>(narrowed(a)) << 16 | narrowed(b); });
}

const Define cvt("cvt", Class::kConvert, [](Form& form) {
  const bool saturate = form.take("sat"), away = form.take("rna");
  form.ignore({"rn"});
  const std::string from = form.take_type(), to = form.take_type();
  if (saturate) {
    if (from != "f32" || to != "f32") form.refuse("only cvt.sat.f32.f32 is known");
    return lanewise<float, float>(form, [](float a) { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; });  // NaN gives 0
  }
  if (away != (to == "tf32")) form.refuse(".rna and .tf32 are only known together");
  if (from == "f32" && to == "tf32") return lanewise<uint32_t, float>(form, [](float a) { return to_tf32(a); });
  if (from == "f32" && to == "bf16") return narrow<to_bf16>(form);
  if (from == "f32" && to == "f16") return narrow<to_f16>(form);
  if (from == "f32" && to == "bf16x2") return narrow_two<to_bf16>(form);
  if (from == "f32" && to == "f16x2") return narrow_two<to_f16>(form);
  if (from == "bf16" && to == "f32") return lanewise<float, uint16_t>(form, [](uint16_t a) { return from_bf16(a); });
  if (from == "f16" && to == "f32") return lanewise<float, uint16_t>(form, [](uint16_t a) { return from_f16(a); });
  return by_type(Numbers{}, form, to, [&]<typename To>() -> Execute { return from_integer_or_float<To>(form, from); });
});

// Addresses in global memory equal generic addresses here.
const Define cvta("cvta", Class::kMove, [](Form& form) {
  if (!form.take("to") || !form.take("global")) form.refuse("only cvta.to.global is known");
  return of_one_type<1>(Types<uint64_t>{}, form, [](uint64_t a) { return a; });
});

// mov d, {a, b, ...}: the first element becomes the lowest bits.
void pack(Warp& warp, const Instruction& instruction) {
  const size_t count = instruction.operands[1].slots.size();
  const int64_t width = instruction.form[0] / static_cast<int64_t>(count);
  std::array<uint64_t, kLanes> packed{};
  uint32_t known = kAllLanes;
  std::array<uint32_t, 2> halves{};
  for (size_t i = 0; i < count; ++i) {
    const Register& source = warp.operand(instruction.operands[1], i);
    known &= source.written;
    if (width == 32) halves[i] = source.written;
    for (int lane = 0; lane < kLanes; ++lane)
      packed[lane] |= (source.lane[lane] & ((uint64_t{1} << width) - 1)) << i * width;
  }
  Register& target = warp.write(instruction.operands[0], 0, known, halves);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.is_active(lane)) target.lane[lane] = packed[lane];
  }
}

void unpack(Warp& warp, const Instruction& instruction) {
  const size_t count = instruction.operands[0].slots.size();
  const int64_t width = instruction.form[0] / static_cast<int64_t>(count);
  const Register& source = warp.operand(instruction.operands[1]);
  const auto bits = source.lane;
  const uint32_t known = source.written;
  const auto halves = source.half_written;
  for (size_t i = 0; i < count; ++i) {
    Register& target = warp.write(instruction.operands[0], i, width == 32 ? known | halves[i] : known);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (warp.is_active(lane)) target.lane[lane] = bits[lane] >> i * width & ((uint64_t{1} << width) - 1);
    }
  }
}

const Define mov("mov", Class::kMove, [](Form& form) {
  form.expect_operands(2);
  const std::string type = form.take_type();
  const size_t targets = form.instruction.operands[0].slots.size(), sources = form.instruction.operands[1].slots.size();
  if (targets == 1 && sources == 1) {
    return by_type(Anything{}, form, type, [&]<typename T>() -> Execute {
      return lanewise<Unchanged<T>, Unchanged<T>>(form, [](Unchanged<T> a) { return a; });
    });
  }
  if (type != "b32" && type != "b64") form.refuse("vectors are moved as .b32 or .b64");
  form.instruction.form[0] = type == "b32" ? 32 : 64;
  return sources > 1 ? pack : unpack;
});

}  // namespace
}  // namespace ptx
