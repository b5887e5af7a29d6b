// Communicator: a group of ranks that exchange bytes, over MPI or between threads of one process.
//
// The narrow seam under everything that talks: the message transport, the control channel, the sum
// over replicas and the small collectives below are each written once above it.
//
// Threading: all calls of one communicator come from one thread. Messages between two ranks with
// one tag arrive in the order sent; nothing is said across tags. Ownership: memory handed in stays
// the caller's and must outlive the request; that of sends given up goes to keep(). Nothing here
// blocks except split(), duplicate() and the destructor of a communicator with open requests, which
// cancels them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/device.hpp"

namespace sluice {

// A send or receive. Slot numbers are the communicator's own; kNone is done (a send may be at
// once).
struct Request {
  static constexpr std::int32_t kNone = -1;
  std::int32_t index = kNone;
};

// Keeps memory alive.
using Owner = std::shared_ptr<const void>;

// What arrived.
struct Arrival {
  int source = -1;
  int tag = -1;
  std::size_t bytes = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  // Largest tag that may be used, inclusive.
  [[nodiscard]] virtual int max_tag() const = 0;
  // Ranks of the job on this rank's host, as far as known: the launcher's count where it gives one,
  // else that of the group this one was split from (it decides how waits behave).
  [[nodiscard]] virtual int local_size() const = 0;
  // "mpi" or "loopback".
  [[nodiscard]] virtual const char* name() const = 0;
  // Why messages may not lie in the device's memory, one line; empty where they may: in a
  // CUDA-aware MPI, which is asked and then tried with a message to oneself. Takes memory and a
  // moment.
  [[nodiscard]] virtual std::string why_no_device_memory(Device device) const = 0;

  // A hint that start_send() to `peer` follows at once, for memory that is slow to come: loopback
  // takes its ring's next cell from the other core while the caller writes its header.
  virtual void prepare_send(int /*peer*/) {}
  [[nodiscard]] virtual Request start_send(int peer, int tag, std::span<const std::byte> bytes) = 0;
  // `peer` may be kAnyPeer. A message longer than `bytes` is Error(kMismatch) from test(), except
  // that Open MPI cuts off a rank's message to itself and says nothing.
  [[nodiscard]] virtual Request post_recv(int peer, int tag, std::span<std::byte> bytes) = 0;
  // Makes progress; true once done, after which `request` is kNone; true of kNone. Error(kMpi).
  [[nodiscard]] virtual bool test(Request& request, Arrival* arrival = nullptr) = 0;
  // Gives up an open request; afterwards a receive's memory is the caller's again. MPI cannot
  // withdraw a send: one that is not done after a tenth of a second goes on, and its memory has to
  // be handed to keep() before it is freed or written.
  virtual void cancel(Request& request) = 0;
  // Shares ownership of memory until no send of this communicator is open or goes on after
  // cancel(); where one outlives the communicator, until it is done or the process ends. Frees the
  // memory on a thread that uses this communicator or another of the same origin, at the latest
  // when one is made or destroyed after the sends are done.
  virtual void keep(Owner memory) = 0;

  // Collective. Ranks with equal colour form a group, ordered by key, then by rank here.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;
  // Collective.
  [[nodiscard]] virtual std::unique_ptr<Communicator> duplicate() = 0;

  static constexpr int kAnyPeer = -1;
};

// Blocks the calling thread between polls: spins briefly where local ranks <= the cores of the host
// that the job may use, otherwise yields at once; then backs off in sleeps of 20 to 50 us. Before
// its first sleep it sets the calling thread's timer slack to 1 us (the default of 50 us would
// triple a sleep). One per waiting site; reset() after every success.
class Waiter {
 public:
  explicit Waiter(int local_ranks);
  void pause();
  void reset() { polls_ = 0; }

 private:
  std::uint32_t spin_polls_;  // polls that only spin
  std::uint32_t polls_ = 0;   // since the last success
  bool slack_set_ = false;
};

// Called between polls of a blocking wait; throws to end it (the control channel's poll()).
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  virtual void poll() = 0;
};

// Small blocking collectives, built from the messages above in fixed rank order; for start-up,
// step reports and replicas, never for a pipeline's activations. All ranks of `comm` call alike.
// `interrupt` may be null. A call that throws has given up its requests; the object may be used
// again only where every rank threw. Sizes that differ between ranks are Error(kMismatch). Sends
// that go on after a throw read a copy of the object's own, or memory whose owner the caller names.
class Collectives {
 public:
  // Tags base_tag..base_tag+7 of `comm` are this object's.
  Collectives(Communicator& comm, int base_tag, Interrupt* interrupt);

  void barrier();
  // All ranks receive rank `root`'s bytes; sizes agree.
  void broadcast(std::span<std::byte> bytes, int root);
  // result = rank-major concatenation, on `root` only. Sizes agree on every rank.
  void gather(std::span<const std::byte> mine, std::span<std::byte> all, int root);
  // As gather, on all ranks.
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);
  // Strings of any length; for start-up and errors (allocates).
  [[nodiscard]] std::vector<std::string> all_gather_strings(const std::string& mine);
  [[nodiscard]] std::string broadcast_string(const std::string& text, int root);

  // Blocking point to point. Without an `owner` of the bytes, a copy of them is sent.
  void send(int peer, std::span<const std::byte> bytes, const Owner& owner = nullptr);
  void recv(int peer, std::span<std::byte> bytes);

  // In place: values[i] = ((g0[i] + g1[i]) + g2[i]) + ... over ranks 0, 1, 2, ... in fp32: a
  // function of the number of ranks alone. Reduce-scatter by owner, then all-gather; elements are
  // dealt to owners in size() contiguous shards. `workspace` holds at least
  // ordered_sum_workspace(values.size()) floats. Allocates nothing. Without an `owner` of
  // the values, the caller hands their memory to communicator().keep() after a throw.
  void ordered_sum(std::span<float> values, std::span<float> workspace,
                   const Owner& owner = nullptr);
  [[nodiscard]] std::size_t ordered_sum_workspace(std::size_t count) const;

  [[nodiscard]] Communicator& communicator() { return comm_; }

 private:
  class OpenRequests;

  void wait(Request& request, std::size_t expected_bytes);
  void send_tagged(int peer, int tag, std::span<const std::byte> bytes, Owner owner = nullptr);
  // A copy of `bytes`, and in `owner` what owns it; valid until the next call.
  std::span<const std::byte> copy_of(std::span<const std::byte> bytes, Owner& owner);
  void recv_tagged(int peer, int tag, std::span<std::byte> bytes);
  void reduce_scatter(std::span<float> values, std::span<float> workspace);
  void gather_shards(std::span<float> values);

  Communicator& comm_;
  int base_tag_;
  Interrupt* interrupt_;
  Waiter waiter_;
  std::vector<Request> open_;  // of the running call, for ordered_sum; sized once
  std::shared_ptr<std::vector<std::byte>> copy_;  // of what is being sent
};

}  // namespace sluice
