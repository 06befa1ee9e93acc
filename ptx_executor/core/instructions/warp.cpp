// PTX ISA 9.7.9.6 (shfl.sync), 9.7.13 (bar, fence, redux.sync), 9.7.12 (bra, ret).
#include "../semantics.h"

namespace ptx {
namespace {

enum Shuffle { kUp, kDown, kButterfly, kIndex };

// The lane that `lane` reads, and whether it is in its segment.
template <Shuffle mode>
std::pair<int, bool> source_lane(int lane, uint32_t b, uint32_t c) {
  const int by = static_cast<int>(b & 31), clamp = static_cast<int>(c & 31), segment = static_cast<int>(c >> 8 & 31);
  const int first = lane & segment, last = first | (clamp & ~segment);
  int source;
  bool inside;
  if constexpr (mode == kUp) {
    source = lane - by;
    inside = source >= last;
  } else {
    source = mode == kDown ? lane + by : mode == kButterfly ? lane ^ by : first | (by & ~segment);
    inside = source <= last;
  }
  return {inside ? source : lane, inside};
}

template <Shuffle mode>
void shuffle(Warp& warp, const Instruction& instruction) {
  warp.require_members(instruction.operands[4]);
  const Register& given = warp.operand(instruction.operands[1]);
  const auto values = given.lane;
  const uint32_t written = given.written;
  const Register &b = warp.read(instruction.operands[2]), &c = warp.read(instruction.operands[3]);
  const Operand& targets = instruction.operands[0];
  uint32_t known = 0;
  std::array<std::pair<int, bool>, kLanes> sources;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    sources[lane] = source_lane<mode>(lane, static_cast<uint32_t>(b.lane[lane]), static_cast<uint32_t>(c.lane[lane]));
    const int source = sources[lane].first;
    if (!warp.is_active(source)) throw Failure("divergence", "shfl reads a lane that is not here", lane);
    known |= (written >> source & 1u) << lane;
  }
  Register& target = warp.write(targets, 0, known);
  Register* const inside_of = targets.slots.size() > 1 ? &warp.write(targets, 1) : nullptr;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    target.lane[lane] = values[sources[lane].first];
    if (inside_of != nullptr) inside_of->lane[lane] = sources[lane].second;
  }
}

const Define shfl("shfl", Class::kShuffle, [](Form& form) -> Execute {
  if (!form.take("sync") || !form.take("b32")) form.refuse("only shfl.sync.*.b32 is known");
  form.expect_operands(5);
  if (form.take("up")) return shuffle<kUp>;
  if (form.take("down")) return shuffle<kDown>;
  if (form.take("bfly")) return shuffle<kButterfly>;
  if (form.take("idx")) return shuffle<kIndex>;
  form.refuse("its mode is not known");
});

template <typename T, typename F>
void reduce(Warp& warp, const Instruction& instruction) {
  warp.require_members(instruction.operands[2]);
  const Register& source = warp.read(instruction.operands[1]);
  T result{};
  bool first = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp.is_active(lane)) continue;
    const T value = from_bits<T>(source.lane[lane]);
    result = first ? value : F{}(result, value);
    first = false;
  }
  Register& target = warp.write(instruction.operands[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.is_active(lane)) target.lane[lane] = to_bits<T>(result);
  }
}

template <typename F>
Execute reduction(Form& form, F) {
  return by_type(Types<int32_t, uint32_t>{}, form, form.take_type(),
                 []<typename T>() -> Execute { return reduce<T, F>; });
}

const Define redux("redux", Class::kShuffle, [](Form& form) -> Execute {
  if (!form.take("sync")) form.refuse("only redux.sync is known");
  form.expect_operands(3);
  if (form.take("add")) return reduction(form, [](auto a, auto b) { return a + b; });
  if (form.take("min")) return reduction(form, [](auto a, auto b) { return a < b ? a : b; });
  if (form.take("max")) return reduction(form, [](auto a, auto b) { return a < b ? b : a; });
  form.refuse("its operation is not known");
});

const Define bar("bar", Class::kBarrier, [](Form& form) -> Execute {
  if (form.take("warp") && form.take("sync")) {
    form.expect_operands(1);
    return [](Warp& warp, const Instruction& instruction) { warp.require_members(instruction.operands[0]); };
  }
  if (!form.take("sync")) form.refuse("only bar.sync is known");
  form.expect_operands(1);
  if (form.constant(0) != 0) form.refuse("only barrier 0, of all warps, is known");
  return [](Warp& warp, const Instruction&) {
    warp.require_all_lanes();
    warp.wait_at_barrier();
  };
});

// Makes this thread's writes to shared memory visible to wgmma.
const Define fence("fence", Class::kBarrier, [](Form& form) -> Execute {
  if (!form.take("proxy") || !form.take("async")) form.refuse("only fence.proxy.async is known");
  form.ignore({"shared::cta"});
  return [](Warp& warp, const Instruction&) {
    warp.require_all_lanes();
    warp.proxy_fence_tick = warp.tick;
  };
});

const Define bra("bra", Class::kBranch, [](Form& form) -> Execute {
  form.ignore({"uni"});
  return [](Warp& warp, const Instruction& instruction) { warp.branch(instruction, warp.active); };
});

Execute leave(Form& form) {
  form.expect_operands(0);
  return [](Warp& warp, const Instruction&) { warp.exit(); };
}

const Define ret("ret", Class::kBranch, leave);
const Define exit_("exit", Class::kBranch, leave);

}  // namespace
}  // namespace ptx
