// The (row, expert) pairs of a batch, listed by expert.
#pragma once

#include <cstdint>

#include "rows.h"

namespace rbm::cpu {

// Choice `index % k` of row `row`, with index = row * k + choice, which is the position of its gate.
struct Pair {
  int64_t row, index;
};

// A stable counting sort: each expert's pairs remain in the order of their rows.
class PairsByExpert {
 public:
  PairsByExpert(int64_t most_rows, int64_t top_k, int64_t num_experts)
      : top_k_(top_k),
        num_experts_(num_experts),
        begins_(scratch<int64_t>(num_experts + 1)),
        pairs_(scratch<Pair>(most_rows * top_k)) {}

  // Rows [first, last) of experts [B, k].
  void list(const int32_t* experts, int64_t first, int64_t last) {
    std::fill_n(begins_.get(), num_experts_ + 1, 0);
    for (int64_t i = first * top_k_; i < last * top_k_; ++i) ++begins_[experts[i]];
    int64_t end = 0;
    for (int64_t e = 0; e <= num_experts_; ++e) {
      end += begins_[e];
      begins_[e] = end;
    }
    for (int64_t row = last; row-- > first;) {
      for (int64_t i = (row + 1) * top_k_; i-- > row * top_k_;) pairs_[--begins_[experts[i]]] = {row, i};
    }
  }

  int64_t all() const { return begins_[num_experts_]; }
  int64_t count(int64_t expert) const { return begins_[expert + 1] - begins_[expert]; }
  const Pair* of(int64_t expert) const { return pairs_.get() + begins_[expert]; }

 private:
  int64_t top_k_, num_experts_;
  Scratch<int64_t> begins_;
  Scratch<Pair> pairs_;
};

}  // namespace rbm::cpu
