// How threads share a layer's answers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "rows.h"

namespace rbm::cpu {

// The least work of a thread where there is one row. What a second thread saves below it is what waking one takes, and where
// others use the cores it would be waited for: for milliseconds, with the processor spinning.
constexpr int64_t kMultiplicationsOfThreadForOneRow = 1 << 20;

// A call of the layer. Those that several threads of a server make at once share the threads that PyTorch may use: each
// would wake as many, and they would take the cores from one another.
class Call {
 public:
  Call() : under_way_(1 + count_.fetch_add(1, std::memory_order_relaxed)) {}
  ~Call() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  int64_t threads() const { return std::max<int64_t>(1, torch::stable::get_num_threads() / under_way_); }

 private:
  static inline std::atomic<int64_t> count_ = 0;
  int64_t under_way_;
};

// How many threads share the columns, and how many the rows.
struct Split {
  int64_t columns, rows;

  // Threads that share the columns route the same rows, and each reads a part of the weights. With rows of its own a thread
  // reads all weights. So columns are shared as long as there are few rows, and where they make equal shares.
  static Split of(const Call& call, int64_t rows, int64_t multiplications, int64_t outputs, int64_t panels) {
    const int64_t least = rows == 1 ? kMultiplicationsOfThreadForOneRow : kMultiplicationsOfThread;
    const int64_t threads = std::clamp<int64_t>(multiplications / least, 1, call.threads());
    if (rows <= outputs) {
      for (int64_t columns = std::min(threads, panels); columns > 1; --columns) {
        if (panels % columns == 0 || panels / columns >= 8) return {columns, std::clamp<int64_t>(threads / columns, 1, rows)};
      }
    }
    return {1, std::min(threads, rows)};
  }

  // serve(first row, end of rows, first panel, end of panels) for each share, side by side.
  template <typename Serve>
  void run(int64_t all_rows, int64_t panels, const Serve& serve) const {
    const auto part = [](int64_t size, int64_t i, int64_t parts) { return size * i / parts; };
    parallel_for(0, rows * columns, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / columns, column = i % columns;
        serve(
            part(all_rows, row, rows), part(all_rows, row + 1, rows), part(panels, column, columns),
            part(panels, column + 1, columns));
      }
    });
  }
};

}  // namespace rbm::cpu
