// Streams, events and recorded graphs of the emulation: one worker thread per stream runs what is
// put on it, in order, while the host goes on. A dependency that the host code forgot is therefore
// really missing.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sluice::emulated {

using Task = std::function<void()>;

// Tasks run in order on a thread of their own, which has access to the memory of `device` alone.
// Owned by shared_ptr: the thread keeps its queue alive until it has run everything.
class WorkQueue {
 public:
  static std::shared_ptr<WorkQueue> start(int device);

  // Number of the task, from 1.
  std::uint64_t push(Task task);
  void close();  // the thread ends once it has run everything

  [[nodiscard]] std::uint64_t issued() const;
  [[nodiscard]] bool is_done(std::uint64_t number) const;
  void wait(std::uint64_t number) const;

 private:
  void work(int device);

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  mutable std::condition_variable finished_something_;
  std::deque<Task> tasks_;
  std::uint64_t issued_ = 0;
  std::uint64_t finished_ = 0;
  bool is_closed_ = false;
};

// A task of a queue; one that was never issued is done.
struct Ticket {
  std::shared_ptr<WorkQueue> queue;
  std::uint64_t number = 0;

  [[nodiscard]] bool is_done() const { return queue == nullptr || queue->is_done(number); }
  void wait() const {
    if (queue != nullptr) queue->wait(number);
  }
};

// The tasks of a capture in the order in which the host issued them, from all streams of the
// capture: one of the orders that its dependencies allow.
struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaStream_t origin = nullptr;
  std::vector<cudaStream_t> streams;  // that take part
  std::vector<Task> tasks;
  bool is_broken = false;  // by a call that a capture does not allow
};

// The stream behind a handle: null and cudaStreamLegacy are the current device's default stream.
// Null for a handle that is not alive.
[[nodiscard]] cudaStream_t resolve(cudaStream_t stream);
[[nodiscard]] int device_of(cudaStream_t stream);

// Puts a task on a stream, or into its capture.
cudaError_t enqueue(cudaStream_t stream, Task task);
[[nodiscard]] bool is_capturing(cudaStream_t stream);
// Of what was put on a stream so far; not of a capturing stream.
[[nodiscard]] Ticket last_ticket(cudaStream_t stream);
// The stream goes on only after that task.
cudaError_t enqueue_wait(cudaStream_t stream, const Ticket& ticket);

// Blocks the host; refused in a capture, which it breaks.
cudaError_t wait_for(cudaStream_t stream);
void wait_for_device(int device);
// cudaErrorStreamCaptureUnsupported where a capture of this thread forbids such calls as
// cudaMalloc.
[[nodiscard]] cudaError_t unsafe_call_status();

// Keeps the status for cudaGetLastError and returns it.
cudaError_t note(cudaError_t status);

[[nodiscard]] int current_device();

}  // namespace sluice::emulated
