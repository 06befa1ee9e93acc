// A launch as it runs: blocks one after another, the warps of a block in turns from barrier to barrier.
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
  // Lanes of which only the lower or the upper 32 of 64 bits have a value: compilers pack one with none, and unpack it.
  std::array<uint32_t, 2> half_written{};
  uint32_t tick = 0;       // when an instruction other than wgmma wrote it last; 0: none did
  uint16_t computing = 0;  // multiplications not waited for that will write it
  uint16_t reading = 0;    // and that read it
};

// What one instruction did, over all warps.
struct Count {
  int64_t executed = 0;       // by warps
  int64_t lanes = 0;          // active ones
  int64_t bytes = 0;          // that lanes asked of memory
  int64_t sectors = 0;        // of 32 bytes that a request touched in global memory
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
  // As the PTX ISA asks: a proxy fence between cp.async and wgmma as well, and no write to a register that a wgmma
  // reads.
  bool strict_wgmma = true;
  std::vector<Count> counts;  // of each instruction
  uint64_t executed = 0;
};

class Block;

class Warp {
 public:
  enum class State { kReady, kAtBarrier, kDone };

  Warp(Block& block, int index);

  // Executes one instruction after another until a barrier or the end.
  void run();

  // The register of an operand for what needs a value: an address, a predicate, a store, a matrix. All active lanes
  // must have written it.
  const Register& read(const Operand& operand, size_t element = 0);
  const Register& read_slot(uint32_t slot);
  // The register of an operand for what only computes: lanes without a value give lanes without a value. Compilers let
  // whole warps shuffle and add what a few lanes have loaded, and use the results of those lanes alone.
  const Register& operand(const Operand& operand, size_t element = 0);
  // The register to write, in the active lanes, of which `known` get a value, and `halves` a lower or an upper half.
  Register& write(const Operand& operand, size_t element = 0, uint32_t known = kAllLanes,
                  std::array<uint32_t, 2> halves = {});

  bool is_active(int lane) const { return active >> lane & 1; }
  // Every lane of the warp must be here: `.aligned` instructions.
  void require_all_lanes() const;
  // The lanes that a `.sync` instruction names must be those that are here.
  void require_members(const Operand& mask);
  SharedMemory::Toucher toucher(int lane) const { return {index, tick, lane}; }
  Count& count();

  void branch(const Instruction& instruction, uint32_t taken);
  void exit();
  void wait_at_barrier() { state = State::kAtBarrier; }

  Block& block;
  const int index;
  State state = State::kReady;
  uint32_t active = 0;  // lanes that execute the instruction at hand
  uint32_t tick = 0;    // instructions that the launch had executed, this one among them
  std::vector<Register> registers;
  int place = 0;  // the instruction at hand

  // cp.async: groups of copies, the oldest first; the last is not committed yet.
  struct Copy {
    uint32_t to;
    uint8_t size;
    std::array<uint8_t, 16> bytes;
    int lane;
  };
  std::deque<std::vector<Copy>> copies{1};

  // wgmma: what each multiplication that was not waited for holds; groups as above.
  struct Multiplication {
    std::vector<uint32_t> accumulators, inputs, chunks;
  };
  std::deque<std::vector<Multiplication>> multiplications{1};
  uint32_t matrix_fence_tick = 0;
  uint32_t proxy_fence_tick = 0;

 private:
  void require_waited(const Register& source) const;

  // Lanes that run together, to the place where they meet those that they parted from.
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

// Where a launch failed.
struct Located {
  std::string kind, what;
  int instruction = -1, warp = -1, lane = -1;
  int64_t block = -1;
  uint64_t address = 0;
};

// Runs the blocks of a launch in an order that the seed draws; false and the place where a watcher refused.
bool run(Launch& launch, const std::vector<int64_t>& blocks, uint64_t seed, Located& failure);

}  // namespace ptx
