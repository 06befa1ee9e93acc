// Calls that many threads make at once, joined into batches.
//
// As many calls as there are processors run side by side. With more threads than that the system would take the processor from
// one in the midst of its answer, for milliseconds. So others wait in line, asleep. Who has answered wakes the first of them,
// which takes along all that wait for the same thing, and answers them as one batch: weights are read once for all.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

namespace rbm::cpu {

// Rows that are answered as one batch.
constexpr int64_t kMostJoined = 32;

// One call, on its thread's stack.
struct JointCall {
  JointCall(const void* key, int64_t rows) : key(key), rows(rows) {}

  const void* const key;  // calls of one key can be joined
  const int64_t rows;
  JointCall* next = nullptr;  // in line, then in a batch

 private:
  friend class JointCalls;
  enum State : int { kWaits, kLeads, kAnswered, kFailed };
  std::atomic<int> state{kWaits};

  // The call may be gone as soon as its state is set; to wake its address then wakes nobody.
  void become(State changed) {
    state.store(changed, std::memory_order_release);
    state.notify_one();
  }
};

class JointCalls {
 public:
  // Those of this process.
  static JointCalls& here() {
    static JointCalls* const calls = [] {
      // A forked process has none of the threads that are in line or at work.
      pthread_atfork(nullptr, nullptr, [] { new (&here()) JointCalls; });
      return new JointCalls;
    }();
    return *calls;
  }

  // answer_all(call) answers `own` and all that hang on it by `next`, or `own` is answered by another thread.
  template <typename Answer>
  void answer(JointCall& own, const Answer& answer_all) {
    if (!is_first(own)) {
      own.state.wait(JointCall::kWaits, std::memory_order_acquire);
      const int state = own.state.load(std::memory_order_acquire);
      if (state == JointCall::kAnswered) return;
      if (state == JointCall::kFailed) throw std::runtime_error("rbm::packed_network: memory ran out");
    }
    try {
      answer_all(own);
    } catch (...) {
      release(own.next, JointCall::kFailed);
      pass_on();
      throw;
    }
    release(own.next, JointCall::kAnswered);
    pass_on();
  }

 private:
  bool is_first(JointCall& own) {
    const std::lock_guard lock(mutex_);
    if (running_ < places_) {
      ++running_;
      return true;
    }
    (first_ == nullptr ? first_ : last_->next) = &own;
    last_ = &own;
    return false;
  }

  static void release(JointCall* call, JointCall::State state) {
    while (call != nullptr) {
      JointCall* const next = call->next;
      call->become(state);
      call = next;
    }
  }

  // Gives this thread's place to the first in line, with those that can be joined to it.
  void pass_on() {
    JointCall* leader;
    {
      const std::lock_guard lock(mutex_);
      leader = first_;
      if (leader == nullptr) {
        --running_;
        return;
      }
      first_ = leader->next;
      leader->next = nullptr;
      int64_t rows = leader->rows;
      JointCall *joined = leader, *before = nullptr;
      for (JointCall *call = first_, *after; call != nullptr; call = after) {
        after = call->next;
        if (call->key != leader->key || rows + call->rows > kMostJoined) {
          before = call;
          continue;
        }
        (before == nullptr ? first_ : before->next) = after;
        joined = joined->next = call;
        call->next = nullptr;
        rows += call->rows;
      }
      last_ = before;
    }
    leader->become(JointCall::kLeads);
  }

  // Processors that this process may use.
  static int64_t processors() {
#if defined(__linux__)
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof(usable), &usable) == 0) return CPU_COUNT(&usable);
#endif
    return std::max<int64_t>(1, std::thread::hardware_concurrency());
  }

  std::mutex mutex_;
  const int64_t places_ = processors();
  int64_t running_ = 0;
  JointCall *first_ = nullptr, *last_ = nullptr;
};

}  // namespace rbm::cpu
