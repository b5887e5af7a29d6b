// Where a rank's buffers come from. On a GPU one block, taken from the device once its size is
// known and then cut up, so that what was planned is there when it is wanted and no step asks the
// device for memory; on a CPU, and before there is a block, each buffer is an allocation of its
// own.
//
// Buffers start at multiples of kBufferAlignment. Those that stay are put at the low end, first
// fit; those that pass at the high end, out of their way. What is given back joins what is free
// beside it. Giving back does not wait for the device: whoever destroys a buffer knows that
// nothing uses it any more, or that only work on the stream of its next user does.
//
// A handle on shared memory: the block lives as long as a handle or a buffer of it, in whatever
// order they go. Handles and buffers of one block are used from one thread.
#pragma once

#include <cstddef>
#include <memory>

#include "comm/device.hpp"

namespace sluice {

class DeviceMemory {
 public:
  enum class Use { kStays, kPasses };

  // Of the CPU.
  DeviceMemory();
  explicit DeviceMemory(Device device);

  [[nodiscard]] Device device() const;
  // Takes the block; nothing on a CPU. Once, else Error(kInternal). Throws OutOfMemory.
  void reserve(std::size_t bytes) const;
  // From the block where it has room, else from the device. Throws OutOfMemory.
  [[nodiscard]] Buffer allocate(std::size_t bytes, Use use = Use::kStays) const;

  struct Figures {
    std::size_t block = 0;  // bytes
    std::size_t used = 0;   // of the block, now
    std::size_t peak = 0;   // the most that was used at once
    // What had no room in the block, all that ever was: buffers and their bytes.
    std::size_t apart = 0, apart_bytes = 0;
  };
  [[nodiscard]] Figures figures() const;

 private:
  std::shared_ptr<MemoryBlock> block_;
};

}  // namespace sluice
