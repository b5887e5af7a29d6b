// A copy of tensors in host memory, which a thread can write while training goes on.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>

#include "runtime/job/host_mirror.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {

class Snapshot {
 public:
  // Waits for the device as compute.wait() does.
  explicit Snapshot(ComputeContext& compute) : mirror_(compute) {}

  // Copies tensors of this rank's device, behind everything on the compute stream; done on return.
  // The first call allocates and touches the memory, later ones reuse it unless they need more.
  // From a GPU the bytes pass through page-locked pieces.
  void take(std::span<const NamedTensor> tensors);
  // Views of the copies, in the same order; valid until the next take().
  [[nodiscard]] const std::vector<NamedTensor>& tensors() const { return copies_; }

 private:
  HostMirror mirror_;
  std::vector<std::byte> memory_;
  std::vector<NamedTensor> copies_;
};

}  // namespace sluice
