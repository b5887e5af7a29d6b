// What a pipeline lets a compute context call while it waits or computes. Internal to stages/ and
// runtime/. The calling thread is that of the context.
#pragma once

#include <sluice/device.hpp>

namespace sluice {

// Work that advances while operators compute on a CPU: a pipeline's messages.
class ProgressHook {
 public:
  virtual ~ProgressHook() = default;
  virtual void progress() noexcept = 0;  // does not block
};

// How a host waits for a device whose work may wait for other ranks: a pipeline looks for failures
// meanwhile.
class DeviceWait {
 public:
  virtual ~DeviceWait() = default;
  // Blocks until the event is done. May throw before, which ends the wait.
  virtual void until(const Event& event) = 0;
};

}  // namespace sluice
