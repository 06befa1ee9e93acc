// routed_matmul_int8: a whole layer at inference with 8-bit integer experts. Routing uses the rows unchanged; for the
// experts, each row is rounded to 8 bits.
#include "../routed_matmul_int8.h"

#include <algorithm>
#include <array>

#include "../cosine_topk.h"
#include "int8_layer.h"
#include "int8_tiles.h"
#include "pairs.h"
#include "shares.h"

namespace rbm::cpu {
namespace {

// A layer, and values derived from its sizes.
struct Int8Work {
  const Int8Layer& layer;
  int64_t num_experts, panels, groups, chunk_rows;

  explicit Int8Work(const Int8Layer& of)
      : layer(of),
        num_experts(of.routing.num_experts),
        panels(panels_of(of.outputs)),
        groups(groups_of(of.features)),
        chunk_rows(rows_at_once(num_experts, of.routing.top_k)) {}

  int64_t panel_bytes() const { return (kHeadLines + groups) * kLineBytes; }
  int64_t padded() const { return panels * kPanelColumns; }
};

// A thread's quantised rows, and the sums for them.
struct Int8Product {
  const uint8_t* numbers;  // [n, number_stride]
  int64_t number_stride;
  const float *row_scales, *gates;
  const PairsByExpert* pairs;
  float* sums;  // [n, sum_stride], zeros
  int64_t sum_stride;
};

template <typename Kind, int kRows>
void multiply_rows(Int8Tile tile, int64_t panels) {
  constexpr int kAtOnce = Kind::panels_at_once(kRows);
  const auto step = [&](int64_t done) {
    panels -= done;
    tile.panels += done * tile.panel_bytes;
    for (int r = 0; r < kRows; ++r) tile.sums[r] += done * kPanelColumns;
  };
  for (; panels >= kAtOnce; step(kAtOnce)) Kind::template multiply<kRows, kAtOnce>(tile);
  if constexpr (kAtOnce > 4) {
    if (panels >= 4) Kind::template multiply<kRows, 4>(tile), step(4);
  }
  if constexpr (kAtOnce > 2) {
    if (panels >= 2) Kind::template multiply<kRows, 2>(tile), step(2);
  }
  if constexpr (kAtOnce > 1) {
    if (panels >= 1) Kind::template multiply<kRows, 1>(tile), step(1);
  }
}

template <typename Kind>
void multiply(const Int8Work& work, const Int8Product& p, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t kPanelsOfMany = Kind::panels_at_once(Kind::kMostRows);
  for (int64_t expert = 0; expert < work.num_experts; ++expert) {
    const Pair* const pairs = p.pairs->of(expert);
    const int64_t count = p.pairs->count(expert), tiles = ceil_div(count, Kind::kMostRows);
    if (count == 0) continue;
    // Tiles of nearly equal height. A single tile processes all panels; several take turns on some panels at a time.
    const int64_t height = count / tiles, higher = count % tiles;
    const int64_t at_once = tiles == 1 ? last_panel - first_panel : kPanelsOfMany;
    for (int64_t panel = first_panel; panel < last_panel; panel += at_once) {
      const int64_t panels = std::min(at_once, last_panel - panel);
      const Pair* of_tile = pairs;
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t rows = height + (i < higher);
        Int8Tile tile;
        tile.panel_bytes = work.panel_bytes();
        tile.panels = work.layer.experts + (expert * work.panels + panel) * tile.panel_bytes;
        tile.groups = work.groups;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t row = of_tile[r].row;
          tile.rows[r] = p.numbers + row * p.number_stride;
          tile.row_scales[r] = p.row_scales[row];
          tile.gates[r] = p.gates[of_tile[r].index];
          tile.sums[r] = p.sums + row * p.sum_stride + panel * kPanelColumns;
        }
        of_tile += rows;
        const auto of_height = [&]<int kRows>() {
          if constexpr (kRows <= Kind::kMostRows) multiply_rows<Kind, kRows>(tile, panels);
        };
        switch (rows) {
          case 6: of_height.template operator()<6>(); break;
          case 5: of_height.template operator()<5>(); break;
          case 4: of_height.template operator()<4>(); break;
          case 3: of_height.template operator()<3>(); break;
          case 2: of_height.template operator()<2>(); break;
          default: of_height.template operator()<1>();
        }
      }
    }
  }
}

