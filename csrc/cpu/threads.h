// Work shared by PyTorch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace rbm::cpu {

// Allocation is the only thing that can fail after the checks.
[[noreturn]] inline void fail_for_memory() {
  throw std::runtime_error(
      "rbm: memory ran out: expected room for the result and for what each thread works with, which grows with the"
      " number of experts: split the batch, or ask for fewer experts or fewer threads");
}

// Calls work(first, end of its share) in parallel. An exception in a thread would leave PyTorch's own function without
// its message.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  std::atomic<bool> has_failed = false;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    try {
      work(first, last);
    } catch (...) {
      has_failed = true;
    }
  });
  if (has_failed) fail_for_memory();
}

// Calls work(take) in at most `threads` threads. take() returns a task of [0, count) that no thread has taken, and
// `count` or more if there is none. So a thread that other processes slow down does not hold up the others for longer
// than a task.
template <typename Work>
void parallel_tasks(int64_t count, int64_t threads, const Work& work) {
  std::atomic<int64_t> next = 0;
  parallel_for(0, std::min(count, threads), 1, [&](int64_t, int64_t) {
    work([&] { return next.fetch_add(1, std::memory_order_relaxed); });
  });
}

}  // namespace rbm::cpu
