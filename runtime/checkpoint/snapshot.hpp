// A copy of tensors in host memory, which a thread can write while training goes on.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/weights/weights.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {

// What a snapshot takes of a rank: a tensor, or its parts of one that is divided.
struct TakenTensor {
  std::string name;
  Tensor tensor;  // in memory of this rank's device
  TensorSpec whole;
  int holder = 0;  // the tensor rank whose snapshot has the whole
  // [tensor rank] what each has of it; empty: the holder has all of it.
  std::vector<std::vector<PlacedPart>> parts = {};
};

class Snapshot {
 public:
  // Waits for the device as compute.wait() does. `sharers`: the tensor ranks.
  Snapshot(ComputeContext& compute, Collectives& sharers) : mirror_(compute), sharers_(sharers) {}

  // Collective over the sharers of parts, which take the same ones in the same order. Copies
  // tensors behind everything on the compute stream; done on return. The first call allocates and
  // touches the memory; later ones reuse it unless they need more. Bytes from a GPU and from other
  // ranks pass through pieces of at most 32 MiB. `before` is called before each tensor is read.
  void take(std::span<const TakenTensor> tensors,
            const std::function<void(const TakenTensor&)>& before = {});
  // Views of the copies that this rank holds, in the same order; valid until the next take().
  [[nodiscard]] const std::vector<NamedTensor>& tensors() const { return copies_; }

 private:
  [[nodiscard]] int rank() const { return sharers_.communicator().rank(); }
  void hold(const TakenTensor& taken, std::byte* to);
  void send(const TakenTensor& taken);

  HostMirror mirror_;
  Collectives& sharers_;
  std::vector<std::byte> memory_;
  std::vector<NamedTensor> copies_;
};

}  // namespace sluice
