// Shared memory of a block: its bytes, and for each byte who wrote it, who read it, and since which barrier.
//
// Warps are only ordered by barriers. Between two barriers of the block (an epoch), a byte that one warp accesses must
// not be accessed by another warp, unless both only read, or all writers write the same value: compilers let warps that
// hold copies of a value store it together. The lanes of a warp that store to one address in one instruction must agree
// as well. Asynchronous operations last longer: a copy (cp.async) owns its bytes from when it is issued until it was
// waited for, and a multiplication (wgmma) reads its operands until it was waited for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

class SharedMemory {
 public:
  // First address of a block's shared memory: 0 is not a valid address, and swizzled tiles need 1,024-byte alignment.
  static constexpr uint32_t kBase = 1024;
  // wgmma reads operands in chunks of this many bytes.
  static constexpr uint32_t kChunk = 16;

  // `strict_wgmma`: before wgmma reads what a cp.async wrote, a proxy fence is needed as well.
  SharedMemory(uint32_t size, bool strict_wgmma);

  // Who accesses memory: a warp, at a tick of the launch's clock.
  struct Toucher {
    int warp;
    uint32_t tick;
    int lane;
  };

  // Record an access. Raise Failure for an access that would be an error on a GPU.
  const uint8_t* read(uint32_t address, unsigned size, Toucher by);
  void write(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by);

  // cp.async: from now on the bytes belong to the copy, until it lands.
  void begin_copy(uint32_t address, unsigned size, Toucher by);
  void land_copy(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by);

  // wgmma: reads a chunk through the asynchronous proxy, which sees writes for which `fenced` returns true.
  template <typename Fenced>
  const uint8_t* begin_matrix_read(uint32_t address, Toucher by, Fenced fenced) {
    const uint8_t* bytes = read(address, kChunk, by);
    for (unsigned i = 0; i < kChunk; ++i) {
      const Byte& byte = bytes_[address - kBase + i];
      if (!fenced(byte.writer, byte.write_tick) && (strict_wgmma_ || !byte.copied))
        fail_unfenced(address + i, by, byte);
    }
    ++matrix_reads_[(address - kBase) / kChunk];
    return bytes;
  }
  void end_matrix_read(uint32_t address) { --matrix_reads_[(address - kBase) / kChunk]; }

  // All warps have arrived: earlier accesses are ordered before later ones.
  void barrier() { ++epoch_; }

 private:
  struct Byte {
    uint32_t write_epoch = 0, read_epoch = 0, write_tick = 0;
    uint32_t writers = 0, readers = 0;  // warps, in these epochs
    uint8_t writer = 0;                 // the latest
    bool written = false, copying = false, copied = false;
  };

  void check_range(uint32_t address, unsigned size, const char* verb, int lane) const;
  // `value`: what is written; null: not known yet
  void check_write(const Byte& byte, const uint8_t* value, uint32_t address, const char* verb, Toucher by) const;
  [[noreturn]] void fail_unfenced(uint32_t address, Toucher by, const Byte& byte) const;

  std::vector<uint8_t> data_;
  std::vector<Byte> bytes_;
  std::vector<uint16_t> matrix_reads_;
  bool strict_wgmma_;
  uint32_t epoch_ = 1;
};

}  // namespace ptx
