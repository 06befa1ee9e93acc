// How threads share the work of a layer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "rows.h"

namespace rbm::cpu {

// Minimum work per thread for a single row. With less, a second thread saves no more than it costs to wake it. If
// others use the cores, the caller would also wait for it for milliseconds, spinning.
constexpr int64_t kMultiplicationsOfThreadForOneRow = 1 << 20;

// Rows that a thread routes and multiplies together: their results stay in cache, and every expert gets about 256 of
// them.
constexpr int64_t rows_at_once(int64_t num_experts, int64_t top_k) {
  return std::max<int64_t>(256, 256 * num_experts / top_k);
}

// Rows [first, first + count).
struct RowRange {
  int64_t first, count;
};

// Rows that threads take when they are free, so that a thread that other processes slow down does not hold up the
// others. The parts become smaller, so that all threads end at about the same time, but not too small, because each
// part reads the weights of its experts.
class RowQueue {
 public:
  RowQueue(int64_t rows, int64_t threads, int64_t num_experts, int64_t top_k)
      : rows_(rows), threads_(threads), most_(rows_at_once(num_experts, top_k)) {}

  // Whether there are enough rows for several parts per thread.
  bool serves() const { return rows_ >= 2 * threads_ * least(); }
  int64_t largest() const { return std::min(most_, rows_); }

  // No rows if all are taken.
  RowRange take() {
    int64_t first = next_.load(std::memory_order_relaxed), count;
    do {
      const int64_t rest = rows_ - first;
      count = std::min(rest, std::clamp(ceil_div(rest, 2 * threads_), least(), most_));
    } while (!next_.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
    return {first, count};
  }

 private:
  int64_t least() const { return most_ / 2; }

  int64_t rows_, threads_, most_;
  std::atomic<int64_t> next_ = 0;
};

// A call of the layer. Concurrent calls from several threads of a server share the threads that PyTorch may use.
// Otherwise each call would wake all of them, and they would compete for the cores.
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

// Whether threads get about equal numbers of panels.
constexpr bool divides_panels(int64_t panels, int64_t threads) {
  return panels % threads == 0 || panels / threads >= 8;
}

// The number of threads among which the columns are divided, and the rows.
struct Split {
  int64_t columns, rows;

  // Threads that divide the columns route the same rows, and each reads a part of the weights; threads that divide the
  // rows each read all weights. So columns are divided if there are few rows, and if the parts are about equal.
  static Split of(const Call& call, int64_t rows, int64_t multiplications, int64_t most_by_columns, int64_t panels) {
    const int64_t least = rows == 1 ? kMultiplicationsOfThreadForOneRow : kMultiplicationsOfThread;
    const int64_t threads = std::clamp<int64_t>(multiplications / least, 1, call.threads());
    if (rows <= most_by_columns) {
      for (int64_t columns = std::min(threads, panels); columns > 1; --columns) {
        if (divides_panels(panels, columns)) {
          return {columns, std::clamp<int64_t>(threads / columns, 1, rows)};
        }
      }
    }
    return {1, std::min(threads, rows)};
  }

  // Calls serve(first row, end of rows, first panel, end of panels) for each share, in parallel.
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
