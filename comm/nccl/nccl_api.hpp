// NCCL's functions, without its header: the one place that knows nccl.h is nccl_api.cpp. Internal
// to comm/nccl*.
//
// The library is opened at run time, not linked: a binary built with NCCL then starts, and trains
// over MPI, where libnccl is absent or too old, and what is wrong is one line on the ranks that
// asked for it. The emulation of the tests is linked.
//
// Calls do not block except where they say so. They return what NCCL returned; the callers, who
// know rank and peer, make an Error of it. All calls on one communicator come from one thread;
// groups are the calling thread's. Rules of the non-blocking mode: after kInProgress nothing but
// state() and abort() may be called on a communicator, and nothing may be put on the streams of its
// operations, until state() no longer says so (NCCL User Guide, "Group Calls", "Fault Tolerance").
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

// What a call came to. `code` is NCCL's own number, for Library::describe().
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
  // Opens `file` as dlopen finds it; where the build links NCCL, null means what is linked. Throws
  // Error(kDevice), one line: that it is missing, or lacks what is called here, or is older than
  // 2.19, whose communicators may hang when they are aborted.
  explicit Library(const char* file = nullptr);

  [[nodiscard]] int version() const;  // 22809 is 2.28.9

  // Starts a listener on this rank, which every rank of the new communicator must reach.
  [[nodiscard]] Result make_id(UniqueId& id) const;
  // Of the calling thread's current device, in non-blocking mode. `name` is for NCCL's log;
  // `most_blocks` bounds the thread blocks of one of its kernels, 0 leaves them to NCCL.
  [[nodiscard]] Result init(Handle& comm, int ranks, const UniqueId& id, int rank, const char* name,
                            int most_blocks) const;
  // What became of the last call, and whether anything went wrong since. Joins NCCL's thread of a
  // call that is over.
  [[nodiscard]] Result state(Handle comm) const;
  // Starts the orderly end: what was issued is completed. A peer that does not follow keeps it in
  // progress.
  [[nodiscard]] Result finalize(Handle comm) const;
  // Frees a finalized communicator.
  [[nodiscard]] Result destroy(Handle comm) const;
  // Makes the kernels of the communicator exit, waits for them and frees it; within a group at its
  // end. Several communicators whose kernels may wait for one another belong into one group.
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

  // One line: NCCL's name for the result and, where it has said more, its last warning.
  [[nodiscard]] std::string describe(const Result& result, Handle comm) const;

 private:
  struct Functions;
  std::shared_ptr<const Functions> functions_;
};

// "2.28.9"
[[nodiscard]] std::string version_text(int version);

}  // namespace sluice::nccl
