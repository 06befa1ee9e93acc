// Addresses of a request and their cost: sectors of global memory, passes over the banks of shared memory.
#pragma once

#include <algorithm>

#include "machine.h"

namespace ptx {

// base + offset in every active lane
struct Addresses {
  Addresses(Warp& warp, const Operand& operand) {
    const Register& base = warp.read(operand);
    for (int lane = 0; lane < kLanes; ++lane) of[lane] = base.lane[lane] + static_cast<uint64_t>(operand.offset);
  }
  std::array<uint64_t, kLanes> of;
};

// A request to global memory moves whole sectors of 32 bytes.
inline void count_global(Warp& warp, const Addresses& addresses, unsigned size, uint32_t lanes) {
  std::array<uint64_t, kLanes> sectors;
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) sectors[count++] = addresses.of[lane] / 32;
  }
  std::sort(sectors.begin(), sectors.begin() + count);
  warp.count().bytes += int64_t{size} * count;
  warp.count().sectors += std::unique(sectors.begin(), sectors.begin() + count) - sectors.begin();
}

inline void count_global(Warp& warp, const Addresses& addresses, unsigned size) {
  count_global(warp, addresses, size, warp.active);
}

// Shared memory has 32 banks of four bytes, and each bank delivers one word per pass. Accesses of 8 and 16 bytes are
// split into halves and quarters of a warp.
class BankPasses {
 public:
  void touch(uint64_t address, unsigned size) {
    for (uint64_t word = address / 4; word <= (address + size - 1) / 4; ++word) {
      auto& bank = words_[word % 32];
      auto& depth = depth_[word % 32];
      if (std::find(bank.begin(), bank.begin() + depth, word) == bank.begin() + depth) bank[depth++] = word;
    }
  }
  int64_t finish() {
    const int passes = *std::max_element(depth_.begin(), depth_.end());
    depth_.fill(0);
    return passes;
  }

 private:
  std::array<std::array<uint64_t, 4 * kLanes>, 32> words_;
  std::array<int, 32> depth_{};
};

inline void count_shared(Warp& warp, const Addresses& addresses, unsigned size) {
  BankPasses passes;
  const int together = size <= 4 ? 32 : size == 8 ? 16 : 8;
  int64_t wavefronts = 0;
  for (int first = 0; first < kLanes; first += together) {
    for (int lane = first; lane < first + together; ++lane) {
      if (warp.is_active(lane)) passes.touch(addresses.of[lane], size);
    }
    wavefronts += passes.finish();
  }
  warp.count().bytes += int64_t{size} * std::popcount(warp.active);
  warp.count().wavefronts += wavefronts;
}

}  // namespace ptx
