// Compares the products of csrc/cpu/*_amx.h with those of AVX512-BF16 on a processor with AMX, as Bochs emulates it.
// Linux does not give AMX to programs there, because Bochs lacks the register that lets it (XFD), so this program is
// its own kernel: boot.S enables the registers and calls bare_main, and results go to the serial port.
#include <cmath>
#include <cstddef>
#include <vector>

#include "../../csrc/cpu/expert_matmul_weight.cpp"
#include "../../csrc/cpu/expert_panel_amx.h"
#include "../../csrc/cpu/packed_experts_amx.h"

// --- What a C library would provide ---------------------------------------------------------------------------------

extern "C" {
void* memcpy(void* target, const void* source, size_t size) {
  void* const begin = target;
  asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(size)::"memory");
  return begin;
}
void* memmove(void* target, const void* source, size_t size) {
  auto* const to = static_cast<char*>(target);
  const auto* const from = static_cast<const char*>(source);
  if (to < from) {
    for (size_t i = 0; i < size; ++i) const_cast<volatile char*>(to)[i] = from[i];
  } else {
    while (size-- > 0) const_cast<volatile char*>(to)[size] = from[size];
  }
  return target;
}
void* memset(void* target, int value, size_t size) {
  void* const begin = target;
  asm volatile("rep stosb" : "+D"(target), "+c"(size) : "a"(value) : "memory");
  return begin;
}
}

namespace {

char heap[64 << 20];
size_t used = 0;  // freed at the start of each problem

constexpr uint16_t kSerial = 0x3f8, kLineControl = kSerial + 3, kLineStatus = kSerial + 5;

void write_port(uint16_t port, uint8_t value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }

uint8_t read_port(uint16_t port) {
  uint8_t value;
  asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

void put(const char* text) {
  for (; *text != 0; ++text) {
    while ((read_port(kLineStatus) & 0x20) == 0) {
    }
    write_port(kSerial, static_cast<uint8_t>(*text));
  }
}

void put(int64_t number) {
  char digits[24];
  int first = 23;
  digits[first] = 0;
  do {
    digits[--first] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number > 0);
  put(digits + first);
}

}  // namespace

void* operator new(size_t size) {
  void* const found = heap + used;
  used += (size + 127) / 64 * 64;
  return found;
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void*) noexcept {}
void operator delete[](void*) noexcept {}
void operator delete(void*, size_t) noexcept {}
void operator delete[](void*, size_t) noexcept {}

// --- The comparisons ------------------------------------------------------------------------------------------------

namespace rbm::cpu {
namespace {

struct Random {
  uint64_t state = 88172645463325252ull;
  uint32_t operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
} draw;

int64_t compared = 0, wrong = 0;

// Rows, experts and experts of a row. Expert 2 has all rows, expert 0 more than 32 of them, and expert 1 the rest.
constexpr int64_t kRows = 70, kExperts = 3, kTopK = 2;

struct Problem {
  int64_t features, outputs;
  bool integers;  // small ones, for which all sums are exact

  std::vector<BFloat16> numbers(int64_t count) const {
    std::vector<BFloat16> drawn(count);
    for (auto& number : drawn) {
      number = integers ? static_cast<float>(static_cast<int>(draw() % 7) - 3)
                        : static_cast<float>(static_cast<int>(draw() % 20001) - 10000) * 1e-4f;
    }
    return drawn;
  }

  void compare(const char* what, const std::vector<float>& found, const std::vector<float>& expected) const {
    bool same = true;
    for (size_t i = 0; i < found.size(); ++i) {
      const float bound = integers ? 0 : 2e-4f * (1 + std::fabs(expected[i]));
      same = same && std::fabs(found[i] - expected[i]) <= bound;
    }
    ++compared;
    if (same) return;
    ++wrong;
    put("wrong: ");
    put(what);
    put(", features ");
    put(features);
    put(", outputs ");
    put(outputs);
    put("\n");
  }
};

template <typename Work>
void with_amx(const Work& work) {
  AmxTiles::begin();
  work(AmxTiles{});
  AmxTiles::end();
}

void compare_all(const Problem& problem) {
  used = 0;
  const int64_t features = problem.features, outputs = problem.outputs, steps = operands_of<BFloat16Pair>(features);
  const int64_t padded = round_up(outputs, 16), panels = ceil_div(padded, 64);
  const auto x = problem.numbers(kRows * features), grad = problem.numbers(kRows * outputs);
  const auto weight = problem.numbers(kExperts * outputs * features), bias = problem.numbers(kExperts * outputs);
  std::vector<float> gates(kRows * kTopK);
  for (auto& gate : gates) gate = draw() % 2 == 0 ? 0.5f : 0.25f;
  std::vector<int32_t> experts(kRows * kTopK, 2);
  for (int64_t i = 0; i < kRows; ++i) experts[kTopK * i] = draw() % 4 == 0;
  PairsByExpert pairs(kRows, kTopK, kExperts);
  pairs.list(experts.data(), 0, kRows);
  const Unpacked<BFloat16> unpacked{weight.data(), kExperts, features, outputs, outputs * features, 1, features};
  const auto pack = [&](const Bias<BFloat16>& biases, BFloat16* packed) {
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t panel = 0; panel < panels; ++panel) {
        pack_pairs(unpacked, e, panel, biases, reinterpret_cast<BFloat16Pair*>(packed));
      }
    }
  };

