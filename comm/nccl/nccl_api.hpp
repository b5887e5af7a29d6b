// NCCL's functions, without its header: the one place that knows nccl.h is nccl_api.cpp. Internal
// to comm/nccl*.
//
// The library is opened at run time, not linked. A binary built with NCCL therefore starts, and
// trains over MPI, where libnccl is absent or too old; ranks that need NCCL get a one-line error.
// The tests' emulation is linked.
//
// Calls do not block unless their comment says so. They return NCCL's result; the callers, who know
// rank and peer, turn it into an Error. All calls on one communicator come from one thread; a group
// belongs to the calling thread. Non-blocking mode: after kInProgress only state() and abort() may
// be called on a communicator, and nothing may be put on the streams of its operations, until
// state() returns another status (NCCL User Guide, "Group Calls", "Fault Tolerance").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <sluice/device.hpp>

struct ncclComm;

namespace sluice::nccl {

using Handle = ncclComm*;

enum class Status : std::uint8_t {
  kSuccess,
  kInProgress,
  kRemote,  // a peer, or the network to it, is gone
  kFailed,  // anything else
};

// The result of a call. `code` is NCCL's own number, for Library::describe().
struct Result {
  Status status = Status::kSuccess;
  int code = 0;
  [[nodiscard]] bool ok() const {
    return status == Status::kSuccess || status == Status::kInProgress;
  }
};

struct UniqueId {
  std::array<std::byte, 128> bytes{};
};

// A copy names the same library, which stays loaded until the process ends.
class Library {
 public:
  // Opens `file` as dlopen finds it; null means the default name, or the linked library. Throws
  // Error(kDevice), one line, if it is missing, lacks a function, or is older than 2.19, whose
  // communicators may hang when they are aborted.
  explicit Library(const char* file = nullptr);

  [[nodiscard]] int version() const;  // 22809 is 2.28.9

  // Starts a listener on this rank, which every rank of the new communicator must reach.
  [[nodiscard]] Result make_id(UniqueId& id) const;
  // For the calling thread's current device, in non-blocking mode. `name` is for NCCL's log.
  // `most_blocks` bounds the thread blocks of one kernel; 0: NCCL chooses.
  [[nodiscard]] Result init(Handle& comm, int ranks, const UniqueId& id, int rank, const char* name,
                            int most_blocks) const;
  // The state of the last call, or an error since. Joins NCCL's thread of a finished call.
  [[nodiscard]] Result state(Handle comm) const;
  // Starts the shutdown, which completes issued operations. It stays in progress until all peers
  // call it.
  [[nodiscard]] Result finalize(Handle comm) const;
  // Frees a finalized communicator.
  [[nodiscard]] Result destroy(Handle comm) const;
  // Stops the communicator's kernels, waits for them and frees it; within a group at the group's
  // end. Communicators whose kernels may wait for one another belong in one group.
  [[nodiscard]] Result abort(Handle comm) const;

  [[nodiscard]] Result group_start() const;
  [[nodiscard]] Result group_end() const;
  // In bytes, of device memory.
  [[nodiscard]] Result send(const void* data, std::size_t bytes, int peer, Handle comm,
                            StreamView stream) const;
  [[nodiscard]] Result recv(void* data, std::size_t bytes, int peer, Handle comm,
                            StreamView stream) const;
  // In place, fp32, in an order of NCCL's choice.
  [[nodiscard]] Result all_reduce_sum(float* values, std::size_t count, Handle comm,
                                      StreamView stream) const;

  // Null where the library has no such function, or refuses the memory.
  [[nodiscard]] void* register_memory(Handle comm, void* data, std::size_t bytes) const;
  void forget_memory(Handle comm, void* registered) const;

  // One line: NCCL's name for the result and its last warning, if any.
  [[nodiscard]] std::string describe(const Result& result, Handle comm) const;

 private:
  struct Functions;
  std::shared_ptr<const Functions> functions_;
};

// "2.28.9"
[[nodiscard]] std::string version_text(int version);

}  // namespace sluice::nccl
