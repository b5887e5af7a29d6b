// Device memory at fixed addresses of which ranges are present part of the time, such as parameters
// that are gathered before each use (ZeRO's third stage, arXiv:1910.02054). Internal to Sluice.
//
// All of [data(), data() + size()) may be read and written at any time. What lies outside the
// ranges persists. The content of a range is undefined at the start, after drop() and, on a GPU,
// after a write to another range of its slot: a range is written before it is read again.
//
// * On a CPU a range takes memory from a write to the next drop(). Slots have no meaning.
// * On a GPU the ranges of a slot share memory, which is mapped at the addresses of each of them
//   and present from construction to destruction. A write to one range must have ended before work
//   on another one of its slot starts, by the order of a stream or an event. No mapping ever
//   changes, so graphs and streams need no care. CUDA's IPC cannot hand the memory to another
//   process.
//
// Only whole pages, or whole units of 2 MiB on a GPU, of a range come and go or are shared; the
// rest of a range persists. Throws OutOfMemory, and Error(kInternal) for wrong ranges.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <sluice/device.hpp>

namespace sluice {

class PartialMemory {
 public:
  struct Range {
    std::size_t begin, bytes;  // from data() on
    int slot;                  // from 0 on
  };

  PartialMemory() = default;
  // Uninitialised. Ranges ascend and do not overlap.
  PartialMemory(Device device, std::size_t bytes, std::vector<Range> ranges);

  [[nodiscard]] std::byte* data() const;  // null where there are no bytes
  [[nodiscard]] std::size_t size() const { return data() == nullptr ? 0 : bytes_; }

  // Gives the memory of ranges[range] back to the system; does nothing on a GPU. Not ordered with
  // other threads' use of the range.
  void drop(std::size_t range);

  // Memory that it takes: on a GPU always, on a CPU while no range is present. There a range that
  // is present takes its own bytes more. No huge page lies across the border of a range.
  [[nodiscard]] static std::size_t bytes_for(DeviceKind kind, std::size_t bytes,
                                             std::span<const Range> ranges);

 private:
  void forbid_huge_page(std::size_t border) const;

  struct Unmap {
    int index;
    std::size_t bytes;
    void operator()(std::byte* data) const noexcept;
  };

  std::vector<Range> ranges_;
  std::size_t bytes_ = 0;
  Buffer buffer_;                             // on a CPU, a page longer
  std::unique_ptr<std::byte, Unmap> mapped_;  // on a GPU
};

}  // namespace sluice
