#include "tests/emulated_cuda/stream.hpp"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "tests/emulated_cuda/memory.hpp"

using sluice::emulated::Capture;
using sluice::emulated::Task;
using sluice::emulated::Ticket;
using sluice::emulated::WorkQueue;

struct CUstream_st {
  int device;
  bool is_blocking;  // waits for the default stream and makes it wait
  std::shared_ptr<WorkQueue> queue;
  std::shared_ptr<Capture> capture;
  int priority = 0;
};

struct CUevent_st {
  int device;
  bool has_time;
  Ticket recorded;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
  std::weak_ptr<Capture> capture;  // where it was last recorded
};

struct CUgraph_st {
  std::vector<Task> tasks;
};

struct CUgraphExec_st {
  std::vector<Task> tasks;
};

namespace sluice::emulated {

namespace {

// Everything alive, for the life of the process: never destroyed, since workers outlive main().
struct Handles {
  std::recursive_mutex mutex;
  std::vector<cudaStream_t> default_streams;  // per device, made at first use
  std::set<cudaStream_t> streams;
  std::vector<cudaStream_t> destroyed;  // kept, so that no new handle equals a dead one
  std::set<cudaEvent_t> events;
};

Handles& handles() {
  static Handles* const instance = new Handles;
  return *instance;
}

thread_local int chosen_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<std::shared_ptr<Capture>> captures_of_thread;

cudaStream_t default_stream(int device) {
  Handles& all = handles();
  all.default_streams.resize(static_cast<std::size_t>(device_count()));
  cudaStream_t& stream = all.default_streams[static_cast<std::size_t>(device)];
  if (stream == nullptr) {
    stream = new CUstream_st{device, false, WorkQueue::start(device), nullptr};
    all.streams.insert(stream);
  }
  return stream;
}

// What a new task on this stream has to wait for beyond the stream's own order.
std::vector<Ticket> implied_dependencies(cudaStream_t stream) {
  std::vector<Ticket> dependencies;
  Handles& all = handles();
  const auto index = static_cast<std::size_t>(stream->device);
  cudaStream_t standard = index < all.default_streams.size() ? all.default_streams[index] : nullptr;
  const auto add = [&](cudaStream_t other) {
    const Ticket ticket{other->queue, other->queue->issued()};
    if (!ticket.is_done()) dependencies.push_back(ticket);
  };
  if (stream == standard) {
    for (cudaStream_t other : all.streams) {
      if (other->is_blocking && other->device == stream->device && !other->capture) add(other);
    }
  } else if (stream->is_blocking && standard != nullptr) {
    add(standard);
  }
  return dependencies;
}

void join_capture(cudaStream_t stream, const std::shared_ptr<Capture>& capture) {
  if (stream->capture == capture) return;
  stream->capture = capture;
  capture->streams.push_back(stream);
}

bool is_alive(cudaEvent_t event) { return handles().events.contains(event); }

Task as_one(std::vector<Task> tasks) {
  return [tasks = std::move(tasks)] {
    for (const Task& task : tasks) task();
  };
}

}  // namespace

std::shared_ptr<WorkQueue> WorkQueue::start(int device) {
  auto queue = std::make_shared<WorkQueue>();
  std::thread([queue, device] { queue->work(device); }).detach();
  return queue;
}

std::uint64_t WorkQueue::push(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  arrived_.notify_one();
  return ++issued_;
}

void WorkQueue::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  arrived_.notify_one();
}

std::uint64_t WorkQueue::issued() const {
  const std::lock_guard lock(mutex_);
  return issued_;
}

bool WorkQueue::is_done(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return finished_ >= number;
}

void WorkQueue::wait(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  finished_something_.wait(lock, [&] { return finished_ >= number; });
}

void WorkQueue::work(int device) {
  open_device(device);
  chosen_device = device;
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      arrived_.wait(lock, [&] { return !tasks_.empty() || is_closed_; });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    task = nullptr;  // what it holds goes before anybody learns that it is done
    const std::lock_guard lock(mutex_);
    ++finished_;
    finished_something_.notify_all();
  }
}

