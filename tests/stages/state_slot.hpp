// The memory of one micro-batch in flight, for a test that calls a stage itself. It starts as NaN.
#pragma once

#include <cstddef>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/stage.hpp>

#include "stages/network/state_bytes.hpp"

namespace sluice::testing {

class StateSlot {
 public:
  StateSlot(Device device, const StageDescription& description)
      : bytes_{description.state_bytes_until_input, description.state_bytes_until_weight,
               description.gradient_bytes_until_weight},
        memory_(device, bytes_.slot()) {
    const std::vector<std::byte> nan(memory_.size(), std::byte{0xFF});
    copy_now(device, memory_.data(), nan.data(), nan.size());
  }
  [[nodiscard]] std::size_t size() const { return memory_.size(); }
  [[nodiscard]] StageContext::State state() const { return bytes_.cut(memory_.data(), 0); }

 private:
  StateBytes bytes_;
  Buffer memory_;
};

}  // namespace sluice::testing
