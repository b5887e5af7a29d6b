#include "comm/device/partial_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <sluice/error.hpp>

#include "comm/device/cuda_calls.hpp"
#include "comm/device/host_pages.hpp"

namespace sluice {

namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// What lies between the first and the last whole unit of a range.
struct WholeUnits {
  std::size_t begin, bytes;

  WholeUnits(const PartialMemory::Range& range, std::size_t unit)
      : begin(round_up(range.begin, unit)) {
    const std::size_t end = (range.begin + range.bytes) / unit * unit;
    bytes = end > begin ? end - begin : 0;
  }
};

void check_ranges(std::size_t bytes, std::span<const PartialMemory::Range> ranges) {
  std::size_t end = 0;
  for (const PartialMemory::Range& range : ranges) {
    if (range.begin < end || range.begin > bytes || range.bytes > bytes - range.begin ||
        range.slot < 0) {
      throw Error(ErrorCode::kInternal, "a range of " + std::to_string(range.bytes) + " bytes at " +
                                            std::to_string(range.begin) + " in slot " +
                                            std::to_string(range.slot) +
                                            " follows one that ends at " + std::to_string(end) +
                                            " in memory of " + std::to_string(bytes) + " bytes");
    }
    end = range.begin + range.bytes;
  }
}

// On a GPU: the n-th units of all ranges of a slot share memory, the rest has its own.
std::vector<cuda::Mapping> mappings_for(std::size_t bytes,
                                        std::span<const PartialMemory::Range> ranges) {
  constexpr std::size_t kUnit = cuda::kMappingUnit;
  std::vector<cuda::Mapping> mappings;
  std::map<int, std::vector<std::size_t>> slots;  // [slot][n] -> backing
  std::size_t end = 0, backings = 0;
  const auto map_own = [&](std::size_t until) {
    if (until > end) mappings.push_back({until - end, backings++});
    end = std::max(end, until);
  };
  for (const PartialMemory::Range& range : ranges) {
    const WholeUnits whole(range, kUnit);
    if (whole.bytes == 0) continue;
    map_own(whole.begin);
    std::vector<std::size_t>& units = slots[range.slot];
    for (std::size_t n = 0; n < whole.bytes / kUnit; ++n) {
      if (n == units.size()) units.push_back(backings++);
      mappings.push_back({kUnit, units[n]});
    }
    end += whole.bytes;
  }
  map_own(round_up(bytes, kUnit));
  return mappings;
}

}  // namespace

PartialMemory::PartialMemory(Device device, std::size_t bytes, std::vector<Range> ranges)
    : ranges_(std::move(ranges)), bytes_(bytes) {
  require_device(device);
  check_ranges(bytes, ranges_);
  if (bytes == 0) return;
  if (device.kind == DeviceKind::kCuda) {
    std::byte* const data = cuda::map_memory(device.index, mappings_for(bytes, ranges_));
    mapped_ = {data, Unmap{device.index, round_up(bytes, cuda::kMappingUnit)}};
    return;
  }
  buffer_ = Buffer(device, bytes + std::min(page_bytes(), SIZE_MAX - bytes));
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    drop(i);  // malloc may have used it before
    for (const std::size_t border : {ranges_[i].begin, ranges_[i].begin + ranges_[i].bytes}) {
      forbid_huge_page(border);
    }
  }
}

// The system would bring, or make, one with memory of both sides.
void PartialMemory::forbid_huge_page(std::size_t border) const {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(data());
  const std::uintptr_t page = (begin + border) / kHugePage * kHugePage;
  const std::uintptr_t first = std::max(page, begin);
  const std::uintptr_t end = std::min(page + kHugePage, begin + round_up(bytes_, page_bytes()));
  if (page == begin + border || first >= end) return;
  static_cast<void>(madvise(data() + (first - begin), end - first, MADV_NOHUGEPAGE));
}

std::byte* PartialMemory::data() const {
  if (mapped_ != nullptr) return mapped_.get();
  const auto address = reinterpret_cast<std::uintptr_t>(buffer_.data());
  return buffer_.data() + (round_up(address, page_bytes()) - address);
}

void PartialMemory::drop(std::size_t range) {
  if (range >= ranges_.size()) {
    throw Error(ErrorCode::kInternal, "range " + std::to_string(range) + " of " +
                                          std::to_string(ranges_.size()) + " is dropped");
  }
  if (buffer_.data() == nullptr) return;
  give_back_pages({data() + ranges_[range].begin, ranges_[range].bytes});
}

std::size_t PartialMemory::bytes_for(DeviceKind kind, std::size_t bytes,
                                     std::span<const Range> ranges) {
  check_ranges(bytes, ranges);
  const std::size_t unit = kind == DeviceKind::kCuda ? cuda::kMappingUnit : page_bytes();
  std::size_t total = round_up(bytes, unit);
  std::map<int, std::size_t> slots;  // the longest range
  for (const Range& range : ranges) {
    const WholeUnits whole(range, unit);
    total -= whole.bytes;
    slots[range.slot] = std::max(slots[range.slot], whole.bytes);
  }
  if (kind == DeviceKind::kCuda) {
    for (const auto& [slot, longest] : slots) total += longest;
  }
  return total;
}

void PartialMemory::Unmap::operator()(std::byte* data) const noexcept {
  cuda::unmap_memory(index, data, bytes);
}

}  // namespace sluice
