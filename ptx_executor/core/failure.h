// The exception that watchers throw. The scheduler adds the location: block, warp, instruction.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ptx {

struct Failure : std::runtime_error {
  // `kind` is one of the names in ptx_executor/__init__.py; `lane` and `address` are -1 and 0 if there is none.
  Failure(std::string kind, const std::string& what, int lane = -1, uint64_t address = 0)
      : std::runtime_error(what), kind(std::move(kind)), lane(lane), address(address) {}

  std::string kind;
  int lane;
  uint64_t address;
};

inline std::string hexadecimal(uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace ptx
