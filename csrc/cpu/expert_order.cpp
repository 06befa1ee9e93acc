// expert_order on the CPU: a stable counting sort by the rank of each row's set, or a stable sort if there are too many
// sets to count. The rank and its revolving-door order are derived in rbm_kernels/ops/expert_order/README.md.
#include "../expert_order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "rows.h"

namespace rbm::cpu {
namespace {

// Counting takes memory for every possible set; sorting by rank takes time for every row.
constexpr int64_t kMostCountedSets = 1 << 20;

// The table of binomials and the list of each tile's experts have a place for every expert.
constexpr int64_t kMostExperts = 1 << 20;

// Raises unless 64 bits can number the sets of every size up to k, which are the columns of the table of binomials.
// Called before the table is allocated: from 67 experts on, k is below 33, and of a million experts it is at most 3.
void check_ranks(const Checks& check, int64_t num_experts, int64_t top_k) {
  __int128 sets = 1;
  for (int64_t size = 1; size <= top_k; ++size) {
    sets = sets * (num_experts - size + 1) / size;
    if (sets > std::numeric_limits<int64_t>::max()) {
      check.fail(
          "there are more than 2^63 sets of up to ", top_k, " of ", num_experts,
          " experts, too many to rank: order them in several passes");
    }
  }
}

// [num_experts + 1, top_k + 1]: C(n, size) at [n, size], with the sign of that size's term in the rank.
std::vector<int64_t> signed_binomials(int64_t num_experts, int64_t top_k) {
  std::vector<int64_t> values((num_experts + 1) * (top_k + 1), 0);
  const auto at = [&](int64_t n, int64_t size) -> int64_t& { return values[n * (top_k + 1) + size]; };
  for (int64_t n = 0; n <= num_experts; ++n) {
    at(n, 0) = 1;
    for (int64_t size = 1; size <= std::min(n, top_k); ++size) at(n, size) = at(n - 1, size - 1) + at(n - 1, size);
  }
  for (int64_t n = 0; n <= num_experts; ++n) {
    for (int64_t size = top_k - 1; size >= 1; size -= 2) at(n, size) = -at(n, size);
  }
  return values;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> expert_order(const Tensor& experts_any, int64_t num_experts, int64_t block_m) {
  const Checks check("expert_order");
  check.dtype("experts", experts_any, {ScalarType::Int});
  check.shape("experts", experts_any, {kAnySize, kAnySize}, "rows by experts a row");
  const int64_t rows = experts_any.size(0), top_k = experts_any.size(1);
  if (top_k < 1 || top_k > num_experts) {
    check.fail("k is ", top_k, ", expected between 1 and ", num_experts, " experts");
  }
  if (num_experts < 1 || num_experts > kMostExperts) {
    check.fail(
        "num_experts is ", num_experts, ", expected between 1 and ", kMostExperts, ": every tile lists all experts");
  }
  if (block_m < 1) check.fail("block_m is ", block_m, ", expected at least 1");
  const Tensor experts = dense(experts_any);
  check_experts(check, experts, num_experts);

  check_ranks(check, num_experts, top_k);
  const std::vector<int64_t> binomials = signed_binomials(num_experts, top_k);
  const auto* const chosen = data<int32_t>(experts);
  std::vector<int64_t> ranks(rows);
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplications / (top_k * top_k));
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> ascending(top_k);
    for (int64_t b = begin; b < end; ++b) {
      std::copy_n(chosen + b * top_k, top_k, ascending.begin());
      std::sort(ascending.begin(), ascending.end());
      // Unsigned: the terms of a row that repeats an expert may sum to more than 2^63.
      uint64_t rank = -static_cast<uint64_t>(top_k % 2);
      for (int64_t j = 0; j < top_k; ++j) {
        rank += static_cast<uint64_t>(binomials[(ascending[j] + 1) * (top_k + 1) + j + 1]);
      }
      ranks[b] = static_cast<int64_t>(rank);
    }
  });

  Tensor order = new_tensor(ScalarType::Int, {rows});
  auto* const ordered = mutable_data<int32_t>(order);
  const int64_t sets = binomials[num_experts * (top_k + 1) + top_k];
  // A row that repeats an expert has no valid rank, so batches with such rows are sorted.
  const bool ranked = std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) { return rank >= 0 && rank < sets; });
  if (ranked && sets <= kMostCountedSets) {
    std::vector<int64_t> next(sets + 1, 0);
    for (const int64_t rank : ranks) ++next[rank + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (int64_t b = 0; b < rows; ++b) ordered[next[ranks[b]]++] = static_cast<int32_t>(b);
  } else {
    std::iota(ordered, ordered + rows, 0);
    std::stable_sort(ordered, ordered + rows, [&](int32_t a, int32_t b) { return ranks[a] < ranks[b]; });
  }

  const int64_t tiles = rows / block_m + (rows % block_m != 0);
  Tensor tile_experts = new_tensor(ScalarType::Int, {tiles, num_experts});
  Tensor tile_counts = new_tensor(ScalarType::Int, {tiles});
  std::vector<uint8_t> used(num_experts);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    std::fill(used.begin(), used.end(), uint8_t(0));
    const int64_t first = tile * block_m;
    for (int64_t i = first; i < first + std::min(block_m, rows - first); ++i) {
      for (int64_t j = 0; j < top_k; ++j) used[chosen[ordered[i] * top_k + j]] = 1;
    }
    auto* const listed = mutable_data<int32_t>(tile_experts) + tile * num_experts;
    int32_t count = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      if (used[e]) listed[count++] = static_cast<int32_t>(e);
    }
    std::fill(listed + count, listed + num_experts, -1);
    mutable_data<int32_t>(tile_counts)[tile] = count;
  }
  return {order, tile_experts, tile_counts};
}

}  // namespace rbm::cpu
