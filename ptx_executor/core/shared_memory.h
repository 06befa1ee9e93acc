// Shared memory of a block: its bytes, and for each byte who wrote it, who read it, and since which barrier.
//
// Warps are ordered by barriers alone: between two barriers of the block (an epoch) what one warp touches no other may
// touch, unless both only read, or all that write write the same: compilers let warps that hold copies of a value store
// it together. The lanes of a warp that store at one place in one instruction must agree as well. Asynchronous
// operations reach further: a copy (cp.async) owns its bytes from the moment it is issued until it was waited for, a
// multiplication (wgmma) reads its operands until it was waited for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

class SharedMemory {
 public:
  // Addresses of a block's shared memory begin here: 0 is no valid address, and swizzled tiles want 1,024 bytes.
  static constexpr uint32_t kBase = 1024;
  // wgmma reads operands in stretches of this many bytes.
  static constexpr uint32_t kChunk = 16;

  // `strict_wgmma`: what a cp.async wrote needs a proxy fence as well, before wgmma reads it.
  SharedMemory(uint32_t size, bool strict_wgmma);

  // Who touches: a warp, at a tick of the launch's clock.
  struct Toucher {
    int warp;
    uint32_t tick;
    int lane;
  };

  // Refuse what a GPU would get wrong; note the rest. Raise Failure.
  const uint8_t* read(uint32_t address, unsigned size, Toucher by);
  void write(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by);

  // cp.async: from here on the bytes belong to the copy, until it lands.
  void begin_copy(uint32_t address, unsigned size, Toucher by);
  void land_copy(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by);

  // wgmma: read a chunk through the asynchronous proxy, which sees what `fenced` says was made visible to it.
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

  // All warps have met: what was touched before is ordered before what comes.
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