  std::vector<BFloat16> packed(kExperts * 2 * steps * padded);
  pack({}, packed.data());
  const auto bias_of_rows = problem.numbers(kExperts * features);
  for (const bool with_gates : {false, true}) {
    std::vector<float> expected(kRows * outputs), found(kRows * outputs);
    std::vector<float> expected_gates(kRows * kTopK), found_gates(kRows * kTopK);
    Product<BFloat16, BFloat16Pair> product{
        x.data(),
        features,
        reinterpret_cast<const BFloat16Pair*>(packed.data()),
        with_gates ? bias_of_rows.data() : bias.data(),
        gates.data(),
        experts.data(),
        kRows,
        features,
        outputs,
        kExperts,
        kTopK,
        with_gates,
        grad.data(),
        outputs,
        expected_gates.data(),
        nullptr};
    std::vector<BFloat16Pair> converted(kTileRows * kInnerBlock);
    multiply_panel(product, int64_t{0}, pairs, expected.data(), converted.data());
    product.grad_gates = found_gates.data();
    LeftBlock left(operands_of<BFloat16Pair>(std::min(kInnerBlock, features)));
    with_amx([&](auto tiles) { multiply_panel_amx(tiles, product, int64_t{0}, pairs, found.data(), &left); });
    problem.compare("expert_matmul", found, expected);
    if (with_gates) problem.compare("gradient of the gates", found_gates, expected_gates);
  }

  const int64_t height = packed_rows<BFloat16Pair>(features), even = height - 1;
  std::vector<BFloat16> with_bias(kExperts * height * padded), rows(kRows * even);
  pack({true, bias.data()}, with_bias.data());
  for (int64_t i = 0; i < kRows; ++i) std::copy_n(x.data() + i * features, features, rows.data() + i * even);
  std::vector<float> expected(kRows * padded), found(kRows * padded);
  PackedProduct<BFloat16, BFloat16Pair> product{
      rows.data(),     even,  {with_bias.data(), kExperts, features, outputs}, gates.data(), &pairs, kRows,
      expected.data(), padded};
  multiply_packed(product, int64_t{0}, panels);
  product.sums = found.data();
  LeftBlock left(std::min(kAmxInner, steps));
  with_amx([&](auto tiles) { multiply_packed_amx(tiles, product, int64_t{0}, panels, &left); });
  problem.compare("packed experts", found, expected);

  std::vector<float> weights(kExperts * outputs * features), found_weights(weights.size());
  std::vector<float> biases(kExperts * outputs), found_biases(biases.size());
  WeightGrad<BFloat16> sums{x.data(), features, grad.data(), outputs,        gates.data(),
                            &pairs,   features, outputs,     weights.data(), biases.data()};
  std::vector<BFloat16Pair> gated(kAmxPieceSteps * round_up(outputs, 16)), of_rows(kAmxPieceSteps * (features + 64));
  for (int64_t e = 0; e < kExperts; ++e) sum_expert(sums, e, int64_t{0}, outputs, gated.data(), of_rows.data());
  sums.grad_weight = found_weights.data();
  sums.grad_bias = found_biases.data();
  LeftBlock transposed(kAmxPieceSteps);
  with_amx([&](auto tiles) {
    for (int64_t e = 0; e < kExperts; ++e) {
      sum_expert_amx(tiles, sums, e, int64_t{0}, outputs, gated.data(), of_rows.data(), &transposed);
    }
  });
  problem.compare("gradient of the weights", found_weights, weights);
  problem.compare("gradient of the biases", found_biases, biases);
}

}  // namespace
}  // namespace rbm::cpu

extern "C" void bare_main() {
  using namespace rbm::cpu;
  write_port(kLineControl, 3);  // eight bits
  for (const bool integers : {true, false}) {
    for (const int64_t features : {1, 2, 31, 33, 64, 256, 600, 1029}) {
      for (const int64_t outputs : {1, 16, 40, 64, 96, 131}) compare_all({features, outputs, integers});
    }
  }
  put(compared);
  put(" comparisons, ");
  put(wrong);
  put(" wrong\nend\n");
}
