// Shared by mma and wgmma: elements of tensor cores, and the arithmetic.
//
// Products are exact and are summed in float64, then rounded once to float32. Tensor cores add the products of an
// instruction to the accumulator with truncated alignment. Relative to the largest term, the error of a result is at
// most about 2^-23 per term on the GPU (see docs/ptx_executor.md), and 2^-24 here.
#pragma once

#include <string>
#include <vector>

#include "decoding.h"
#include "machine.h"

namespace ptx {

enum Element : int64_t { kBf16, kF16, kTf32 };

inline Element element_of(Form& form, const std::string& type) {
  if (type == "bf16") return kBf16;
  if (type == "f16") return kF16;
  if (type == "tf32") return kTf32;
  form.refuse("its elements are not known");
}

inline int bytes_of(Element element) { return element == kTf32 ? 4 : 2; }

inline double element_at(const uint8_t* bytes, Element element) {
  uint32_t bits = 0;
  std::memcpy(&bits, bytes, bytes_of(element));
  return element == kBf16  ? from_bf16(static_cast<uint16_t>(bits))
         : element == kF16 ? from_f16(static_cast<uint16_t>(bits))
                           : from_tf32(bits);
}

// A fragment of 16 rows. Lane t holds bytes 4 (t % 4) to 4 (t % 4) + 3 of row t / 4 (+ 8 in registers 1 and 3), in the
// first or (registers 2 and 3) the second half of an instruction's depth (PTX ISA 9.7.14.5.8, "A fragment").
inline void place_rows(Warp& warp, const Operand& operand, Element element, double (&a)[16][16]) {
  const int packed = 4 / bytes_of(element), depth = 8 * packed;
  for (size_t i = 0; i < operand.slots.size(); ++i) {
    const Register& source = warp.read(operand, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int j = 0; j < packed; ++j) {
        const auto bits = static_cast<uint32_t>(source.lane[lane]);
        const int row = lane / 4 + 8 * static_cast<int>(i % 2),
                  k = static_cast<int>(i / 2) * depth / 2 + lane % 4 * packed + j;
        a[row][k] = element_at(reinterpret_cast<const uint8_t*>(&bits) + j * bytes_of(element), element);
      }
    }
  }
}

// Columns 8 j to 8 j + 7 of the result: registers 4 j and 4 j + 1 hold columns 2 (t % 4) and 2 (t % 4) + 1 of them, in
// row t / 4; the other two registers hold the same columns eight rows below.
inline std::pair<int, int> result_place(int lane, int reg) {
  return {lane / 4 + 8 * (reg % 4 / 2), 8 * (reg / 4) + lane % 4 * 2 + reg % 2};
}

}  // namespace ptx
