#include "runtime/group/host_mirror.hpp"

#include <limits>
#include <utility>

namespace sluice {

PolledDeviceWait::PolledDeviceWait(Interrupt& interrupt)
    : interrupt_(interrupt), waiter_(std::numeric_limits<int>::max()) {}

void PolledDeviceWait::until(const Event& event) {
  wait_until(waiter_, &interrupt_, {WaitSubject::What::kDevice}, [&] { return event.done(); });
}

std::span<std::byte> HostMirror::writable_host_copy(void* data, std::size_t bytes) {
  data_ = data;
  bytes_ = bytes;
  if (compute_.device().kind == DeviceKind::kCpu) return {static_cast<std::byte*>(data), bytes};
  compute_.wait();  // the last write_back() may still read the copy
  if (copy_->size() < bytes) copy_ = std::make_shared<HostBuffer>(compute_.device(), bytes);
  return {copy_->data(), bytes};
}

std::span<std::byte> HostMirror::read_back(void* data, std::size_t bytes) {
  const std::span<std::byte> host = writable_host_copy(data, bytes);
  if (bytes > 0 && host.data() != data) {
    copy_async(host.data(), data, bytes, compute_.stream());
    compute_.wait();
  }
  return host;
}

std::span<float> HostMirror::read_back(std::span<float> values) {
  const std::span<std::byte> bytes = read_back(values.data(), values.size_bytes());
  return {reinterpret_cast<float*>(bytes.data()), values.size()};
}

KeepAlive HostMirror::owner(KeepAlive memory) const {
  return compute_.device().kind == DeviceKind::kCpu ? std::move(memory) : copy_;
}

void HostMirror::write_back() {
  if (compute_.device().kind == DeviceKind::kCpu) return;
  copy_async(data_, copy_->data(), bytes_, compute_.stream());
}

}  // namespace sluice