cudaStream_t resolve(cudaStream_t stream) {
  if (device_count() == 0) return nullptr;
  const std::lock_guard lock(handles().mutex);
  if (stream == nullptr || stream == cudaStreamLegacy) return default_stream(chosen_device);
  return handles().streams.contains(stream) ? stream : nullptr;
}

int device_of(cudaStream_t stream) { return stream->device; }

cudaError_t enqueue(cudaStream_t stream, Task task) {
  const std::lock_guard lock(handles().mutex);
  if (stream->capture != nullptr) {
    stream->capture->tasks.push_back(std::move(task));
    return cudaSuccess;
  }
  for (const Ticket& ticket : implied_dependencies(stream)) {
    stream->queue->push([ticket] { ticket.wait(); });
  }
  stream->queue->push(std::move(task));
  return cudaSuccess;
}

bool is_capturing(cudaStream_t stream) {
  const std::lock_guard lock(handles().mutex);
  return stream->capture != nullptr;
}

Ticket last_ticket(cudaStream_t stream) {
  const std::lock_guard lock(handles().mutex);
  return {stream->queue, stream->queue->issued()};
}

cudaError_t enqueue_wait(cudaStream_t stream, const Ticket& ticket) {
  if (ticket.is_done() || ticket.queue == stream->queue) return cudaSuccess;
  return enqueue(stream, [ticket] { ticket.wait(); });
}

