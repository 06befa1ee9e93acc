// flush_denormals: whether numbers below the normal range count as zeros, in this thread and in PyTorch's others. Each
// thread has a control register of its own, and torch.set_flush_denormal sets that of its caller alone.
#include "../denormals.h"

#include <cstdint>

#include "threads.h"

namespace rbm::cpu {
namespace {

#if defined(__x86_64__)
// Results (FTZ) and operands (DAZ).
constexpr unsigned kFlush = 0x8040;
unsigned control() { return __builtin_ia32_stmxcsr(); }
void set_control(unsigned bits) { __builtin_ia32_ldmxcsr(bits); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = 1 << 24;
uint64_t control() {
  uint64_t bits;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
void set_control(uint64_t bits) { asm volatile("msr fpcr, %0" ::"r"(bits)); }
#else
constexpr unsigned kFlush = 0;
unsigned control() { return 0; }
void set_control(unsigned) {}
#endif

void set_flush(bool flushes) { set_control(flushes ? control() | kFlush : control() & ~kFlush); }

}  // namespace

bool flush_denormals(const Tensor&, bool flushes) {
  const bool before = (control() & kFlush) != 0;
  parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t, int64_t) { set_flush(flushes); });
  set_flush(flushes);
  return before;
}

}  // namespace rbm::cpu
