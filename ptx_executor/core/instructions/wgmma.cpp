// PTX ISA 9.7.15: wgmma, the asynchronous multiplications of four warps, m64nNk16 (TF32: k8), float32 accumulators.
//
// Each warp computes its 16 rows when it reaches the instruction. Registers and shared memory must not be accessed
// before the wait, so the early result cannot be observed.
#include "../multiply.h"
#include "../semantics.h"

namespace ptx {
namespace {

// form[]: element, columns, whether A and B are stored with adjacent rows instead of adjacent depth
enum Form4 { kElement, kColumns, kTransposedA, kTransposedB };

// A matrix descriptor (PTX ISA 9.7.15.5.1.2): address and layout of an operand in shared memory.
class Tile {
 public:
  Tile(uint64_t bits, bool transposed, Element element) : transposed_(transposed), element_(element) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4; };
    start_ = field(0);
    leading_ = field(16);
    stride_ = field(32);
    constexpr uint32_t widths[] = {16, 128, 64, 32};  // of swizzle modes 0 to 3
    width_ = widths[bits >> 62 & 3];
    // Without swizzling the base offset has no meaning; in Triton 3.9 an unused stride may overflow into it.
    if (width_ != 16 && (bits >> 49 & 7) != 0) throw Failure("descriptor", "a base offset other than 0 is not known");
    if (transposed && element == kTf32) throw Failure("descriptor", "TF32 operands have the depth adjacent");
  }

  // Address of the 16 bytes that contain element (row, k), in canonical layouts made of blocks of 8 rows of `width_`
  // bytes. Swizzling replaces bits 4 to 6 of an address by their exclusive or with bits 7 to 9.
  uint32_t chunk(int row, int k) const {
    const int per_chunk = 16 / bytes_of(element_);
    uint32_t address;
    if (!transposed_) {
      const uint32_t piece = k / per_chunk;
      address = start_ + row % 8 * width_ + row / 8 * stride_ + piece * (width_ == 16 ? leading_ : 16);
    } else if (width_ == 16) {
      address = start_ + row / 8 * stride_ + k % 8 * 16 + k / 8 * leading_;
    } else {
      const uint32_t rows = width_ / 2;  // adjacent ones
      address = start_ + row % rows / 8 * 16 + row / rows * leading_ + k % 8 * width_ + k / 8 * stride_;
    }
    return address ^ (address >> 3 & (width_ - 16));
  }

  // Reads rows first to first + count - 1 of the operand, each with its whole depth.
  void read(Warp& warp, int first, int count, int depth, std::vector<double>& values,
            std::vector<uint32_t>& chunks) const {
    const auto fenced = [&](int writer, uint32_t tick) {
      return warp.block.warps[writer].proxy_fence_tick > tick || warp.proxy_fence_tick > tick;
    };
    const int bytes = bytes_of(element_), per_chunk = 16 / bytes;
    values.resize(static_cast<size_t>(count) * depth);
    for (int row = 0; row < count; row += transposed_ ? per_chunk : 1) {
      for (int k = 0; k < depth; k += transposed_ ? 1 : per_chunk) {
        const uint32_t address = chunk(first + row, k);
        const uint8_t* const data = warp.block.shared.begin_matrix_read(address, warp.toucher(-1), fenced);
        chunks.push_back(address);
        for (int i = 0; i < per_chunk; ++i) {
          const int r = transposed_ ? row + i : row, c = transposed_ ? k : k + i;
          values[static_cast<size_t>(r) * depth + c] = element_at(data + i * bytes, element_);
        }
      }
    }
  }

 private:
  bool transposed_;
  Element element_;
  uint32_t start_, leading_, stride_, width_;
};

uint64_t descriptor(Warp& warp, const Operand& operand) {
  const Register& source = warp.read(operand);
  for (int lane = 1; lane < kLanes; ++lane) {
    if (source.lane[lane] != source.lane[0])
      throw Failure("descriptor", "the lanes of a warp have different descriptors", lane);
  }
  return source.lane[0];
}

// Registers written by ordinary instructions must be fenced before a multiplication uses them.
void require_fence(const Warp& warp, const Register& held, const char* what) {
  if (held.tick > warp.matrix_fence_tick) {
    throw Failure("wgmma fence", std::string(what) + " was written after the last wgmma.fence");
  }
}

