#include "comm/device.hpp"

#include <cstdlib>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "comm/error.hpp"

namespace sluice {

namespace {

void require_cpu(const Device& device) {
  if (device.kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kDevice,
                "device " + to_string(device) + " is not in this build; it has: cpu");
  }
}

// Large buffers ask for huge pages where the system leaves that to the program: a step walks
// tens of megabytes once, and page walks are a good part of what that costs.
std::byte* allocate_host(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kBufferAlignment;
  const std::size_t rounded = round_up(bytes, alignment);
  if (rounded < bytes) return nullptr;  // wrapped around
  void* data = std::aligned_alloc(alignment, rounded);
#ifdef __linux__
  if (data != nullptr && alignment == kHugePage) {
    static_cast<void>(madvise(data, rounded, MADV_HUGEPAGE));  // advice: may be refused
  }
#endif
  return static_cast<std::byte*>(data);
}

}  // namespace

std::string to_string(const Device& device) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "unknown device";
}

void StreamView::synchronize() const {}

Stream::Stream(Device device) : device_(device) { require_cpu(device); }

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(native_, other.native_);
  return *this;
}

Stream::~Stream() = default;

Event::Event(Device device) { require_cpu(device); }

Event& Event::operator=(Event&& other) noexcept {
  std::swap(native_, other.native_);
  return *this;
}

Event::~Event() = default;

void Event::record(StreamView /*stream*/) {}

bool Event::done() const { return true; }

Buffer::Buffer(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
  require_cpu(device);
  if (bytes == 0) {
    return;
  }
  data_ = allocate_host(bytes);
  if (data_ == nullptr) {
    throw Error(ErrorCode::kDevice, "cannot allocate " + std::to_string(bytes) + " bytes on " +
                                        to_string(device) + ": out of memory");
  }
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    std::free(data_);
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Buffer::~Buffer() { std::free(data_); }

}  // namespace sluice
