#include "global_memory.h"

#include <algorithm>

#include "failure.h"

namespace ptx {

void GlobalMemory::mark_unwritten(uint64_t begin, uint64_t size) {
  if (size > 0) unwritten_[begin] = {begin + size, std::vector<bool>(size, true)};
}

void GlobalMemory::mark_written(uint64_t begin, uint64_t size) {
  const uint64_t end = begin + size;
  for (auto& [first, stretch] : unwritten_) {
    const uint64_t from = std::max(begin, first), to = std::min(end, stretch.end);
    for (uint64_t byte = from; byte < to; ++byte) stretch.missing[byte - first] = false;
  }
}

void GlobalMemory::begin_launch(std::vector<Region> regions) {
  regions_ = std::move(regions);
  latest_region_ = 0;
  pages_.clear();
  latest_page_ = nullptr;
  latest_page_number_ = ~uint64_t{0};
}

const GlobalMemory::Region& GlobalMemory::region_of(uint64_t address, unsigned size, const char* verb, int lane) {
  if (address % size != 0) {
    throw Failure("misaligned",
                  std::string(verb) + " of " + std::to_string(size) + " bytes at an address that is no multiple of it",
                  lane, address);
  }
  const auto holds = [&](const Region& region) { return region.begin <= address && address + size <= region.end; };
  if (latest_region_ < regions_.size() && holds(regions_[latest_region_])) return regions_[latest_region_];
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (holds(regions_[i])) {
      latest_region_ = i;
      return regions_[i];
    }
  }
  std::string nearest = "no tensor was passed";
  uint64_t distance = ~uint64_t{0};
  for (const Region& region : regions_) {
    const uint64_t away = address < region.begin ? region.begin - address : address + size - region.end;
    if (away < distance) {
      distance = away;
      nearest =
          std::to_string(away) + (address < region.begin ? " bytes before " : " bytes past the end of ") + region.name;
    }
  }
  throw Failure("out of bounds",
                std::string(verb) + " of " + std::to_string(size) + " bytes outside every tensor: " + nearest, lane,
                address);
}

GlobalMemory::Page& GlobalMemory::page_of(uint64_t address) {
  const uint64_t number = address / kPage;
  if (number != latest_page_number_) {
    auto& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    latest_page_ = page.get();
    latest_page_number_ = number;
  }
  return *latest_page_;
}

std::string GlobalMemory::described(uint64_t address, const Region& region) const {
  return "byte " + std::to_string(address - region.begin) + " of " + region.name;
}

void GlobalMemory::read(uint64_t address, unsigned size, int64_t block, int lane) {
  const Region& region = region_of(address, size, "load", lane);
  const auto me = static_cast<int32_t>(block + 1);
  Page& page = page_of(address);  // an access is aligned to its size, so it is within one page
  for (unsigned i = 0; i < size; ++i) {
    const uint64_t place = (address + i) % kPage;
    const int32_t writer = page.writer[place];
    int32_t& reader = page.reader[place];
    if (writer != 0 && writer != me) {
      throw Failure(
          "race between blocks",
          "load of " + described(address + i, region) + ", which block " + std::to_string(writer - 1) + " writes", lane,
          address);
    }
    reader = reader == 0 || reader == me ? me : kSeveral;
  }
  if (unwritten_.empty()) return;
  auto stretch = unwritten_.upper_bound(address);
  if (stretch == unwritten_.begin()) return;
  --stretch;
  for (uint64_t byte = address; byte < std::min(address + size, stretch->second.end); ++byte) {
    if (stretch->second.missing[byte - stretch->first]) {
      throw Failure("unwritten", "load of " + described(byte, region) + ", which nobody wrote", lane, address);
    }
  }
}

void GlobalMemory::write(uint64_t address, unsigned size, int64_t block, int lane) {
  const Region& region = region_of(address, size, "store", lane);
  const auto me = static_cast<int32_t>(block + 1);
  Page& page = page_of(address);
  for (unsigned i = 0; i < size; ++i) {
    const uint64_t place = (address + i) % kPage;
    int32_t& writer = page.writer[place];
    const int32_t reader = page.reader[place];
    if (writer != 0 && writer != me) {
      throw Failure(
          "race between blocks",
          "store to " + described(address + i, region) + ", which block " + std::to_string(writer - 1) + " writes too",
          lane, address);
    }
    if (reader != 0 && reader != me) {
      const std::string who =
          reader == kSeveral ? "several blocks read" : "block " + std::to_string(reader - 1) + " reads";
      throw Failure("race between blocks", "store to " + described(address + i, region) + ", which " + who, lane,
                    address);
    }
    writer = me;
  }
  if (unwritten_.empty()) return;
  auto stretch = unwritten_.upper_bound(address);
  if (stretch == unwritten_.begin()) return;
  --stretch;
  for (uint64_t byte = address; byte < std::min(address + size, stretch->second.end); ++byte) {
    stretch->second.missing[byte - stretch->first] = false;
  }
}

}  // namespace ptx
