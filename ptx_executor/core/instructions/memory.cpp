// PTX ISA 9.7.9.8 to 9.7.9.12 (ld, st) and 9.7.9.25 (cp.async).
#include "../semantics.h"
#include "../traffic.h"

namespace ptx {
namespace {

enum Space { kParameters, kShared, kGlobal };

// form[]: bytes of an element, elements, whether an element is a signed integer
struct Access {
  explicit Access(const Instruction& instruction)
      : width(static_cast<unsigned>(instruction.form[0])),
        count(static_cast<unsigned>(instruction.form[1])),
        is_signed(instruction.form[2] != 0) {}
  unsigned size() const { return width * count; }
  unsigned width, count;
  bool is_signed;
};

Space decode_access(Form& form, size_t values) {
  form.expect_operands(2);
  const std::string space = form.take_any({"param", "shared::cta", "shared", "global"});
  if (space.empty()) form.refuse("generic addresses are not known");
  // Cache hints, and "read-only for the whole kernel", which the watchers check anyway.
  form.ignore({"nc", "ca", "cg", "cs", "lu", "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::cache_hint"});
  const std::string vector = form.take_any({"v2", "v4"});
  int64_t* const sizes = form.instruction.form;
  sizes[1] = vector.empty() ? 1 : vector[1] - '0';
  const std::string type = form.take_type();
  by_type(Anything{}, form, type, [&]<typename T>() -> Execute {
    if constexpr (std::is_same_v<T, bool>) form.refuse("predicates are not in memory");
    sizes[0] = sizeof(T);
    sizes[2] = std::is_integral_v<T> && std::is_signed_v<T>;
    return pass;
  });
  if (form.instruction.operands[values].slots.size() != static_cast<size_t>(sizes[1]))
    form.refuse("its vector has another length");
  form.instruction.kind = space == "param" ? Class::kParameter : space == "global" ? Class::kGlobal : Class::kShared;
  return space == "param" ? kParameters : space == "global" ? kGlobal : kShared;
}

uint64_t extended(uint64_t bits, const Access& access) {
  if (!access.is_signed) return bits;
  const unsigned drop = 64 - 8 * access.width;
  return static_cast<uint64_t>(static_cast<int64_t>(bits << drop) >> drop);
}

template <Space space>
void load(Warp& warp, const Instruction& instruction) {
  const Access access(instruction);
  Launch& launch = warp.block.launch;
  const auto addresses = Addresses(warp, instruction.operands[1]);
  std::array<const uint8_t*, kLanes> bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    const uint64_t address = addresses.of[lane];
    if constexpr (space == kGlobal) {
      launch.memory.read(address, access.size(), warp.block.number, lane);
      bytes[lane] = reinterpret_cast<const uint8_t*>(address);
    } else if constexpr (space == kShared) {
      bytes[lane] = warp.block.shared.read(static_cast<uint32_t>(address), access.size(), warp.toucher(lane));
    } else {
      if (address + access.size() > launch.parameters.size())
        throw Failure("out of bounds", "load past the end of the parameters", lane, address);
      bytes[lane] = &launch.parameters[address];
    }
  }
  if constexpr (space == kGlobal) count_global(warp, addresses, access.size());
  if constexpr (space == kShared) count_shared(warp, addresses, access.size());
  for (unsigned i = 0; i < access.count; ++i) {
    Register& target = warp.write(instruction.operands[0], i);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!warp.is_active(lane)) continue;
      uint64_t value = 0;
      std::memcpy(&value, bytes[lane] + i * access.width, access.width);
      target.lane[lane] = extended(value, access);
    }
  }
}

// If several lanes store to one address, PTX leaves open which one wins, so their values must be equal.
void require_agreement(const Warp& warp, const Addresses& addresses, int lane, const uint8_t* bytes, unsigned size) {
  const auto* const stored = reinterpret_cast<const void*>(addresses.of[lane]);
  for (int other = 0; other < lane; ++other) {
    if (warp.is_active(other) && addresses.of[other] == addresses.of[lane] && std::memcmp(stored, bytes, size) != 0)
      throw Failure("race between lanes",
                    "store where lane " + std::to_string(other) + " stores another value at the same time", lane,
                    addresses.of[lane]);
  }
}

