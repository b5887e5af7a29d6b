// Device primitives: devices, streams, events, buffers, copies. On the CPU a stream runs its work
// at once, and an event is done when it is made. On a GPU they are CUDA's: a stream runs its work
// in order while the host continues.
//
// Owners (Stream, Event, Buffer, HostBuffer) are move-only and leave their source empty; StreamView
// and pointers do not own. Destructors do not throw. Failures are Error(kDevice), which names the
// device and the request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#pragma GCC visibility push(default)
namespace sluice {

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

[[nodiscard]] std::string to_string(const Device& device);  // "cpu", "cuda:1"
// "cpu", "cuda" (the first GPU) or "cuda:<index>", else Error(kUsage). require_device() checks
// whether the device exists.
[[nodiscard]] Device parse_device(std::string_view text);

// Whether this build has CUDA; device_count() says whether there is a GPU.
[[nodiscard]] bool built_with_cuda();
// Devices of a kind that this process can use. One CPU; no GPU where the build has no CUDA, the
// machine no GPU, or the driver does not answer (no_gpu_reason()).
[[nodiscard]] int device_count(DeviceKind kind);
// One line; empty where there is a GPU.
[[nodiscard]] std::string no_gpu_reason();

struct DeviceProperties {
  std::string name;             // "NVIDIA H200"; the CPU has none
  std::string identity;         // PCI bus address, the same from every process of a host
  std::size_t memory = 0;       // bytes
  std::size_t free_memory = 0;  // bytes, now
  int major = 0, minor = 0;     // compute capability
  int multiprocessors = 0;
  std::size_t shared_memory = 0;  // bytes of a multiprocessor
  int driver = 0, runtime = 0;    // CUDA versions as CUDA counts them, 13000 for 13.0
};
// Requires that require_device() passes for the device.
[[nodiscard]] DeviceProperties properties_of(Device device);
// Error(kUsage) with the legal choices where this process cannot use the device: a build without
// CUDA, no GPU, an index out of range, a compute capability before 8.0, a driver older than the
// toolkit. Does not initialise the device.
void require_device(Device device);
// For the start of a job: require_device(), use_device(), and a check that this program's kernels
// have code for the device. If not: Error(kUsage) naming the device, what the kernels were compiled
// for and what to do. The driver decides, since older ones compile less. May load kernels.
void open_device(Device device);
// Makes `device` current for the calling thread's CUDA calls. Streams, events and buffers made
// later for it need no further call. Does nothing on the CPU.
void use_device(Device device);

class Event;

// Non-owning; null on the CPU.
class StreamView {
 public:
  constexpr StreamView() = default;
  constexpr explicit StreamView(void* native) : native_(native) {}
  [[nodiscard]] void* native() const { return native_; }
  // Blocks the host until all work put on the stream so far is done.
  void synchronize() const;
  // Work put on the stream from now on runs after the event. Does not block the host.
  void wait(const Event& event) const;

 private:
  void* native_ = nullptr;
};

// What a GPU starts first where work of several streams is ready: a stream of high priority. Work
// that has started goes on.
enum class StreamPriority : std::uint8_t { kNormal, kHigh };

class Stream {
 public:
  explicit Stream(Device device, StreamPriority priority = StreamPriority::kNormal);
  [[nodiscard]] StreamView view() const { return StreamView(native_.get()); }
  [[nodiscard]] Device device() const { return device_; }

 private:
  struct Destroy {
    void operator()(void* native) const noexcept;
  };
  Device device_;
  std::unique_ptr<void, Destroy> native_;
};

// A point in a stream. A default-made event is done. Only `timed` events measure time.
class Event {
 public:
  Event() = default;
  explicit Event(Device device, bool timed = false);
  // The event is done when all work put on the stream so far is done.
  void record(StreamView stream);
  // Does not block. Error(kDevice) where earlier work failed on the device.
  [[nodiscard]] bool done() const;
  // Seconds by the device's clock between two timed events that are done; 0 on the CPU.
  [[nodiscard]] double seconds_since(const Event& earlier) const;
  [[nodiscard]] void* native() const { return native_.get(); }  // null on the CPU

