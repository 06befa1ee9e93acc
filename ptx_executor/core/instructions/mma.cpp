// PTX ISA 9.7.14.5.14: mma.sync, m16n8k16 of 16-bit floats and m16n8k8 of TF32, with float32 accumulators.
#include "../multiply.h"
#include "../semantics.h"

namespace ptx {
namespace {

void multiply(Warp& warp, const Instruction& instruction) {
  warp.require_all_lanes();
  const auto element = static_cast<Element>(instruction.form[0]);
  const int packed = 4 / bytes_of(element), depth = 8 * packed;
  double a[16][16], b[8][16];
  place_rows(warp, instruction.operands[1], element, a);
  // Lane t holds four bytes of column t / 4, at 4 (t % 4) in the first or second half of the depth.
  for (int i = 0; i < 2; ++i) {
    const Register& source = warp.read(instruction.operands[2], i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto bits = static_cast<uint32_t>(source.lane[lane]);
      for (int j = 0; j < packed; ++j) {
        b[lane / 4][i * depth / 2 + lane % 4 * packed + j] =
            element_at(reinterpret_cast<const uint8_t*>(&bits) + j * bytes_of(element), element);
      }
    }
  }
  std::array<std::array<uint64_t, kLanes>, 4> results;
  for (int i = 0; i < 4; ++i) {
    const Register& start = warp.read(instruction.operands[3], i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto [row, column] = result_place(lane, i);
      double sum = from_bits<float>(start.lane[lane]);
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[column][k];
      results[i][lane] = to_bits(static_cast<float>(sum));
    }
  }
  for (int i = 0; i < 4; ++i) warp.write(instruction.operands[0], i).lane = results[i];
  warp.count().multiply_adds += 16 * 8 * depth;
}

const Define mma("mma", Class::kMatrix, [](Form& form) -> Execute {
  if (!form.take("sync") || !form.take("aligned") || !form.take("row") || !form.take("col"))
    form.refuse("only .sync.aligned.*.row.col is known");
  form.expect_operands(4);
  const std::string shape = form.take_any({"m16n8k16", "m16n8k8"});
  const std::string c = form.take_type(), b = form.take_type(), a = form.take_type(), d = form.take_type();
  const Element element = element_of(form, a);
  if (a != b || c != "f32" || d != "f32") form.refuse("its types are not known");
  if (shape != (element == kTf32 ? "m16n8k8" : "m16n8k16")) form.refuse("its shape is not known");
  const size_t wanted[] = {4, 4, 2, 4};
  for (size_t i = 0; i < 4; ++i) {
    if (form.instruction.operands[i].slots.size() != wanted[i])
      form.refuse("a fragment has another number of registers");
  }
  form.instruction.form[0] = element;
  return multiply;
});

}  // namespace
}  // namespace ptx