template <Space space>
void store(Warp& warp, const Instruction& instruction) {
  const Access access(instruction);
  const auto addresses = Addresses(warp, instruction.operands[0]);
  std::array<const Register*, 4> sources;
  for (unsigned i = 0; i < access.count; ++i) sources[i] = &warp.read(instruction.operands[1], i);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    const uint64_t address = addresses.of[lane];
    std::array<uint8_t, 32> bytes;
    for (unsigned i = 0; i < access.count; ++i)
      std::memcpy(&bytes[i * access.width], &sources[i]->lane[lane], access.width);
    if constexpr (space == kGlobal) {
      require_agreement(warp, addresses, lane, bytes.data(), access.size());
      warp.block.launch.memory.write(address, access.size(), warp.block.number, lane);
      std::memcpy(reinterpret_cast<void*>(address), bytes.data(), access.size());
    } else {
      warp.block.shared.write(static_cast<uint32_t>(address), bytes.data(), access.size(), warp.toucher(lane));
    }
  }
  if constexpr (space == kGlobal) count_global(warp, addresses, access.size());
  if constexpr (space == kShared) count_shared(warp, addresses, access.size());
}

const Define ld("ld", Class::kGlobal, [](Form& form) -> Execute {
  switch (decode_access(form, 0)) {
    case kParameters:
      return load<kParameters>;
    case kShared:
      return load<kShared>;
    default:
      return load<kGlobal>;
  }
});

const Define st("st", Class::kGlobal, [](Form& form) -> Execute {
  switch (decode_access(form, 1)) {
    case kShared:
      return store<kShared>;
    case kGlobal:
      return store<kGlobal>;
    default:
      form.refuse("parameters cannot be written");
  }
});

// cp.async [to], [from], size {, bytes to read}: bytes that are not read are filled with zeros. The bytes are read when
// the copy is issued and land when it is waited for. A conflicting access to source or destination in between is a
// failure.
void copy(Warp& warp, const Instruction& instruction) {
  const auto size = static_cast<unsigned>(instruction.form[0]);
  const auto to = Addresses(warp, instruction.operands[0]), from = Addresses(warp, instruction.operands[1]);
  const Register* const wanted = instruction.operands.size() > 3 ? &warp.read(instruction.operands[3]) : nullptr;
  uint32_t reading = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    Warp::Copy piece{static_cast<uint32_t>(to.of[lane]), static_cast<uint8_t>(size), {}, lane};
    const auto bytes = wanted == nullptr ? size : static_cast<uint32_t>(wanted->lane[lane]);
    if (bytes > size) throw Failure("out of bounds", "cp.async reads more bytes than it writes", lane, from.of[lane]);
    if (bytes > 0 && from.of[lane] % size != 0)
      throw Failure("misaligned", "cp.async from an address that is no multiple of its size", lane, from.of[lane]);
    if (bytes == size) {
      warp.block.launch.memory.read(from.of[lane], size, warp.block.number, lane);
    } else {
      for (unsigned i = 0; i < bytes; ++i) warp.block.launch.memory.read(from.of[lane] + i, 1, warp.block.number, lane);
    }
    if (bytes > 0) reading |= 1u << lane;
    std::memcpy(piece.bytes.data(), reinterpret_cast<const void*>(from.of[lane]), bytes);
    warp.block.shared.begin_copy(piece.to, size, warp.toucher(lane));
    warp.copies.back().push_back(piece);
  }
  count_global(warp, from, size, reading);
  count_shared(warp, to, size);
}

void commit_copies(Warp& warp, const Instruction&) {
  warp.require_all_lanes();
  warp.copies.emplace_back();
}

// Lets the oldest groups land until at most form[0] committed groups remain.
void wait_for_copies(Warp& warp, const Instruction& instruction) {
  warp.require_all_lanes();
  while (static_cast<int64_t>(warp.copies.size()) - 1 > instruction.form[0]) {
    for (const Warp::Copy& piece : warp.copies.front())
      warp.block.shared.land_copy(piece.to, piece.bytes.data(), piece.size, warp.toucher(piece.lane));
    warp.copies.pop_front();
  }
}

const Define cp("cp", Class::kCopy, [](Form& form) -> Execute {
  if (!form.take("async")) form.refuse("only cp.async is known");
  if (form.take("commit_group")) return commit_copies;
  if (form.take("wait_group")) {
    form.expect_operands(1);
    form.instruction.form[0] = form.constant(0);
    return wait_for_copies;
  }
  const std::string cache = form.take_any({"ca", "cg"});
  form.take_any({"shared::cta", "shared"});
  form.take("global");
  form.ignore({"L2::64B", "L2::128B", "L2::256B"});
  if (form.instruction.operands.size() != 3 && form.instruction.operands.size() != 4)
    form.refuse("it has three operands or four");
  const int64_t size = form.instruction.form[0] = form.constant(2);
  if (size != 16 && (cache != "ca" || (size != 4 && size != 8)))
    form.refuse("a copy is of 4, 8 or 16 bytes, by .cg of 16");
  return copy;
});

}  // namespace
}  // namespace ptx
