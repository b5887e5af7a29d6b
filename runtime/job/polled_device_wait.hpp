// How a pipeline's host waits for its device: it looks for failures of other ranks meanwhile, since
// the device may wait for their messages. One thread.
#pragma once

#include <sluice/compute.hpp>
#include <sluice/device.hpp>

#include "comm/group/waiter.hpp"

namespace sluice {

class PolledDeviceWait final : public DeviceWait {
 public:
  // `interrupt` outlives this; its exception ends a wait.
  explicit PolledDeviceWait(Interrupt& interrupt);
  void until(const Event& event) override;

 private:
  Interrupt& interrupt_;
  Waiter waiter_;
};

}  // namespace sluice