// Processes rows [begin, end) and panels [first_panel, last_panel) in one thread.
template <typename Kind>
void serve(const Int8Work& work, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
  const Int8Layer& layer = work.layer;
  const int64_t top_k = layer.routing.top_k, most = std::min(end - begin, work.chunk_rows);
  const int64_t number_stride = round_up(layer.features, kLineBytes);
  const bool is_direct = work.padded() <= layer.y_stride;
  const int64_t sum_stride = is_direct ? layer.y_stride : work.padded();
  const auto floats = scratch<float>(most * (2 * top_k + 1) + routing_scratch(layer.routing, most));
  const auto chosen = scratch<int32_t>(most * top_k);
  const auto numbers = scratch<uint8_t>(most * number_stride);
  Scratch<float> own_sums;
  if (!is_direct) own_sums = scratch<float>(most * sum_stride);
  PairsByExpert pairs(most, top_k, work.num_experts);
  for (int64_t first = begin; first < end; first += work.chunk_rows) {
    const int64_t rows = std::min(work.chunk_rows, end - first);
    float* const gates = floats.get();
    float* const cosines = gates + rows * top_k;
    float* const row_scales = cosines + rows * top_k;
    if (!layer.is_routed) {
      std::fill_n(gates, rows, 1.0f);
      std::fill_n(chosen.get(), rows, 0);
    } else {
      Routing<float> routing = layer.routing;
      routing.h += first * routing.row_stride;
      routing.gates = gates;
      routing.cosines = cosines;
      routing.experts = chosen.get();
      route_rows(routing, 0, rows, row_scales + rows);
    }
    pairs.list(chosen.get(), 0, rows);
    float* const sums = is_direct ? layer.y + first * sum_stride : own_sums.get();
    const int64_t column = first_panel * kPanelColumns, width = (last_panel - first_panel) * kPanelColumns;
    for (int64_t row = 0; row < rows; ++row) {
      const float* const source = layer.x + (first + row) * layer.x_stride;
      row_scales[row] = Kind::quantize(source, layer.features, number_stride, numbers.get() + row * number_stride);
      std::fill_n(sums + row * sum_stride + column, width, 0.0f);
    }
    const Int8Product product{numbers.get(), number_stride, row_scales, gates, &pairs, sums, sum_stride};
    multiply<Kind>(work, product, first_panel, last_panel);
    if (is_direct) continue;
    const int64_t columns = std::min(width, layer.outputs - column);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(sums + row * sum_stride + column, columns, layer.y + (first + row) * layer.y_stride + column);
    }
  }
}

}  // namespace

void answer(const Int8Layer& layer, int64_t rows) {
  const Int8Work work(layer);
  // Four 8-bit products take the time of one float product.
  const int64_t routed = layer.is_routed ? work.num_experts : 0;
  const int64_t multiplications = rows * (layer.routing.top_k * work.padded() / 4 + routed) * layer.features;
  const Call call;
  const Split split = Split::of(call, rows, multiplications, layer.outputs, work.panels);
  with_int8_kind([&]<typename Kind>(Kind) {
    split.run(rows, work.panels, [&](int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
      serve<Kind>(work, begin, end, first_panel, last_panel);
    });
  });
}

Tensor routed_matmul_int8(
    const Tensor& x_any, const std::optional<Tensor>& memory_any, const Tensor& experts_any, int64_t out_features,
    int64_t k, double temperature) {
  const Checks check("routed_matmul_int8");
  check.dtype("x", x_any, {ScalarType::Float});
  check.shape("x", x_any, {kAnySize, kAnySize}, "rows by features");
  const int64_t rows = x_any.size(0), features = x_any.size(1);
  if (features > kMostInt8Features) {
    check.fail(
        "x has ", features, " features, expected at most ", kMostInt8Features, ": their products are summed in int32");
  }
  if (memory_any) {
    check_routing(check, "x", x_any, *memory_any, k, temperature);
    check.dtype("memory", *memory_any, {ScalarType::Float});
  } else if (k != 1) {
    check.fail("k is ", k, ", expected 1, since memory is None and there is one expert");
  }
  check_out_features(check, out_features);
  check.dtype("experts", experts_any, {ScalarType::Char});
  const int64_t panels = panels_of(out_features), groups = groups_of(features);
  check.shape(
      "experts", experts_any, {memory_any ? memory_any->size(0) : 1, panels, kHeadLines + groups, kLineBytes},
      "what quantize_experts returned for out_features, the features of x and the experts of memory");
  check.same_device("experts", experts_any, "x", x_any);

  Tensor y = new_tensor(ScalarType::Float, {rows, out_features});
  if (rows == 0 || out_features == 0) return y;
  const Tensor x = with_adjacent_features(x_any), experts = dense(experts_any);
  const Tensor memory = memory_any ? dense(*memory_any) : x;
  const auto inverse_norms = scratch<float>(experts.size(0));
  Scratch<float> copies;
  answer(
      Int8Layer{
          .x = data<float>(x),
          .x_stride = x.stride(0),
          .features = features,
          .routing = memory_any ? routing_of<float>(x, memory, k, temperature, inverse_norms.get(), copies)
                                : no_routing<float>(),
          .is_routed = memory_any.has_value(),
          .experts = data<int8_t>(experts),
          .outputs = out_features,
          .y = mutable_data<float>(y),
          .y_stride = out_features,
      },
      rows);
  return y;
}

}  // namespace rbm::cpu
