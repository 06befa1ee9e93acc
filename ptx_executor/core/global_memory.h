// Global memory: the tensors' own bytes, and for each byte who wrote it and who read it.
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
  // A stretch that a launch may touch: a tensor that was passed to it.
  struct Region {
    uint64_t begin, end;
    std::string name;
  };

  // From now on nobody has written these bytes (torch.empty), or somebody has (an operator of PyTorch).
  void mark_unwritten(uint64_t begin, uint64_t size);
  void mark_written(uint64_t begin, uint64_t size);

  // A launch begins: these regions alone exist, and no block has touched them.
  void begin_launch(std::vector<Region> regions);

  // Refuse an access of `size` bytes by `block` that a GPU would get wrong; note it. Raises Failure.
  void read(uint64_t address, unsigned size, int64_t block, int lane);
  void write(uint64_t address, unsigned size, int64_t block, int lane);

 private:
  static constexpr uint64_t kPage = 4096;
  // Of every byte of a page: 1 + the block that wrote it, that read it (kSeveral: more than one), 0: none.
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
