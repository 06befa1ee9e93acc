// A running launch: blocks run one after another, the warps of a block alternate from barrier to barrier.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "failure.h"
#include "global_memory.h"
#include "program.h"
#include "shared_memory.h"

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Register {
  std::array<uint64_t, kLanes> lane;
  uint32_t written = 0;    // lanes
  // Lanes in which only the lower or the upper 32 of 64 bits have a value: compilers pack one with none, and unpack it.
  std::array<uint32_t, 2> half_written{};
  uint32_t tick = 0;       // of the latest write by an instruction other than wgmma; 0: none
  uint16_t computing = 0;  // pending multiplications that will write it
  uint16_t reading = 0;    // pending multiplications that read it
};

// Statistics of one instruction, over all warps.
struct Count {
  int64_t executed = 0;       // by warps
  int64_t lanes = 0;          // active ones
  int64_t bytes = 0;          // requested by lanes
  int64_t sectors = 0;        // of 32 bytes, accessed by requests in global memory
  int64_t wavefronts = 0;     // passes over the banks of shared memory
  int64_t multiply_adds = 0;  // of matrix instructions
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  int64_t size() const { return int64_t{x} * y * z; }
};

struct Launch {
  const Program& program;
  GlobalMemory& memory;
  Dim grid, block;
  std::vector<uint8_t> parameters;
  uint32_t shared_bytes = 0;
  uint64_t most_instructions = 0;
  // Apply the rules of the PTX ISA: cp.async and wgmma also need a proxy fence between them, and registers that a wgmma
  // reads must not be written.
  bool strict_wgmma = true;
  std::vector<Count> counts;  // of each instruction
  uint64_t executed = 0;
};

class Block;

class Warp {
 public:
  enum class State { kReady, kAtBarrier, kDone };

  Warp(Block& block, int index);

  // Executes instructions until a barrier or the end.
  void run();

  // The register of an operand that must have a value: an address, a predicate, a store, a matrix. All active lanes
  // must have written it.
  const Register& read(const Operand& operand, size_t element = 0);
  const Register& read_slot(uint32_t slot);
  // The register of an operand that is only used for computing: lanes without a value give lanes without a value.
  // Compilers let whole warps shuffle and add what a few lanes have loaded, and use only the results of those lanes.
  const Register& operand(const Operand& operand, size_t element = 0);
  // The register to write in the active lanes. `known` lanes get a value, `halves` only a lower or an upper half.
  Register& write(const Operand& operand, size_t element = 0, uint32_t known = kAllLanes,
                  std::array<uint32_t, 2> halves = {});

  bool is_active(int lane) const { return active >> lane & 1; }
  // Requires every lane of the warp to be active here: for `.aligned` instructions.
  void require_all_lanes() const;
  // Requires the active lanes to be those that a `.sync` instruction names.
  void require_members(const Operand& mask);
  SharedMemory::Toucher toucher(int lane) const { return {index, tick, lane}; }
  Count& count();

  void branch(const Instruction& instruction, uint32_t taken);
  void exit();
  void wait_at_barrier() { state = State::kAtBarrier; }

  Block& block;
  const int index;
  State state = State::kReady;
  uint32_t active = 0;  // lanes that execute the current instruction
  uint32_t tick = 0;    // instructions that the launch has executed, including this one
  std::vector<Register> registers;
  int place = 0;  // the current instruction

  // cp.async: groups of copies, the oldest first; the last group is not committed yet.
  struct Copy {
    uint32_t to;
    uint8_t size;
    std::array<uint8_t, 16> bytes;
    int lane;
  };
  std::deque<std::vector<Copy>> copies{1};

  // wgmma: resources held by each pending multiplication; groups as above.
  struct Multiplication {
    std::vector<uint32_t> accumulators, inputs, chunks;
  };
  std::deque<std::vector<Multiplication>> multiplications{1};
  uint32_t matrix_fence_tick = 0;
  uint32_t proxy_fence_tick = 0;

 private:
  void require_waited(const Register& source) const;

  // Lanes that run together, up to the instruction where they reconverge with the others.
  struct Path {
    int place, until;
    uint32_t lanes;
  };
  std::vector<Path> paths_;
};

class Block {
 public:
  Block(Launch& launch, int64_t number, std::mt19937_64& random);
  void run();

  Launch& launch;
  const int64_t number;
  SharedMemory shared;
  std::vector<Warp> warps;
  const Warp* running = nullptr;
  uint32_t x, y, z;

 private:
  std::mt19937_64& random_;
};

// Describes where a launch failed.
struct Located {
  std::string kind, what;
  int instruction = -1, warp = -1, lane = -1;
  int64_t block = -1;
  uint64_t address = 0;
};

// Runs the blocks of a launch in an order given by the seed. Returns false and the location if a watcher fails.
bool run(Launch& launch, const std::vector<int64_t>& blocks, uint64_t seed, Located& failure);

}  // namespace ptx
