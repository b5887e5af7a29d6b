// NcclCommunicator: ranks whose GPUs exchange through NCCL.
//
// It is made collectively over a bootstrap communicator, which carries NCCL's id and the peer
// table: the ranks that lack NCCL, have another version or share a GPU are known before NCCL is
// called. The library is opened when the first communicator is made.
//
// NCCL's non-blocking mode: a call may still be in progress when it returns. Until ready() returns
// true, only poll() and abort() may be called, and nothing may be put on the streams of its
// operations. Only abort() and calls that take an Interrupt block the host; the latter end when it
// throws. NCCL detects a peer's death over a network, but not that of a peer on the same host:
// there the control channel reports it.
//
// NcclQueue (comm/nccl/nccl_queue.hpp) keeps these rules for its users. Threading: one thread, the
// one that made the communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

// Names for error messages.
struct NcclLabel {
  std::string group;  // "the pipeline", "the replicas of stage 3"
  int rank = -1;      // this rank in the job; -1: its rank in the bootstrap communicator
};

// A bound of blocks for each of `kernels` that wait for other ranks at the same time: all of them
// occupy at most one multiprocessor in `parts` of the GPU, or one each. At most `most`, at least 1.
[[nodiscard]] int blocks_within(Device device, int parts, int kernels, int most);

class NcclCommunicator {
 public:
  // Collective over `bootstrap`, all of whose ranks join. `device` is this rank's GPU. Polls
  // `interrupt`, which may be null. `most_blocks` bounds the multiprocessors that one kernel
  // occupies, also while it waits for a peer; 0: no bound. The smallest bound of a rank counts;
  // without one NCCL chooses. Throws what nccl_refusal() returns, or Error(kPeer | kDevice) where
  // NCCL fails.
  NcclCommunicator(Collectives& bootstrap, Device device, const NcclLabel& label,
                   Interrupt* interrupt, int most_blocks = 0);
  // Aborts unless finalized. Never throws.
  ~NcclCommunicator();

  // Of NCCL's communicator, equal to those of the bootstrap communicator.
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] Device device() const;
  // One of its ranks, for messages: "rank 3 on host-7 (cuda:1)".
  [[nodiscard]] std::string name_of(int rank) const;

  // False while NCCL works on the last call. Throws Error(kPeer) where a peer, or the network to
  // it, is gone, else Error(kDevice): one line that names the group, this rank and its host, the
  // peer where there is only one, and NCCL's text. Does not block.
  [[nodiscard]] bool ready() const;
  // Throws as ready().
  void poll() const { static_cast<void>(ready()); }
  void wait_ready(Interrupt* interrupt) const;

  // Within an NcclGroup. The memory is the device's; both ends pass the same number of bytes. Throw
  // as ready().
  void send(int peer, std::span<const std::byte> data, StreamView stream) const;
  void recv(int peer, std::span<std::byte> data, StreamView stream) const;
  // Collective over the communicator. In place, in fp32, in an order of NCCL's choice.
  void all_reduce_sum(std::span<float> values, StreamView stream) const;

  // Tells NCCL that sends and receives of this communicator lie in this memory of its device, which
  // outlives finalize(), or abort(). Not collective; does not block. Changes only how bytes travel:
  // does nothing where the library is older than 2.19 or refuses the memory. Returns whether it
  // took it.
  bool register_memory(std::span<std::byte> memory);

  // Collective over the communicator: shuts it down once all its work on streams is done. Throws as
  // ready(), or what the interrupt throws; then only abort() may follow.
  void finalize(Interrupt* interrupt);
  // Stops the communicator's kernels, waits for them and frees it. Not collective. Only the
  // destructor may follow.
  void abort() noexcept;
  // Aborts several at once: their kernels may wait for one another, so one after the other would
  // hang. Skips null ones.
  static void abort_all(std::span<NcclCommunicator* const> communicators) noexcept;

 private:
  friend class NcclGroup;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The sends and receives of this thread from here to end() run concurrently, on all communicators.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclCommunicator& any);
  // Ends a group that an exception left open; its operations may or may not run.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  // Passes the group to NCCL; then call ready() of each communicator in it. Throws as ready().
  void end();

 private:
  const NcclCommunicator::Impl& any_;
  bool open_ = true;
};

// Collective over `bootstrap`: why its ranks with a GPU cannot share NCCL communicators, the same
// on every rank, or nothing. Reasons: a rank without NCCL, or with a library or a driver that is
// too old (kDevice); versions that differ (kMismatch); two ranks on one GPU (kUsage). One line that
// names rank, host and a remedy.
[[nodiscard]] std::optional<Error> nccl_refusal(Collectives& bootstrap, Device device,
                                                const NcclLabel& label);

}  // namespace sluice
