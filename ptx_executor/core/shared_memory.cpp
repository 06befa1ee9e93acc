#include "shared_memory.h"

#include <bit>
#include <cstring>

#include "failure.h"

namespace ptx {

SharedMemory::SharedMemory(uint32_t size, bool strict_wgmma)
    : data_(size + kChunk), bytes_(size), matrix_reads_(size / kChunk + 1), strict_wgmma_(strict_wgmma) {}

void SharedMemory::check_range(uint32_t address, unsigned size, const char* verb, int lane) const {
  const std::string what = std::string(verb) + " of " + std::to_string(size) + " bytes of shared memory";
  if (address % size != 0)
    throw Failure("misaligned", what + " at an address that is no multiple of it", lane, address);
  if (address < kBase || address - kBase + size > bytes_.size()) {
    throw Failure("out of bounds",
                  what + ": the block has " + std::to_string(bytes_.size()) + ", from " + hexadecimal(kBase) + " on",
                  lane, address);
  }
}

void SharedMemory::check_write(const Byte& byte, const uint8_t* value, uint32_t address, const char* verb,
                               Toucher by) const {
  const auto race = [&](const std::string& with) {
    throw Failure("race between warps",
                  std::string(verb) + " to shared memory that " + with + " without a barrier between", by.lane,
                  address);
  };
  if (byte.copying) {
    throw Failure(
        "copy not waited for",
        std::string(verb) + " to shared memory that a cp.async of warp " + std::to_string(byte.writer) + " still fills",
        by.lane, address);
  }
  const bool same = value != nullptr && *value == data_[address - kBase];
  if (byte.written && byte.writer == by.warp && byte.write_tick == by.tick && !same) {
    throw Failure("race between lanes",
                  std::string(verb) + " to shared memory where another lane stores another value at the same time",
                  by.lane, address);
  }
  if (const uint32_t others = byte.writers & ~(1u << by.warp); byte.write_epoch == epoch_ && others != 0 && !same) {
    race("warp " + std::to_string(std::countr_zero(others)) + " wrote");
  }
  if (const uint32_t others = byte.readers & ~(1u << by.warp); byte.read_epoch == epoch_ && others != 0) {
    race("warp " + std::to_string(std::countr_zero(others)) + " read");
  }
  if (matrix_reads_[(address - kBase) / kChunk] != 0) {
    throw Failure("wgmma not waited for", std::string(verb) + " to shared memory that a wgmma still reads", by.lane,
                  address);
  }
}

const uint8_t* SharedMemory::read(uint32_t address, unsigned size, Toucher by) {
  check_range(address, size, "load", by.lane);
  const uint32_t first = address - kBase;
  for (uint32_t i = first; i < first + size; ++i) {
    Byte& byte = bytes_[i];
    if (byte.copying) {
      throw Failure("copy not waited for",
                    "load of shared memory that a cp.async of warp " + std::to_string(byte.writer) + " still fills",
                    by.lane, address);
    }
    if (!byte.written) throw Failure("unwritten", "load of shared memory that nobody wrote", by.lane, kBase + i);
    if (byte.write_epoch == epoch_ && (byte.writers >> by.warp & 1) == 0) {
      throw Failure(
          "race between warps",
          "load of shared memory that warp " + std::to_string(byte.writer) + " wrote without a barrier between",
          by.lane, address);
    }
    if (byte.read_epoch != epoch_) {
      byte.read_epoch = epoch_;
      byte.readers = 0;
    }
    byte.readers |= 1u << by.warp;
  }
  return &data_[first];
}

void SharedMemory::write(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by) {
  check_range(address, size, "store", by.lane);
  const uint32_t first = address - kBase;
  for (uint32_t i = 0; i < size; ++i) {
    Byte& byte = bytes_[first + i];
    check_write(byte, bytes + i, address + i, "store", by);
    byte.writers = (byte.write_epoch == epoch_ ? byte.writers : 0) | 1u << by.warp;
    byte.write_epoch = epoch_;
    byte.write_tick = by.tick;
    byte.writer = static_cast<uint8_t>(by.warp);
    byte.written = true;
    byte.copied = false;
  }
  std::memcpy(&data_[first], bytes, size);
}

void SharedMemory::begin_copy(uint32_t address, unsigned size, Toucher by) {
  check_range(address, size, "cp.async", by.lane);
  for (uint32_t i = address - kBase; i < address - kBase + size; ++i) {
    check_write(bytes_[i], nullptr, kBase + i, "cp.async", by);
    bytes_[i].copying = true;
    bytes_[i].writer = static_cast<uint8_t>(by.warp);
  }
}

void SharedMemory::land_copy(uint32_t address, const uint8_t* bytes, unsigned size, Toucher by) {
  for (uint32_t i = address - kBase; i < address - kBase + size; ++i) bytes_[i].copying = false;
  write(address, bytes, size, by);
  for (uint32_t i = address - kBase; i < address - kBase + size; ++i) bytes_[i].copied = true;
}

void SharedMemory::fail_unfenced(uint32_t address, Toucher by, const Byte& byte) const {
  throw Failure("proxy fence",
                "wgmma reads shared memory that warp " + std::to_string(byte.writer) +
                    " wrote, with no fence.proxy.async after it",
                by.lane, address);
}

}  // namespace ptx
