// Device primitives: devices, streams, events, buffers. On the CPU a stream runs what is put on it
// at once and an event is done when it is made; the types are what a GPU fills in.
//
// Owners (Stream, Event, Buffer) are move-only and null their source; StreamView and pointers do
// not own. Nothing here throws in a destructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace sluice {

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

[[nodiscard]] std::string to_string(const Device& device);  // "cpu", "cuda:1"

// Non-owning; null on the CPU.
class StreamView {
 public:
  constexpr StreamView() = default;
  constexpr explicit StreamView(void* native) : native_(native) {}
  [[nodiscard]] void* native() const { return native_; }
  // Blocks the host until everything put on the stream so far is done.
  void synchronize() const;

 private:
  void* native_ = nullptr;
};

class Stream {
 public:
  explicit Stream(Device device);
  Stream(Stream&& other) noexcept
      : device_(other.device_), native_(std::exchange(other.native_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();
  [[nodiscard]] StreamView view() const { return StreamView(native_); }
  [[nodiscard]] Device device() const { return device_; }

 private:
  Device device_;
  void* native_ = nullptr;
};

// A point in a stream. A default-made event is done.
class Event {
 public:
  Event() = default;
  explicit Event(Device device);
  Event(Event&& other) noexcept : native_(std::exchange(other.native_, nullptr)) {}
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  void record(StreamView stream);
  // Does not block.
  [[nodiscard]] bool done() const;

 private:
  void* native_ = nullptr;
};

// Every buffer starts at a multiple of this many bytes, so that no result depends on alignment.
inline constexpr std::size_t kBufferAlignment = 256;

// Uninitialised memory of a device. Throws Error(kDevice) naming the size where it cannot be had.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, std::size_t bytes);
  Buffer(Buffer&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] Device device() const { return device_; }

 private:
  Device device_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

[[nodiscard]] constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace sluice
