// PTX ISA 9.7.6 (comparison and selection).
#include "../semantics.h"

namespace ptx {
namespace {

enum Comparison { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kOrdered, kUnordered };

template <Comparison comparison, typename T>
bool holds(T a, T b) {
  if constexpr (comparison == kEqual) return a == b;
  if constexpr (comparison == kNotEqual) return a < b || a > b;  // false for NaN, unlike !=
  if constexpr (comparison == kLess) return a < b;
  if constexpr (comparison == kLessEqual) return a <= b;
  if constexpr (comparison == kGreater) return a > b;
  if constexpr (comparison == kGreaterEqual) return a >= b;
  if constexpr (comparison == kOrdered) return a == a && b == b;
  if constexpr (comparison == kUnordered) return a != a || b != b;
}

// setp: p = a ? b, and if the form has p|q, q = its negation. `unordered`: true if an operand is NaN.
template <typename T, Comparison comparison, bool unordered>
void set_predicate(Warp& warp, const Instruction& instruction) {
  const Register &a = warp.operand(instruction.operands[1]), &b = warp.operand(instruction.operands[2]);
  const Operand& targets = instruction.operands[0];
  for (size_t i = 0; i < targets.slots.size(); ++i) {
    Register& target = warp.write(targets, i, a.written & b.written);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!warp.is_active(lane)) continue;
      const T left = from_bits<T>(a.lane[lane]), right = from_bits<T>(b.lane[lane]);
      const bool result = holds<comparison>(left, right) || (unordered && (left != left || right != right));
      target.lane[lane] = result != (i == 1);
    }
  }
}

template <Comparison comparison, bool unordered = false>
Execute compare(Form& form) {
  form.expect_operands(3);
  if (form.instruction.operands[0].slots.size() > 2) form.refuse("it sets one predicate or two");
  return by_type(Numbers{}, form, form.take_type(),
                 []<typename T>() -> Execute { return set_predicate<T, comparison, unordered>; });
}

const Define setp("setp", Class::kPredicate, [](Form& form) {
  if (form.take("eq")) return compare<kEqual>(form);
  if (form.take("ne")) return compare<kNotEqual>(form);
  if (form.take("lt")) return compare<kLess>(form);
  if (form.take("le")) return compare<kLessEqual>(form);
  if (form.take("gt")) return compare<kGreater>(form);
  if (form.take("ge")) return compare<kGreaterEqual>(form);
  if (form.take("equ")) return compare<kEqual, true>(form);
  if (form.take("neu")) return compare<kNotEqual, true>(form);
  if (form.take("ltu")) return compare<kLess, true>(form);
  if (form.take("leu")) return compare<kLessEqual, true>(form);
  if (form.take("gtu")) return compare<kGreater, true>(form);
  if (form.take("geu")) return compare<kGreaterEqual, true>(form);
  if (form.take("num")) return compare<kOrdered>(form);
  if (form.take("nan")) return compare<kUnordered>(form);
  form.refuse("its comparison is not known");
});

// d = p ? a : b; the operand that is not selected need not have a value.
template <typename T>
void select(Warp& warp, const Instruction& instruction) {
  const Register &a = warp.operand(instruction.operands[1]), &b = warp.operand(instruction.operands[2]);
  const Register& first = warp.operand(instruction.operands[3]);
  uint32_t known = 0;
  std::array<uint64_t, kLanes> chosen;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Register& source = first.lane[lane] != 0 ? a : b;
    chosen[lane] = to_bits(from_bits<T>(source.lane[lane]));
    known |= source.written & first.written & 1u << lane;
  }
  Register& target = warp.write(instruction.operands[0], 0, known);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.is_active(lane)) target.lane[lane] = chosen[lane];
  }
}

const Define selp("selp", Class::kInteger, [](Form& form) {
  form.expect_operands(4);
  return by_type(Anything{}, form, form.take_type(), []<typename T>() -> Execute { return select<Unchanged<T>>; });
});

}  // namespace
}  // namespace ptx
