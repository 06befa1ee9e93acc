// PTX ISA 9.7.14.5.15 and .16: ldmatrix and stmatrix, matrices of 8 x 8 elements of 16 bits.
//
// Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i. Lane t gets elements 2 (t % 4) and 2 (t % 4) + 1 of
// row t / 4, in one register per matrix; with `.trans`, of column t / 4.
#include "../semantics.h"
#include "../traffic.h"

namespace ptx {
namespace {

constexpr unsigned kRowBytes = 16;

// form[]: matrices, whether they are transposed
void decode_matrices(Form& form, size_t registers) {
  form.expect_operands(2);
  if (!form.take("sync") || !form.take("aligned") || !form.take("m8n8"))
    form.refuse("only .sync.aligned.m8n8 is known");
  const std::string count = form.take_any({"x1", "x2", "x4"});
  form.instruction.form[0] = count.empty() ? 1 : count[1] - '0';
  form.instruction.form[1] = form.take("trans");
  if (form.take_any({"shared::cta", "shared"}).empty()) form.refuse("only shared memory is known");
  if (form.take_type() != "b16") form.refuse("only .b16 is known");
  if (form.instruction.operands[registers].slots.size() != static_cast<size_t>(form.instruction.form[0]))
    form.refuse("it has another number of registers");
}

// Position of a lane's element i of a matrix: row, column.
std::pair<int, int> place(int lane, int i, bool transposed) {
  const int a = lane / 4, b = lane % 4 * 2 + i;
  return transposed ? std::pair{b, a} : std::pair{a, b};
}

void count_rows(Warp& warp, const Addresses& addresses, int matrix) {
  BankPasses passes;
  for (int row = 0; row < 8; ++row) passes.touch(addresses.of[8 * matrix + row], kRowBytes);
  warp.count().wavefronts += passes.finish();
  warp.count().bytes += 8 * kRowBytes;
}

void load_matrices(Warp& warp, const Instruction& instruction) {
  warp.require_all_lanes();
  const auto addresses = Addresses(warp, instruction.operands[1]);
  for (int matrix = 0; matrix < instruction.form[0]; ++matrix) {
    std::array<std::array<uint16_t, 8>, 8> elements;
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      std::memcpy(&elements[row],
                  warp.block.shared.read(static_cast<uint32_t>(addresses.of[lane]), kRowBytes, warp.toucher(lane)),
                  kRowBytes);
    }
    count_rows(warp, addresses, matrix);
    Register& target = warp.write(instruction.operands[0], matrix);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto [row0, column0] = place(lane, 0, instruction.form[1]);
      const auto [row1, column1] = place(lane, 1, instruction.form[1]);
      target.lane[lane] = elements[row0][column0] | static_cast<uint32_t>(elements[row1][column1]) << 16;
    }
  }
}

void store_matrices(Warp& warp, const Instruction& instruction) {
  warp.require_all_lanes();
  const auto addresses = Addresses(warp, instruction.operands[0]);
  for (int matrix = 0; matrix < instruction.form[0]; ++matrix) {
    const Register& source = warp.read(instruction.operands[1], matrix);
    std::array<std::array<uint16_t, 8>, 8> elements;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const auto [row, column] = place(lane, i, instruction.form[1]);
        elements[row][column] = static_cast<uint16_t>(source.lane[lane] >> 16 * i);
      }
    }
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const auto* const bytes = reinterpret_cast<const uint8_t*>(&elements[row]);
      warp.block.shared.write(static_cast<uint32_t>(addresses.of[lane]), bytes, kRowBytes, warp.toucher(lane));
    }
    count_rows(warp, addresses, matrix);
  }
}

const Define ldmatrix("ldmatrix", Class::kShared, [](Form& form) -> Execute {
  decode_matrices(form, 0);
  return load_matrices;
});

const Define stmatrix("stmatrix", Class::kShared, [](Form& form) -> Execute {
  decode_matrices(form, 1);
  return store_matrices;
});

}  // namespace
}  // namespace ptx
