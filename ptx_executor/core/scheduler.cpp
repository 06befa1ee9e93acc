#include <algorithm>
#include <numeric>

#include "machine.h"

namespace ptx {

Block::Block(Launch& launch, int64_t number, std::mt19937_64& random)
    : launch(launch), number(number), shared(launch.shared_bytes, launch.strict_wgmma), random_(random) {
  x = static_cast<uint32_t>(number % launch.grid.x);
  y = static_cast<uint32_t>(number / launch.grid.x % launch.grid.y);
  z = static_cast<uint32_t>(number / launch.grid.x / launch.grid.y);
  const int64_t count = (launch.block.size() + kLanes - 1) / kLanes;
  warps.reserve(count);
  for (int64_t i = 0; i < count; ++i) warps.emplace_back(*this, static_cast<int>(i));
}

void Block::run() {
  std::vector<Warp*> ready;
  while (true) {
    ready.clear();
    for (Warp& warp : warps) {
      if (warp.state == Warp::State::kReady) ready.push_back(&warp);
    }
    if (!ready.empty()) {
      Warp& warp = *ready[random_() % ready.size()];
      running = &warp;
      warp.run();
      continue;
    }
    const auto waits = [](const Warp& warp) { return warp.state == Warp::State::kAtBarrier; };
    const auto waiting = std::find_if(warps.begin(), warps.end(), waits);
    if (waiting == warps.end()) return;  // all are done
    running = &*waiting;
    for (Warp& warp : warps) {
      if (!waits(warp)) {
        throw Failure("barrier", "warp " + std::to_string(waiting->index) + " waits at a barrier that warp " +
                                     std::to_string(warp.index) + ", which has ended, never reached");
      }
      warp.state = Warp::State::kReady;
    }
    shared.barrier();
  }
}

Warp::Warp(Block& block, int index) : block(block), index(index), registers(block.launch.program.slots) {
  const Launch& launch = block.launch;
  const int64_t first = int64_t{index} * kLanes, threads = launch.block.size();
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes && first + lane < threads; ++lane) lanes |= 1u << lane;
  paths_.push_back({0, -1, lanes});
  const auto fill = [&](uint32_t slot, auto value) {
    Register& target = registers[slot];
    for (int lane = 0; lane < kLanes; ++lane) target.lane[lane] = value(first + lane, lane);
    target.written = kAllLanes;
  };
  for (const auto& constant : launch.program.constants) {
    fill(constant.slot, [&](int64_t, int) { return constant.value; });
  }
  for (const auto& [slot, special] : launch.program.specials) {
    fill(slot, [&](int64_t thread, int lane) -> uint64_t {
      switch (special) {
        case Special::kTidX:
          return thread % launch.block.x;
        case Special::kTidY:
          return thread / launch.block.x % launch.block.y;
        case Special::kTidZ:
          return thread / launch.block.x / launch.block.y;
        case Special::kNtidX:
          return launch.block.x;
        case Special::kNtidY:
          return launch.block.y;
        case Special::kNtidZ:
          return launch.block.z;
        case Special::kCtaidX:
          return block.x;
        case Special::kCtaidY:
          return block.y;
        case Special::kCtaidZ:
          return block.z;
        case Special::kNctaidX:
          return launch.grid.x;
        case Special::kNctaidY:
          return launch.grid.y;
        case Special::kNctaidZ:
          return launch.grid.z;
        case Special::kLaneId:
          return lane;
        case Special::kWarpId:
          return index;
      }
      return 0;
    });
  }
}

