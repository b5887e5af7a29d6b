#include <sys/mman.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/device/cuda_calls.hpp"

namespace sluice {

namespace {

bool is_cuda(const Device& device) { return device.kind == DeviceKind::kCuda; }

// Large buffers use huge pages where the system leaves that to the program: a step reads tens of
// megabytes once, and page walks are a large part of that cost. What does not fill a huge page has
// small ones, so that no memory is taken that nobody asked for.
std::byte* allocate_cpu(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kBufferAlignment;
  const std::size_t rounded = round_up(bytes, alignment);
  const bool fits = rounded % alignment == 0;  // not the largest number: round_up()
  void* data = fits ? std::aligned_alloc(alignment, rounded) : nullptr;
  if (data == nullptr) {
    throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes on cpu: out of memory");
  }
  if (alignment == kHugePage) {
    const std::size_t filled = bytes / kHugePage * kHugePage;
    static_cast<void>(madvise(data, filled, MADV_HUGEPAGE));  // advice: may be refused
    static_cast<void>(
        madvise(static_cast<std::byte*>(data) + filled, rounded - filled, MADV_NOHUGEPAGE));
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

std::string to_string(const Device& device) {
  return is_cuda(device) ? "cuda:" + std::to_string(device.index) : "cpu";
}

Device parse_device(std::string_view text) {
  constexpr std::string_view kPrefix = "cuda:";
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::kCuda, 0};
  int index = 0;
  if (text.starts_with(kPrefix)) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kPrefix.size(), end, index);
    if (error == std::errc() && stop == end && index >= 0) return {DeviceKind::kCuda, index};
  }
  throw Error(ErrorCode::kUsage, "unknown device '" + std::string(text) +
                                     "'; legal: cpu, cuda, cuda:<index> such as cuda:1");
}

int device_count(DeviceKind kind) {
  return kind == DeviceKind::kCpu ? 1 : cuda::count_devices(nullptr);
}

std::string no_gpu_reason() {
  std::string reason;
  static_cast<void>(cuda::count_devices(&reason));
  return reason;
}

DeviceProperties properties_of(Device device) {
  return is_cuda(device) ? cuda::read_properties(device.index) : DeviceProperties{};
}

void require_device(Device device) {
  if (is_cuda(device)) cuda::require_usable(device.index);
}

void open_device(Device device) {
  require_device(device);
  use_device(device);
  if (is_cuda(device)) cuda::require_code(device.index);
}

void use_device(Device device) {
  if (is_cuda(device)) cuda::select(device.index);
}

void StreamView::synchronize() const {
  if (native_ != nullptr) cuda::synchronize(native_);
}

void StreamView::wait(const Event& event) const {
  if (native_ != nullptr && event.native() != nullptr) cuda::wait(native_, event.native());
}

Stream::Stream(Device device, StreamPriority priority) : device_(device) {
  if (!is_cuda(device)) return;
  require_device(device);
  native_.reset(cuda::make_stream(device.index, priority));
}

void Stream::Destroy::operator()(void* native) const noexcept { cuda::destroy_stream(native); }

Event::Event(Device device, bool timed) {
  if (!is_cuda(device)) return;
  require_device(device);
  native_.reset(cuda::make_event(device.index, timed));
}

void Event::Destroy::operator()(void* native) const noexcept { cuda::destroy_event(native); }

void Event::record(StreamView stream) {
  if (native_ != nullptr) cuda::record(native(), stream.native());
}

double Event::seconds_since(const Event& earlier) const {
  return native_ == nullptr ? 0 : cuda::seconds_between(earlier.native(), native());
}

bool Event::done() const { return native_ == nullptr || cuda::done(native()); }

Buffer::Buffer(Device device, std::size_t bytes) : data_(nullptr, {device, {}}), bytes_(bytes) {
  require_device(device);
  if (bytes == 0) return;
  data_.reset(is_cuda(device) ? cuda::allocate(device.index, bytes) : allocate_cpu(bytes));
}

HostBuffer::HostBuffer(Device device, std::size_t bytes) : data_(nullptr, {device}), bytes_(bytes) {
  require_device(device);
  if (bytes == 0) return;
  data_.reset(is_cuda(device) ? cuda::allocate_host(device.index, bytes) : allocate_cpu(bytes));
}

void HostBuffer::Free::operator()(std::byte* data) const noexcept {
  if (is_cuda(device)) {
    cuda::release_host(data);
  } else {
    std::free(data);
  }
}

void copy_async(void* to, const void* from, std::size_t bytes, StreamView stream) {
  if (bytes == 0 || to == from) return;
  if (stream.native() != nullptr) {
    cuda::copy(to, from, bytes, stream.native());
  } else {
    std::memcpy(to, from, bytes);
  }
}

void fill_zero_async(void* to, std::size_t bytes, StreamView stream) {
  if (bytes == 0) return;
  if (stream.native() != nullptr) {
    cuda::fill_zero(to, bytes, stream.native());
  } else {
    std::memset(to, 0, bytes);
  }
}

void copy_now(Device device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0 || to == from) return;
  if (is_cuda(device)) {
    cuda::copy_blocking(device.index, to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace sluice
