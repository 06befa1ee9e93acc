// Global memory: the tensors' own bytes, and for each byte which block wrote it and which read it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

class GlobalMemory {
 public:
  // A range that a launch may access: a tensor that was passed to it.
  struct Region {
    uint64_t begin, end;
    std::string name;
  };

  // Marks bytes as uninitialised (torch.empty), or as written (by an operator of PyTorch).
  void mark_unwritten(uint64_t begin, uint64_t size);
  void mark_written(uint64_t begin, uint64_t size);

  // Starts a launch: only these regions exist, and no block has accessed them.
  void begin_launch(std::vector<Region> regions);

  // Records an access of `size` bytes by `block`. Raises Failure for an access that would be an error on a GPU.
  void read(uint64_t address, unsigned size, int64_t block, int lane);
  void write(uint64_t address, unsigned size, int64_t block, int lane);

 private:
  static constexpr uint64_t kPage = 4096;
  // For every byte of a page: 1 + the block that wrote it or read it (kSeveral: more than one), 0: none.
  struct Page {
    int32_t writer[kPage] = {}, reader[kPage] = {};
  };
  static constexpr int32_t kSeveral = -1;
  struct Unwritten {
    uint64_t end;
    std::vector<bool> missing;
  };

  const Region& region_of(uint64_t address, unsigned size, const char* verb, int lane);
  Page& page_of(uint64_t address);
  std::string described(uint64_t address, const Region& region) const;

  std::vector<Region> regions_;
  size_t latest_region_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  uint64_t latest_page_number_ = ~uint64_t{0};
  Page* latest_page_ = nullptr;
  std::map<uint64_t, Unwritten> unwritten_;  // by first byte
};

}  // namespace ptx
