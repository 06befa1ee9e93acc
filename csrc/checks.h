// Argument checks of the C++ operators, for callers of torch.ops.rbm.* that bypass the functions of rbm_kernels.
// Messages have the form of rbm_kernels/checks.py: operator, argument, what was passed, what was expected. All errors
// are std::runtime_error, because versions of PyTorch differ in how they translate other exceptions to Python.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>

namespace rbm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAnySize = -1;
// Rows, features and experts are numbered in int32.
constexpr int64_t kMostSize = std::numeric_limits<int32_t>::max();

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
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

  // kAnySize in `expected` matches any size.
  void shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected, const char* why) const {
    const auto sizes = tensor.sizes();
    bool fits = sizes.size() == expected.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) {
      const int64_t size = expected.begin()[i];
      fits = size == kAnySize || size == sizes[i];
    }
    if (!fits) fail(name, " has shape ", shape_text(sizes), ", expected ", shape_text(expected), " (", why, ")");
    bool is_empty = false;
    for (const int64_t size : sizes) {
      if (size > kMostSize) {
        fail(name, " has shape ", shape_text(sizes), ", expected sizes below 2^31: split the batch");
      }
      is_empty = is_empty || size == 0;
    }
    if (!is_empty && tensor.const_data_ptr() == nullptr) {
      fail(
          name, " has shape ", shape_text(sizes), " and no memory behind it, expected one whose storage was not freed");
    }
  }

  // Raises if the two tensors overlap; the first is written to.
  void disjoint(const char* name, const Tensor& written, const char* other_name, const Tensor& other) const {
    const auto begins = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
    const auto ends = [&](const Tensor& t) {
      uintptr_t last = 0;
      for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
      return begins(t) + (last + 1) * t.element_size();
    };
    if (written.numel() == 0 || other.numel() == 0) return;
    if (begins(written) < ends(other) && begins(other) < ends(written)) {
      fail(other_name, " lies in the same memory as ", name, ", which is written to: pass ", other_name, ".clone()");
    }
  }

  // Raises unless every element of a matrix has its own address. Elements i rows apart and j columns apart coincide if
  // i * stride(0) equals j * stride(1), first at the least common multiple of the strides.
  void no_overlap(const char* name, const Tensor& matrix) const {
    const int64_t rows = matrix.size(0), columns = matrix.size(1), row = matrix.stride(0), column = matrix.stride(1);
    const bool repeats = (rows > 1 && row == 0) || (columns > 1 && column == 0);
    const int64_t common = std::gcd(row, column);
    const bool meets = rows > 1 && columns > 1 && common > 0 && column / common < rows && row / common < columns;
    if (matrix.numel() > 0 && (repeats || meets)) {
      fail(
          name, " has several elements at one address (strides ", row, " and ", column, "), and is written to: pass ",
          name, ".clone()");
    }
  }

  // The dispatcher chooses by the first accelerator it finds, so a tensor on another device would get this far.
  void same_device(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) const {
    if (!(tensor.device() == other.device())) {
      fail(name, " is on another device than ", other_name, ", expected all arguments on one device");
    }
  }

 private:
  const char* op_;
};

// Rows whose features are not adjacent are copied; any row stride is supported directly.
inline bool features_are_adjacent(const Tensor& rows) { return rows.size(1) <= 1 || rows.stride(1) == 1; }

inline void check_out_features(const Checks& check, int64_t out_features) {
  if (out_features < 0 || out_features > kMostSize) {
    check.fail("out_features is ", out_features, ", expected between 0 and ", kMostSize);
  }
}

inline void check_num_experts(const Checks& check, int64_t num_experts) {
  if (num_experts < 1 || num_experts > kMostSize) {
    check.fail(
        "num_experts is ", num_experts, ", expected between 1 and ", kMostSize, ": experts are numbered in int32");
  }
}

}  // namespace rbm
