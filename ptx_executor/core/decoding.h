// Maps the name of an instruction to the function that executes it.
//
// `Define name("add", decode)` registers an instruction; it is next to the semantics, in instructions/. The decoder
// takes the modifiers that it supports from the form; any remaining modifier is rejected by name.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "program.h"

namespace ptx {

// The textual form of an instruction: "ld.global.v4.b32" and its operands.
class Form {
 public:
  Form(std::string name, Instruction& instruction, const Program& program);

  const std::string& base() const { return parts_.front(); }
  // Whether the modifier is present; it then counts as handled.
  bool take(std::string_view modifier);
  // The first of these modifiers that is present, or "".
  std::string take_any(std::initializer_list<std::string_view> modifiers);
  // The last modifier that was not taken: the type.
  std::string take_type();
  // Modifiers that do not affect what is computed here.
  void ignore(std::initializer_list<std::string_view> modifiers);
  void expect_operands(size_t count) const;
  // The value of an operand, which must be a constant.
  int64_t constant(size_t operand) const;
  // Raises std::invalid_argument: this form is not supported.
  [[noreturn]] void refuse(const std::string& why) const;
  void refuse_rest() const;

  Instruction& instruction;

 private:
  std::string name_;
  std::vector<std::string> parts_;
  std::vector<bool> taken_;
  const Program& program_;
};

using Decode = Execute (*)(Form&);

struct Define {
  Define(const char* name, Class kind, Decode decode);
};

// Sets `instruction.execute` and the fields set by its decoder. Raises std::invalid_argument.
void decode(const std::string& name, Instruction& instruction, const Program& program);

// All known instructions, sorted.
std::vector<std::string> known_instructions();

// Calls make.template operator()<T>() with the C++ type of a PTX type if it is among Ts; rejects other types.
template <typename... Ts>
struct Types {};

template <typename T>
constexpr bool names(std::string_view type) {
  if constexpr (std::is_same_v<T, bool>) return type == "pred";
  if constexpr (std::is_same_v<T, float>) return type == "f32";
  if constexpr (std::is_same_v<T, double>) return type == "f64";
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    const std::string_view bits = sizeof(T) == 1 ? "8" : sizeof(T) == 2 ? "16" : sizeof(T) == 4 ? "32" : "64";
    if (type.substr(1) != bits) return false;
    return std::is_signed_v<T> ? type[0] == 's' : type[0] == 'u' || type[0] == 'b';
  }
  return false;
}

template <typename... Ts, typename Make>
Execute by_type(Types<Ts...>, const Form& form, const std::string& type, Make make) {
  Execute execute = nullptr;
  (void)((names<Ts>(type) && (execute = make.template operator()<Ts>(), true)) || ...);
  if (execute == nullptr) form.refuse("its type is not known");
  return execute;
}

using Integers = Types<int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>;
using Floats = Types<float, double>;
using Numbers = Types<int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, float, double>;
using Bits = Types<bool, uint16_t, uint32_t, uint64_t>;
using Anything = Types<bool, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, float, double>;

}  // namespace ptx
