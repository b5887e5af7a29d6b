// Communicator: a group of ranks that exchange bytes over MPI.
//
// The message transport, the control channel, the sum over replicas and the small collectives are
// each written once above this interface.
//
// Threading: all calls of one communicator come from one thread. Messages between two ranks with
// one tag arrive in the order sent; messages of different tags have no order. Ownership: memory
// passed in stays the caller's and must outlive the request; where that is cancelled, it goes to
// keep(). Only split(), duplicate() and the destructor block. The destructor cancels open requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include <sluice/device.hpp>
#include <sluice/world.hpp>

namespace sluice {

// A send or receive. The communicator assigns the index; kNone means done. A send may be done at
// once.
struct Request {
  static constexpr std::int32_t kNone = -1;
  std::int32_t index = kNone;
};

// Keeps memory alive.
using KeepAlive = std::shared_ptr<const void>;

// The bytes of a value, as ranks of one build exchange them; writable where the value is.
template <typename T>
[[nodiscard]] auto object_bytes(T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if constexpr (std::is_const_v<T>) {
    return std::as_bytes(std::span(&value, 1));
  } else {
    return std::as_writable_bytes(std::span(&value, 1));
  }
}

// What arrived.
struct Arrival {
  int source = -1;
  int tag = -1;
  std::size_t bytes = 0;
};

// What every World is.
class Communicator : public World {
 public:
  // Largest tag that may be used, inclusive.
  [[nodiscard]] virtual int max_tag() const = 0;
  // Ranks of the job on this rank's host: the launcher's count if it gives one, else that of the
  // group this one was split from. It decides how waits behave.
  [[nodiscard]] virtual int local_size() const = 0;
  // "mpi" or "loopback".
  [[nodiscard]] virtual const char* name() const = 0;
  // Why messages may not lie in the device's memory, in one line; empty where they may. They may
  // with a CUDA-aware MPI that delivers a test message of this rank to itself. Allocates memory.
  [[nodiscard]] virtual std::string device_memory_unsupported_reason(Device device) const = 0;

  [[nodiscard]] virtual Request start_send(int peer, int tag, std::span<const std::byte> bytes) = 0;
  // `peer` may be kAnyPeer. A message longer than `bytes` is Error(kMismatch) from test(), except
  // that Open MPI truncates a rank's message to itself without an error.
  [[nodiscard]] virtual Request post_recv(int peer, int tag, std::span<std::byte> bytes) = 0;
  // Makes progress; true once done, after which `request` is kNone; true of kNone. Error(kMpi).
  [[nodiscard]] virtual bool test(Request& request, Arrival* arrival = nullptr) = 0;
  // Cancels an open request; afterwards a receive's memory is the caller's again. MPI cannot
  // withdraw a send, nor a receive of which a part has arrived. One that is not done after a tenth
  // of a second goes on, and its memory must be passed to keep() before it is freed or written.
  virtual void cancel(Request& request) = 0;
  // Shares ownership of memory until no send of this communicator is open and nothing goes on after
  // cancel(). If a send outlives the communicator, the memory lives until the send is done or the
  // process ends. A thread that uses this communicator or another of the same origin frees it, at
  // the latest when one is made or destroyed after the sends are done.
  virtual void keep(KeepAlive memory) = 0;

  // Not collective. After an error: peers may still send what this rank will not receive. MPI's
  // context then stays reserved after the destructor, because a message that arrives late must not
  // meet another communicator with the same context. `by_all`: every rank calls this. Then it is
  // free once all have, and their messages are here; ranks see that when they make or destroy
  // communicators of the same origin. Else it stays reserved until MPI ends.
  virtual void leave_open(bool /*by_all*/) {}

  // Throws Error(kUsage) where MPI does not allow calls of this thread.
  virtual void require_this_thread() const {}
  // Ends all processes of the job with the exit code `code`, without cleaning up.
  [[noreturn]] virtual void abort(int code) const;

  // Collective. Ranks with equal colour form a group, ordered by key, then by rank here.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;
  // Collective.
  [[nodiscard]] virtual std::unique_ptr<Communicator> duplicate() = 0;

  static constexpr int kAnyPeer = -1;
};

[[nodiscard]] inline Communicator& communicator_of(World& world) {
  return static_cast<Communicator&>(world);
}
[[nodiscard]] inline std::unique_ptr<Communicator> communicator_of(std::unique_ptr<World> world) {
  return std::unique_ptr<Communicator>(&communicator_of(*world.release()));
}

}  // namespace sluice
