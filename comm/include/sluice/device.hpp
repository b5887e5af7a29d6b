// Device primitives: devices, streams, events, buffers, copies. On the CPU a stream runs what is
// put on it at once and an event is done when it is made. On a GPU they are CUDA's: what is put on
// a stream runs in order and later, and the host goes on.
//
// Owners (Stream, Event, Buffer, HostBuffer) are move-only and null their source; StreamView and
// pointers do not own. Nothing here throws in a destructor. Everything that can fail throws
// Error(kDevice) naming the device and what was asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

namespace sluice {

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

[[nodiscard]] std::string to_string(const Device& device);  // "cpu", "cuda:1"
// "cpu", "cuda" (the first GPU) or "cuda:<index>", whole text, else Error(kUsage). Whether the
// device exists is require_device's question.
[[nodiscard]] Device parse_device(std::string_view text);

// Whether this build has CUDA at all; whether a GPU answers is device_count's question.
[[nodiscard]] bool built_with_cuda();
// Devices of a kind that this process can use: CPUs 1; GPUs 0 where the build has no CUDA, where
// there is no GPU, or where its driver does not answer (no_gpu_reason() then says why).
[[nodiscard]] int device_count(DeviceKind kind);
// One line; empty where there is a GPU.
[[nodiscard]] std::string no_gpu_reason();

struct DeviceProperties {
  std::string name;               // "NVIDIA H200"; the CPU has none
  std::string identity;           // PCI bus address, the same from every process of a host
  std::size_t memory = 0;         // bytes
  std::size_t free_memory = 0;    // bytes, now
  int major = 0, minor = 0;       // compute capability
  std::size_t shared_memory = 0;  // bytes of a multiprocessor
  int driver = 0, runtime = 0;    // CUDA versions as CUDA counts them, 13000 for 13.0
};
// Requires a device for which require_device() passes.
[[nodiscard]] DeviceProperties properties_of(Device device);
// Error(kUsage) with what would be legal where this process cannot use the device: a build without
// CUDA, no GPU, an index out of range, a compute capability before 8.0, a driver older than the
// toolkit. Does not make the process a client of the device.
void require_device(Device device);
// For the start of a job: require_device(), use_device(), and Error(kUsage) naming the device, what
// this program's kernels were compiled for and what to do where they have no code for it. That is
// the driver's to say: what it compiles itself depends on its age. On a GPU it may load kernels.
void open_device(Device device);
// Makes `device` the one that the calling thread's CUDA calls mean. Streams, events and buffers
// made later for it need no further call. Nothing on the CPU.
void use_device(Device device);

class Event;

// Non-owning; null on the CPU.
class StreamView {
 public:
  constexpr StreamView() = default;
  constexpr explicit StreamView(void* native) : native_(native) {}
  [[nodiscard]] void* native() const { return native_; }
  // Blocks the host until everything put on the stream so far is done.
  void synchronize() const;
  // What is put on the stream from now on runs after the event. Does not block the host.
  void wait(const Event& event) const;

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

// A point in a stream. A default-made event is done. Only `timed` ones tell time.
class Event {
 public:
  Event() = default;
  explicit Event(Device device, bool timed = false);
  Event(Event&& other) noexcept : native_(std::exchange(other.native_, nullptr)) {}
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  // The event is done when everything put on the stream so far is.
  void record(StreamView stream);
  // Does not block. Error(kDevice) where something before it failed on the device.
  [[nodiscard]] bool done() const;
  // Seconds of the device's clock between two timed events that are done; 0 on the CPU.
  [[nodiscard]] double seconds_since(const Event& earlier) const;
  [[nodiscard]] void* native() const { return native_; }  // null on the CPU

 private:
  void* native_ = nullptr;
};

// Every buffer starts at a multiple of this many bytes, so that no result depends on alignment.
inline constexpr std::size_t kBufferAlignment = 256;

// A device, or the host for it, has not as much memory left as was asked for; what() names both,
// or the library's call that asked. Of code kDevice.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& message,
                       std::source_location location = std::source_location::current())
      : Error(ErrorCode::kDevice, message, -1, location) {}
};

class MemoryArena;  // comm/device/device_memory.cpp

// Uninitialised memory of a device: an allocation of its own, or a piece of a block that it keeps
// alive (DeviceMemory). Throws OutOfMemory where it cannot be had.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, std::size_t bytes);
  Buffer(Buffer&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        arena_(std::move(other.arena_)) {}
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] Device device() const { return device_; }

 private:
  friend class DeviceMemory;
  Buffer(std::shared_ptr<MemoryArena> arena, Device device, std::byte* data, std::size_t bytes)
      : device_(device), data_(data), bytes_(bytes), arena_(std::move(arena)) {}
  void give_back() noexcept;  // to the block

  Device device_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::shared_ptr<MemoryArena> arena_;  // null: an allocation of its own
};

// Where a rank's buffers come from. On a GPU one block, taken from the device once its size is
// known and then cut up, so that what was planned is there when it is wanted and no step asks the
// device for memory; on a CPU, and before there is a block, each buffer is an allocation of its
// own.
//
// Buffers start at multiples of kBufferAlignment. Those that stay are put at the low end, first
// fit; those that pass at the high end, out of their way. What is given back joins what is free
// beside it. Giving back does not wait for the device: whoever destroys a buffer knows that
// nothing uses it any more, or that only work on the stream of its next user does.
//
// A handle on shared memory: the block lives as long as a handle or a buffer of it, in whatever
// order they go. Handles and buffers of one block are used from one thread.
class DeviceMemory {
 public:
  enum class Use { kPersistent, kTemporary };

  // Of the CPU.
  DeviceMemory();
  explicit DeviceMemory(Device device);

  [[nodiscard]] Device device() const;
  // Takes the block; nothing on a CPU. Once, else Error(kInternal). Throws OutOfMemory.
  void reserve(std::size_t bytes) const;
  // From the block where it has room, else from the device. Throws OutOfMemory.
  [[nodiscard]] Buffer allocate(std::size_t bytes, Use use = Use::kPersistent) const;

  struct Figures {
    std::size_t arena = 0;  // bytes
    std::size_t used = 0;   // of the block, now
    std::size_t peak = 0;   // the most that was used at once
    // What had no room in the block, all that ever was: buffers and their bytes.
    std::size_t outside_arena = 0, outside_arena_bytes = 0;
  };
  [[nodiscard]] Figures figures() const;

 private:
  std::shared_ptr<MemoryArena> arena_;
};

// Uninitialised host memory, kBufferAlignment-aligned: page-locked where `device` is a GPU, so that
// copies to and from it run beside the host and kernels may write it; else plain memory. Throws
// OutOfMemory where it cannot be had.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Device device, std::size_t bytes);
  HostBuffer(HostBuffer&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }

 private:
  Device device_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Bytes from anywhere to anywhere (host, this device), in stream order. On a CPU stream done when
// it returns; on a GPU's the host goes on, and host memory should be page-locked and must stay as
// it is until the stream has passed.
void copy_async(void* to, const void* from, std::size_t bytes, StreamView stream);
void fill_zero_async(void* to, std::size_t bytes, StreamView stream);
// The same, done when it returns; for start-up, files and tests. `device` is where the memory that
// is not the host's lies. Ordered after nothing: synchronise streams that use the memory first.
void copy_now(Device device, void* to, const void* from, std::size_t bytes);

[[nodiscard]] constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace sluice
