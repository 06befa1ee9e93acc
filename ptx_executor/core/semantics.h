// Building blocks of instructions that work lane by lane.
#pragma once

#include <tuple>

#include "decoding.h"
#include "machine.h"

namespace ptx {

// d = f(a, b, ...) in every active lane. The first operand is written, the others are read as their types.
template <typename F, typename Result, typename... Sources>
struct Lanewise {
  template <size_t... I>
  static void apply(Warp& warp, const Instruction& instruction, std::index_sequence<I...>) {
    const Register* const sources[] = {&warp.operand(instruction.operands[I + 1])...};
    const uint32_t known = (sources[I]->written & ...);
    std::array<uint32_t, 2> halves{};
    if constexpr (std::is_same_v<Result, FloatPair>) {
      for (int i = 0; i < 2; ++i) halves[i] = ((sources[I]->written | sources[I]->half_written[i]) & ...);
    }
    Register& target = warp.write(instruction.operands[0], 0, known, halves);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (warp.is_active(lane)) {
        target.lane[lane] = to_bits<Result>(static_cast<Result>(F{}(from_bits<Sources>(sources[I]->lane[lane])...)));
      }
    }
  }
  static void execute(Warp& warp, const Instruction& instruction) {
    apply(warp, instruction, std::index_sequence_for<Sources...>{});
  }
};

template <typename Result, typename... Sources, typename F>
Execute lanewise(Form& form, F) {
  form.expect_operands(sizeof...(Sources) + 1);
  return Lanewise<F, Result, Sources...>::execute;
}

// The result and all `count` sources have the same type, the form's last modifier.
template <int count, typename Set, typename F>
Execute of_one_type(Set set, Form& form, F f) {
  return by_type(set, form, form.take_type(), [&]<typename T>() -> Execute {
    if constexpr (count == 1) return lanewise<T, T>(form, f);
    if constexpr (count == 2) return lanewise<T, T, T>(form, f);
    if constexpr (count == 3) return lanewise<T, T, T, T>(form, f);
  });
}

inline void pass(Warp&, const Instruction&) {}

}  // namespace ptx