void multiply(Warp& warp, const Instruction& instruction) {
  warp.require_all_lanes();
  if (warp.matrix_fence_tick == 0) throw Failure("wgmma fence", "no wgmma.fence stands before the first wgmma");
  const auto element = static_cast<Element>(instruction.form[kElement]);
  const int columns = static_cast<int>(instruction.form[kColumns]), depth = 32 / bytes_of(element);
  const Operand &d = instruction.operands[0], &a = instruction.operands[1], &b = instruction.operands[2];
  const bool accumulates = warp.read(instruction.operands[3]).lane[0] != 0;
  const double sign_a = from_bits<int32_t>(warp.read(instruction.operands[4]).lane[0]),
               sign_b = from_bits<int32_t>(warp.read(instruction.operands[5]).lane[0]);

  Warp::Multiplication pending;
  double rows[16][16];
  if (a.slots.size() == 4) {
    place_rows(warp, a, element, rows);
    for (const uint32_t slot : a.slots) require_fence(warp, warp.registers[slot], "an operand of wgmma");
    pending.inputs = a.slots;
  } else {
    std::vector<double> values;
    Tile(descriptor(warp, a), instruction.form[kTransposedA], element)
        .read(warp, warp.index % 4 * 16, 16, depth, values, pending.chunks);
    for (int row = 0; row < 16; ++row) std::copy_n(&values[row * depth], depth, rows[row]);
  }
  std::vector<double> other;
  Tile(descriptor(warp, b), instruction.form[kTransposedB], element)
      .read(warp, 0, columns, depth, other, pending.chunks);

  for (size_t i = 0; i < d.slots.size(); ++i) {
    Register& target = warp.registers[d.slots[i]];
    if (target.reading != 0) throw Failure("wgmma not waited for", "an accumulator is an operand of a wgmma before it");
    if (target.computing == 0) {
      require_fence(warp, target, "an accumulator of wgmma");
      if (accumulates && target.written != kAllLanes)
        throw Failure("unwritten", "wgmma adds to an accumulator that nobody wrote");
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto [row, column] = result_place(lane, static_cast<int>(i));
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += rows[row][k] * other[static_cast<size_t>(column) * depth + k];
      sum = sign_a * sign_b * sum + (accumulates ? from_bits<float>(target.lane[lane]) : 0.0f);
      target.lane[lane] = to_bits(static_cast<float>(sum));
    }
    target.written = kAllLanes;
    target.tick = 0;
    ++target.computing;
  }
  for (const uint32_t slot : pending.inputs) ++warp.registers[slot].reading;
  pending.accumulators = d.slots;
  warp.multiplications.back().push_back(std::move(pending));
  warp.count().multiply_adds += int64_t{16} * columns * depth;
}

void finish(Warp& warp, const std::vector<Warp::Multiplication>& group) {
  for (const Warp::Multiplication& done : group) {
    for (const uint32_t slot : done.accumulators) --warp.registers[slot].computing;
    for (const uint32_t slot : done.inputs) --warp.registers[slot].reading;
    for (const uint32_t chunk : done.chunks) warp.block.shared.end_matrix_read(chunk);
  }
}

Execute decode_multiply(Form& form) {
  form.instruction.kind = Class::kMatrix;
  if (!form.take("sync") || !form.take("aligned")) form.refuse("only .sync.aligned is known");
  const std::string b = form.take_type(), a = form.take_type(), d = form.take_type(), shape = form.take_type();
  const Element element = element_of(form, a);
  if (a != b || d != "f32") form.refuse("its types are not known");
  const size_t n = shape.find('n'), k = shape.find('k');
  if (!shape.starts_with("m64n") || k == std::string::npos || shape.substr(k) != (element == kTf32 ? "k8" : "k16"))
    form.refuse("its shape is not known");
  const int columns = std::stoi(shape.substr(n + 1, k - n - 1));
  auto& operands = form.instruction.operands;
  const bool from_registers = operands.size() > 1 && operands[1].slots.size() == 4;
  const size_t transposes = element == kTf32 ? 0 : from_registers ? 1 : 2;
  form.expect_operands(6 + transposes);
  if (operands[0].slots.size() != static_cast<size_t>(columns) / 2)
    form.refuse("it has another number of accumulators");
  int64_t* const fields = form.instruction.form;
  fields[kElement] = element;
  fields[kColumns] = columns;
  fields[kTransposedA] = transposes == 2 && form.constant(6) != 0;
  fields[kTransposedB] = transposes > 0 && form.constant(5 + transposes) != 0;
  return multiply;
}

const Define wgmma("wgmma", Class::kBarrier, [](Form& form) -> Execute {
  if (form.take("mma_async")) return decode_multiply(form);
  if (!form.take("sync") | !form.take("aligned")) form.refuse("only .sync.aligned is known");
  if (form.take("fence")) return [](Warp& warp, const Instruction&) { warp.matrix_fence_tick = warp.tick; };
  if (form.take("commit_group")) return [](Warp& warp, const Instruction&) { warp.multiplications.emplace_back(); };
  if (!form.take("wait_group")) form.refuse("its operation is not known");
  form.expect_operands(1);
  form.instruction.form[0] = form.constant(0);
  return [](Warp& warp, const Instruction& instruction) {
    while (static_cast<int64_t>(warp.multiplications.size()) - 1 > instruction.form[0]) {
      finish(warp, warp.multiplications.front());
      warp.multiplications.pop_front();
    }
  };
});

}  // namespace
}  // namespace ptx
