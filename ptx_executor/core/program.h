// A kernel as produced by the parser: instructions whose operands are slots of a warp's register file.
//
// Constants and special registers (%tid.x, the address of shared memory) are slots too, filled before a warp starts, so
// that an instruction reads all operands in the same way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

struct Instruction;
class Warp;
using Execute = void (*)(Warp&, const Instruction&);

struct Operand {
  std::vector<uint32_t> slots;  // one, or those of a vector {a, b}; for an address, its base
  int64_t offset = 0;           // for an address
};

// For the statistics: the part of a multiprocessor that an instruction keeps busy.
enum class Class : uint8_t {
  kInteger,
  kFloat,
  kDouble,
  kSpecial,
  kConvert,
  kMove,
  kPredicate,
  kGlobal,
  kShared,
  kParameter,
  kCopy,
  kShuffle,
  kMatrix,
  kBarrier,
  kBranch
};

struct Instruction {
  Execute execute = nullptr;
  std::vector<Operand> operands;
  uint32_t guard = 0;  // slot of the predicate
  bool guarded = false, guard_negated = false;
  int target = -1;         // of a branch: the next instruction if it is taken
  int reconvergence = -1;  // of a branch: where diverging lanes reconverge
  Class kind = Class::kInteger;
  // Properties of the instruction's form, set by its decoder: sizes, counts, flags.
  int64_t form[4] = {};
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId
};

struct Program {
  std::string name;
  std::vector<Instruction> instructions;
  uint32_t slots = 0;
  struct Constant {
    uint32_t slot;
    uint64_t value;
  };
  std::vector<Constant> constants;
  struct SpecialSlot {
    uint32_t slot;
    Special special;
  };
  std::vector<SpecialSlot> specials;
};

}  // namespace ptx
