// Reads a network packed by rbm_kernels/ops/packed_network/form.py into a sequence of bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../checks.h"
#include "int8_tiles.h"
#include "outer_tile.h"

namespace rbm::cpu {

enum class Weights : int64_t { kFloat32 = 0, kInt8 = 1 };
enum class Norm : int64_t { kNone = 0, kAffine = 1, kLayer = 2 };

constexpr int64_t kNetworkMark = 0x33574e4d4252;  // "RBMNW3"
constexpr int64_t kNowhere = -1;
constexpr int64_t kAlignment = 64;

// Sizes of a layer, and the offsets of its parts. form.py writes the same fields in the same order.
struct StoredLayer {
  Weights weights;
  int64_t inputs, outputs, num_experts, top_k;
  int64_t router_features;  // features used for routing: the layer's inputs, or a linear map of them
  int64_t over_all;         // whether the softmax of the gates runs over all experts
  Norm norm;
  int64_t activates;   // whether ReLU follows the norm
  int64_t adds_input;  // whether the layer's input is added then
  int64_t is_unit;     // whether rows are divided by their lengths at the end
  int64_t is_finite;   // whether all float32 weights of experts and router are
  double temperature, eps;
  double negative_slope;  // of ReLU: negative numbers are multiplied by it
  int64_t experts, memory, router, scale, shift;
};

// The parts of a network, each checked to be within its bytes.
class StoredNetwork {
 public:
  StoredNetwork(const Checks& check, const uint8_t* bytes, int64_t size) : check_(check), bytes_(bytes), size_(size) {
    // Parts are at offsets that are multiples of 64. PyTorch aligns its own memory to that, but a view may start
    // anywhere.
    if (reinterpret_cast<uintptr_t>(bytes) % alignof(float) != 0) refuse("begins at an odd address");
    int64_t head[2];
    if (size < static_cast<int64_t>(sizeof(head))) refuse("is too short");
    std::memcpy(head, bytes, sizeof(head));
    if (head[0] != kNetworkMark) refuse("begins with other bytes");
    count_ = head[1];
    if (count_ < 1 ||
        count_ > (size - static_cast<int64_t>(sizeof(head))) / static_cast<int64_t>(sizeof(StoredLayer))) {
      refuse("has another number of layers than it says");
    }
    for (int64_t i = 0; i < count_; ++i) check_layer(i);
  }

  int64_t count() const { return count_; }

  StoredLayer layer(int64_t i) const {
    StoredLayer found;
    std::memcpy(&found, bytes_ + 2 * sizeof(int64_t) + i * sizeof(StoredLayer), sizeof(found));
    return found;
  }

  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(bytes_ + offset);
  }

 private:
  [[noreturn]] void refuse(const char* why) const {
    check_.fail("network ", why, ", expected what pack_network returned in this process: pack it anew");
  }

  void check_layer(int64_t i) const {
    const StoredLayer s = layer(i);
    for (const int64_t size : {s.inputs, s.outputs, s.router_features}) {
      if (size < 1 || size > kMostSize) refuse("has a layer of no size");
    }
    if (s.num_experts < 1 || s.num_experts > kMostSize || s.top_k < 1 || s.top_k > s.num_experts) {
      refuse("has no such experts");
    }
    if (i > 0 && layer(i - 1).outputs != s.inputs) refuse("has layers that do not fit one another");
    if (s.adds_input != 0 && s.inputs != s.outputs) refuse("has a residual connection between different widths");
    if (s.memory == kNowhere && s.num_experts != 1) refuse("has experts and no memory");
    if (s.router == kNowhere && s.router_features != s.inputs) refuse("has no router");
    if (s.weights == Weights::kInt8) {
      if (s.inputs > kMostInt8Features) refuse("has more features than 8-bit products are summed of in int32");
      check_part(s.experts, {s.num_experts, panels_of(s.outputs), kHeadLines + groups_of(s.inputs), kLineBytes}, 1);
    } else {
      check_part(s.experts, {s.num_experts, s.inputs + 1, PackedSizes::of<float>().padded(s.outputs)}, sizeof(float));
    }
    if (s.memory != kNowhere) check_part(s.memory, {s.num_experts, s.router_features}, sizeof(float));
    if (s.router != kNowhere) {
      check_part(s.router, {s.inputs + 1, PackedSizes::of<float>().padded(s.router_features)}, sizeof(float));
    }
    if (s.norm == Norm::kNone) return;
    check_part(s.scale, {s.outputs}, sizeof(float));
    check_part(s.shift, {s.outputs}, sizeof(float));
  }

  void check_part(int64_t offset, std::initializer_list<int64_t> sizes, int64_t bytes) const {
    if (offset < 0 || offset % kAlignment != 0 || offset > size_) refuse("has a part that lies elsewhere");
    const int64_t room = size_ - offset;
    for (const int64_t size : sizes) {
      if (size > room / bytes) refuse("is too short");
      bytes *= size;
    }
  }

  const Checks& check_;
  const uint8_t* bytes_;
  int64_t size_, count_ = 0;
};

}  // namespace rbm::cpu
