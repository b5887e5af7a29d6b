// Device memory as the host reads and writes it: on a CPU the memory itself, on a GPU a page-locked
// copy. For what goes over MPI or into files beside a pipeline's messages.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/waiter.hpp"

namespace sluice {

class HostMirror {
 public:
  // `interrupt`, polled by every wait for a device (which may wait for other ranks' messages), may
  // be null.
  HostMirror(ComputeContext& compute, Interrupt* interrupt);

  // `bytes` of device memory once everything on the compute stream is done; blocks until then.
  // Valid until the next call. The copy grows where it is larger than any before.
  [[nodiscard]] std::span<std::byte> view(void* data, std::size_t bytes);
  [[nodiscard]] std::span<std::byte> view(const Tensor& tensor) {
    return view(tensor.data, tensor.spec.bytes());
  }
  [[nodiscard]] std::span<float> view(std::span<float> values);
  // The same without reading the device: for what the host is about to write.
  [[nodiscard]] std::span<std::byte> blank(void* data, std::size_t bytes);
  [[nodiscard]] std::span<std::byte> blank(const Tensor& tensor) {
    return blank(tensor.data, tensor.spec.bytes());
  }
  // Owns what the last view lies in, given what owns the device memory it is of.
  [[nodiscard]] Owner owner(Owner memory) const;
  [[nodiscard]] StreamView stream() const { return compute_.stream(); }
  // Puts the last view's bytes back, in stream order.
  void write_back();

 private:
  void wait_for_device();

  ComputeContext& compute_;
  Interrupt* interrupt_;
  Waiter waiter_;
  Event passed_;
  std::shared_ptr<HostBuffer> copy_ = std::make_shared<HostBuffer>();
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Several tensors at once, through a mirror each.
class HostMirrors {
 public:
  HostMirrors(ComputeContext& compute, Interrupt* interrupt)
      : compute_(compute), interrupt_(interrupt) {}

  // As HostMirror::view() of every tensor; valid until the next call.
  [[nodiscard]] std::span<const Tensor> view(std::span<const Tensor> tensors);

 private:
  ComputeContext& compute_;
  Interrupt* interrupt_;
  std::deque<HostMirror> mirrors_;
  std::vector<Tensor> tensors_;
};

}  // namespace sluice