void Warp::run() {
  Launch& launch = block.launch;
  while (state == State::kReady) {
    while (!paths_.empty() && (paths_.back().lanes == 0 || paths_.back().place == paths_.back().until))
      paths_.pop_back();
    if (paths_.empty() || paths_.back().place >= static_cast<int>(launch.program.instructions.size())) {
      state = State::kDone;
      return;
    }
    place = paths_.back().place++;
    const Instruction& instruction = launch.program.instructions[place];
    active = paths_.back().lanes;
    if (instruction.guarded) {
      const Register& guard = read_slot(instruction.guard);
      uint32_t holds = 0;
      for (int lane = 0; lane < kLanes; ++lane) holds |= static_cast<uint32_t>(guard.lane[lane] != 0) << lane;
      active &= instruction.guard_negated ? ~holds : holds;
    }
    if (++launch.executed > launch.most_instructions)
      throw Failure("endless", "more instructions than the launch was allowed");
    tick = static_cast<uint32_t>(launch.executed);
    Count& here = launch.counts[place];
    ++here.executed;
    here.lanes += std::popcount(active);
    // A branch with a false guard in all lanes still determines where the warp continues: at the next instruction.
    if (active != 0) instruction.execute(*this, instruction);
  }
}

// PTX does not specify where diverging lanes reconverge. Here they do so where compilers make them, at the nearest
// instruction that all of them must reach.
void Warp::branch(const Instruction& instruction, uint32_t taken) {
  Path& path = paths_.back();
  if (taken == path.lanes) {
    path.place = instruction.target;
    return;
  }
  const Path stay{path.place, instruction.reconvergence, path.lanes & ~taken};
  const Path jump{instruction.target, instruction.reconvergence, taken};
  if (instruction.reconvergence >= 0) {
    path.place = instruction.reconvergence;
  } else {
    path.lanes = 0;
  }
  paths_.push_back(stay);
  paths_.push_back(jump);
}

void Warp::exit() {
  for (Path& path : paths_) path.lanes &= ~active;
}

const Register& Warp::read(const Operand& operand, size_t element) { return read_slot(operand.slots[element]); }

const Register& Warp::read_slot(uint32_t slot) {
  const Register& source = registers[slot];
  require_waited(source);
  if ((source.written & active) != active) {
    throw Failure("unwritten", "a register is used that nobody wrote, or that was computed from one",
                  std::countr_zero(active & ~source.written));
  }
  return source;
}

const Register& Warp::operand(const Operand& operand, size_t element) {
  const Register& source = registers[operand.slots[element]];
  require_waited(source);
  return source;
}

void Warp::require_waited(const Register& source) const {
  if (source.computing != 0) {
    throw Failure("wgmma not waited for", "an accumulator is read before wgmma.wait_group");
  }
}

Register& Warp::write(const Operand& operand, size_t element, uint32_t known, std::array<uint32_t, 2> halves) {
  Register& target = registers[operand.slots[element]];
  if (target.computing != 0) {
    throw Failure("wgmma not waited for", "an accumulator is written before wgmma.wait_group");
  }
  if (target.reading != 0 && block.launch.strict_wgmma) {
    throw Failure("wgmma not waited for", "a register is written that a wgmma still reads");
  }
  target.written = (target.written & ~active) | (known & active);
  for (int i = 0; i < 2; ++i) target.half_written[i] = (target.half_written[i] & ~active) | (halves[i] & active);
  target.tick = tick;
  return target;
}

void Warp::require_all_lanes() const {
  if (active != kAllLanes)
    throw Failure("divergence", "an .aligned instruction is executed by some lanes of a warp alone");
}

void Warp::require_members(const Operand& mask) {
  const Register& members = read(mask);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (is_active(lane) && static_cast<uint32_t>(members.lane[lane]) != active) {
      throw Failure("divergence", "the lanes that are here are not those that the mask of the instruction names", lane);
    }
  }
}

Count& Warp::count() { return block.launch.counts[place]; }

bool run(Launch& launch, const std::vector<int64_t>& blocks, uint64_t seed, Located& failure) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> order = blocks;
  std::shuffle(order.begin(), order.end(), random);
  for (const int64_t number : order) {
    Block block(launch, number, random);
    try {
      block.run();
    } catch (const Failure& refused) {
      failure = {refused.kind, refused.what(), block.running->place, block.running->index,
                 refused.lane, number,         refused.address};
      return false;
    }
  }
  return true;
}

}  // namespace ptx