 private:
  struct Destroy {
    void operator()(void* native) const noexcept;
  };
  std::unique_ptr<void, Destroy> native_;
};

// Every buffer starts at a multiple of this many bytes, so that no result depends on alignment.
inline constexpr std::size_t kBufferAlignment = 256;

// A device, or the host for it, has too little memory left. what() names the device and the bytes,
// or the library call. Of code kDevice.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& message,
                       std::source_location location = std::source_location::current())
      : Error(ErrorCode::kDevice, message, -1, location) {}
};

class MemoryArena;  // comm/device/device_memory.cpp

// Uninitialised memory of a device: its own allocation, or part of an arena (DeviceMemory), which
// it keeps alive. Throws OutOfMemory.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, std::size_t bytes);
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::size_t size() const { return data_ == nullptr ? 0 : bytes_; }
  [[nodiscard]] Device device() const { return data_.get_deleter().device; }

 private:
  friend class DeviceMemory;
  struct Free {
    Device device;
    std::shared_ptr<MemoryArena> arena;  // null: its own allocation
    void operator()(std::byte* data) const noexcept;
  };
  Buffer(std::shared_ptr<MemoryArena> arena, Device device, std::byte* data, std::size_t bytes)
      : data_(data, {device, std::move(arena)}), bytes_(bytes) {}

  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_ = 0;
};

// Allocates a rank's buffers. On a GPU they come from one arena, reserved once its size is known:
// planned memory is then available and no step allocates from the device. On a CPU, and before
// reserve(), each buffer is its own allocation.
//
// Buffers start at multiples of kBufferAlignment. Persistent buffers lie at the low end, first fit;
// temporary ones at the high end. A freed buffer joins its free neighbours. Freeing does not wait
// for the device: the caller ensures that only work on the stream of the next user still uses the
// buffer, if any does.
//
// A handle on shared state: the arena lives as long as a handle or a buffer of it. Handles and
// buffers of one arena are used from one thread.
class DeviceMemory {
 public:
  enum class Use { kPersistent, kTemporary };

  // For the CPU.
  DeviceMemory();
  explicit DeviceMemory(Device device);

  [[nodiscard]] Device device() const;
  // Allocates the arena; does nothing on a CPU. Once, else Error(kInternal). Throws OutOfMemory.
  void reserve(std::size_t bytes) const;
  // From the arena where it has room, else from the device. Throws OutOfMemory.
  [[nodiscard]] Buffer allocate(std::size_t bytes, Use use = Use::kPersistent) const;

  struct Figures {
    std::size_t arena = 0;  // bytes
    std::size_t used = 0;   // of the arena, now
    std::size_t peak = 0;   // the largest `used` so far
    // Buffers so far that had no room in the arena, and their bytes.
    std::size_t outside_arena = 0, outside_arena_bytes = 0;
  };
  [[nodiscard]] Figures figures() const;

 private:
  std::shared_ptr<MemoryArena> arena_;
};

// Uninitialised host memory, kBufferAlignment-aligned. Where `device` is a GPU it is page-locked:
// copies run concurrently with the host, and kernels may write it. Throws OutOfMemory.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Device device, std::size_t bytes);
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::size_t size() const { return data_ == nullptr ? 0 : bytes_; }

 private:
  struct Free {
    Device device;
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_ = 0;
};

// Copies between the host and this device in either direction, or within one, in stream order. On
// a CPU's stream the copy is done on return. On a GPU's stream the host continues; its memory
// should be page-locked and must not change until the copy is done.
void copy_async(void* to, const void* from, std::size_t bytes, StreamView stream);
void fill_zero_async(void* to, std::size_t bytes, StreamView stream);
// The same, done on return; for start-up, files and tests. `device` owns the memory that is not
// the host's. Not ordered with any stream: synchronise those that use the memory first.
void copy_now(Device device, void* to, const void* from, std::size_t bytes);

// The next multiple, from `bytes` on; the largest std::size_t where that does not hold it.
[[nodiscard]] constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  const std::size_t rest = bytes % multiple, more = rest == 0 ? 0 : multiple - rest;
  return bytes > static_cast<std::size_t>(-1) - more ? static_cast<std::size_t>(-1) : bytes + more;
}

}  // namespace sluice
#pragma GCC visibility pop
