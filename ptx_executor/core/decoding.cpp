#include "decoding.h"

#include <map>
#include <stdexcept>

namespace ptx {
namespace {

struct Known {
  Class kind;
  Decode decode;
};

std::map<std::string, Known>& registry() {
  static std::map<std::string, Known> known;
  return known;
}

}  // namespace

Form::Form(std::string name, Instruction& instruction, const Program& program)
    : instruction(instruction), name_(std::move(name)), program_(program) {
  size_t start = 0;
  while (true) {
    const size_t dot = name_.find('.', start);
    parts_.push_back(name_.substr(start, dot - start));
    if (dot == std::string::npos) break;
    start = dot + 1;
  }
  taken_.assign(parts_.size(), false);
  taken_[0] = true;
}

bool Form::take(std::string_view modifier) {
  for (size_t i = 1; i < parts_.size(); ++i) {
    if (!taken_[i] && parts_[i] == modifier) return taken_[i] = true;
  }
  return false;
}

std::string Form::take_any(std::initializer_list<std::string_view> modifiers) {
  for (const std::string_view modifier : modifiers) {
    if (take(modifier)) return std::string(modifier);
  }
  return "";
}

std::string Form::take_type() {
  for (size_t i = parts_.size(); i-- > 1;) {
    if (!taken_[i]) {
      taken_[i] = true;
      return parts_[i];
    }
  }
  refuse("it has no type");
}

void Form::ignore(std::initializer_list<std::string_view> modifiers) {
  for (const std::string_view modifier : modifiers) take(modifier);
}

void Form::expect_operands(size_t count) const {
  if (instruction.operands.size() != count) {
    refuse("it has " + std::to_string(instruction.operands.size()) + " operands, and " + std::to_string(count) +
           " were expected");
  }
}

int64_t Form::constant(size_t operand) const {
  if (operand < instruction.operands.size()) {
    const uint32_t slot = instruction.operands[operand].slots.at(0);
    for (const auto& constant : program_.constants) {
      if (constant.slot == slot) return static_cast<int64_t>(constant.value);
    }
  }
  refuse("operand " + std::to_string(operand) + " must be a constant");
}

void Form::refuse(const std::string& why) const {
  throw std::invalid_argument("the form " + name_ + " is not known: " + why);
}

void Form::refuse_rest() const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!taken_[i]) refuse("nothing is known of ." + parts_[i]);
  }
}

Define::Define(const char* name, Class kind, Decode decode) { registry()[name] = {kind, decode}; }

void decode(const std::string& name, Instruction& instruction, const Program& program) {
  Form form(name, instruction, program);
  const auto known = registry().find(form.base());
  if (known == registry().end())
    throw std::invalid_argument("the instruction " + form.base() + " (" + name + ") is not known");
  instruction.kind = known->second.kind;
  instruction.execute = known->second.decode(form);
  form.refuse_rest();
}

std::vector<std::string> known_instructions() {
  std::vector<std::string> names;
  for (const auto& [name, known] : registry()) names.push_back(name);
  return names;
}

}  // namespace ptx
