// Argument checks of the C++ operators, for those who call torch.ops.rbm.* past the functions of rbm_kernels. The messages
// have the form of rbm_kernels/checks.py: the operator, the argument, what came, and what was expected. All are
// std::runtime_error, for what else becomes of an exception on its way to Python differs between versions of PyTorch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace rbm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAnySize = -1;

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return torch::headeronly::toString(dtype);
  }
}

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
  std::ostringstream text;
  const char* separator = "[";
  for (const int64_t size : sizes) {
    text << separator;
    separator = ", ";
    if (size == kAnySize) {
      text << "*";
    } else {
      text << size;
    }
  }
  text << (sizes.size() == 0 ? "[]" : "]");
  return text.str();
}

// The checks of one operator.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream message;
    message << "rbm::" << op_ << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }

  void dtype(const char* name, const Tensor& tensor, std::initializer_list<ScalarType> expected) const {
    std::string names;
    for (const ScalarType dtype : expected) {
      if (tensor.scalar_type() == dtype) return;
      names += (names.empty() ? "" : " or ") + dtype_name(dtype);
    }
    fail(name, " has dtype ", dtype_name(tensor.scalar_type()), ", expected ", names);
  }

  // kAnySize in `expected` stands for any size.
  void shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected, const char* why) const {
    const auto sizes = tensor.sizes();
    bool fits = sizes.size() == expected.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) {
      const int64_t size = expected.begin()[i];
      fits = size == kAnySize || size == sizes[i];
    }
    if (!fits) fail(name, " has shape ", shape_text(sizes), ", expected ", shape_text(expected), " (", why, ")");
  }

  // The dispatcher chooses by the first accelerator it meets: nothing before this stops a pointer of another device.
  void same_device(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) const {
    if (!(tensor.device() == other.device())) {
      fail(name, " is on another device than ", other_name, ", expected all arguments on one device");
    }
  }

 private:
  const char* op_;
};

inline void check_num_experts(const Checks& check, int64_t num_experts) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (num_experts < 1 || num_experts > kMost) {
    check.fail("num_experts is ", num_experts, ", expected between 1 and ", kMost, ": experts are numbered in int32");
  }
}

}  // namespace rbm