cudaError_t wait_for(cudaStream_t stream) {
  Ticket ticket;
  {
    const std::lock_guard lock(handles().mutex);
    if (stream->capture != nullptr) {
      stream->capture->is_broken = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    for (const Ticket& other : implied_dependencies(stream)) {
      stream->queue->push([other] { other.wait(); });
    }
    ticket = {stream->queue, stream->queue->issued()};
  }
  ticket.wait();
  return cudaSuccess;
}

void wait_for_device(int device) {
  std::vector<Ticket> tickets;
  {
    const std::lock_guard lock(handles().mutex);
    for (cudaStream_t stream : handles().streams) {
      if (stream->device == device) tickets.push_back({stream->queue, stream->queue->issued()});
    }
  }
  for (const Ticket& ticket : tickets) ticket.wait();
}

cudaError_t unsafe_call_status() {
  for (const auto& capture : captures_of_thread) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

constexpr int kLeastPriority = 0, kGreatestPriority = -5;

cudaError_t note(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
  return status;
}

int current_device() { return chosen_device; }

std::vector<int> stream_priorities(int device) {
  std::vector<int> priorities;
  const std::lock_guard lock(handles().mutex);
  for (cudaStream_t stream : handles().streams) {
    const bool standard = stream == handles().default_streams[static_cast<std::size_t>(device)];
    if (stream->device == device && !standard) priorities.push_back(stream->priority);
  }
  std::sort(priorities.begin(), priorities.end());
  return priorities;
}

}  // namespace sluice::emulated

using namespace sluice::emulated;  // NOLINT(google-build-using-namespace): the C functions below

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaSetDevice(int device) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  chosen_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *device = chosen_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  if (const cudaError_t status = unsafe_call_status(); status != cudaSuccess) return note(status);
  wait_for_device(chosen_device);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  if (stream == nullptr || flags > cudaStreamNonBlocking) return note(cudaErrorInvalidValue);
  *stream = new CUstream_st{chosen_device, flags != cudaStreamNonBlocking,
                            WorkQueue::start(chosen_device), nullptr};
  const std::lock_guard lock(handles().mutex);
  handles().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const cudaError_t status = cudaStreamCreateWithFlags(stream, flags);
  if (status == cudaSuccess) {
    (*stream)->priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  }
  return status;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *least = kLeastPriority;
  *greatest = kGreatestPriority;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(handles().mutex);
  if (handles().streams.erase(stream) == 0) return note(cudaErrorInvalidResourceHandle);
  stream->queue->close();
  stream->queue = nullptr;
  handles().destroyed.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  return note(wait_for(real));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  if (is_capturing(real)) return note(cudaErrorStreamCaptureUnsupported);
  return last_ticket(real).is_done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  cudaStream_t real = resolve(stream);
  const std::lock_guard lock(handles().mutex);
  if (real == nullptr || !is_alive(event)) return note(cudaErrorInvalidResourceHandle);
  if (const auto capture = event->capture.lock()) {
    if (real->capture != nullptr && real->capture != capture) {
      return note(cudaErrorStreamCaptureIsolation);
    }
    join_capture(real, capture);  // its tasks come in the order of issue anyway
    return cudaSuccess;
  }
  if (real->capture != nullptr) return note(cudaErrorStreamCaptureIsolation);
  return note(enqueue_wait(real, event->recorded));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  return note(enqueue(real, [function, argument] {
    const int device = current_device();
    open_device(-1);
    function(argument);
    open_device(device);
  }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *event = new CUevent_st{chosen_device, (flags & cudaEventDisableTiming) == 0, {}, {}, {}};
  const std::lock_guard lock(handles().mutex);
  handles().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(handles().mutex);
  if (handles().events.erase(event) == 0) return note(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaStream_t real = resolve(stream);
  const std::lock_guard lock(handles().mutex);
  if (real == nullptr || !is_alive(event)) return note(cudaErrorInvalidResourceHandle);
  if (event->device != real->device) return note(cudaErrorInvalidResourceHandle);
  event->capture = real->capture;
  if (real->capture != nullptr) return cudaSuccess;
  auto time = std::make_shared<std::chrono::steady_clock::time_point>();
  const cudaError_t status = enqueue(real, [time] { *time = std::chrono::steady_clock::now(); });
  event->recorded = last_ticket(real);
  event->time = std::move(time);
  return note(status);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(handles().mutex);
  if (!is_alive(event)) return note(cudaErrorInvalidResourceHandle);
  if (!event->capture.expired()) return note(cudaErrorCapturedEvent);
  return event->recorded.is_done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Ticket ticket;
  {
    const std::lock_guard lock(handles().mutex);
    if (!is_alive(event)) return note(cudaErrorInvalidResourceHandle);
    if (!event->capture.expired()) return note(cudaErrorCapturedEvent);
    ticket = event->recorded;
  }
  ticket.wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const std::lock_guard lock(handles().mutex);
  if (!is_alive(start) || !is_alive(end)) return note(cudaErrorInvalidResourceHandle);
  if (!start->has_time || !end->has_time || !start->time || !end->time) {
    return note(cudaErrorInvalidResourceHandle);
  }
  if (!start->recorded.is_done() || !end->recorded.is_done()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(handles().mutex);
  if (real == default_stream(real->device)) return note(cudaErrorStreamCaptureUnsupported);
  if (real->capture != nullptr) return note(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->origin = real;
  join_capture(real, capture);
  captures_of_thread.push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(handles().mutex);
  *status = real->capture == nullptr   ? cudaStreamCaptureStatusNone
            : real->capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  cudaStream_t real = resolve(stream);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(handles().mutex);
  const std::shared_ptr<Capture> capture = real->capture;
  *graph = nullptr;
  if (capture == nullptr) return note(cudaErrorIllegalState);
  if (capture->origin != real) return note(cudaErrorStreamCaptureUnmatched);
  for (cudaStream_t other : capture->streams) other->capture = nullptr;
  std::erase(captures_of_thread, capture);
  if (capture->is_broken) return note(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{std::move(capture->tasks)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  if (executable == nullptr || graph == nullptr) return note(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{graph->tasks};
  return cudaSuccess;
}

// There is no memory to fill; a stream that records work refuses it, as CUDA does.
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  cudaStream_t real = resolve(stream);
  if (executable == nullptr) return note(cudaErrorInvalidValue);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  return real->capture ? note(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  cudaStream_t real = resolve(stream);
  if (executable == nullptr) return note(cudaErrorInvalidValue);
  if (real == nullptr) return note(cudaErrorInvalidResourceHandle);
  return note(enqueue(real, as_one(executable->tasks)));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
