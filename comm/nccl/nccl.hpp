// NcclCommunicator: ranks whose GPUs exchange through NCCL.
//
// Made collectively over the bootstrap every rank has anyway (a Communicator over MPI or loopback),
// which carries NCCL's id and what must be known before NCCL is asked: who lacks it, whose version
// differs, who shares a GPU. The library is opened when the first one is made; it need not be there
// before.
//
// NCCL's non-blocking mode: a call may still be at work when it returns. Until ready() says true
// nothing else may be done with the communicator but poll() and abort(), and nothing may be put on
// the streams its operations were given. No call here blocks the host but those that take an
// Interrupt, which end when it throws, and abort(). NCCL itself notices a peer's death over a
// network; of a peer on the same host only a control channel tells.
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

// What messages say.
struct NcclLabel {
  std::string group;  // "the pipeline", "the replicas of stage 3"
  int rank = -1;      // this rank, as a user counts ranks: in the job; -1: as the bootstrap counts
};

class NcclCommunicator {
 public:
  // Collective over `bootstrap`; all its ranks belong. `device` is this rank's GPU. Throws what
  // nccl_refusal() returns, or Error(kPeer | kDevice) where NCCL fails; `interrupt`, polled while
  // the communicator is made, may be null. `most_blocks`, equal on all ranks, bounds the
  // multiprocessors that one of its kernels occupies, also while it waits for a peer; 0 leaves that
  // to NCCL.
  NcclCommunicator(Collectives& bootstrap, Device device, const NcclLabel& label,
                   Interrupt* interrupt, int most_blocks = 0);
  // Aborts unless finalized. Never throws.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // As NCCL counts, which is as the bootstrap does.
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

  // Between the beginning and the end of an NcclGroup. The memory is the device's; both ends give
  // the same number of bytes. Throw as ready().
  void send(int peer, std::span<const std::byte> data, StreamView stream) const;
  void recv(int peer, std::span<std::byte> data, StreamView stream) const;
  // Collective over the communicator. In place, in fp32, in an order of NCCL's choice.
  void all_reduce_sum(std::span<float> values, StreamView stream) const;

  // Collective over the communicator: the orderly end, once everything put on streams is done.
  // Throws as ready() or what the interrupt throws; abort() then remains.
  void finalize(Interrupt* interrupt);
  // Makes the communicator's kernels exit, waits for them and frees it; any rank for itself. Only
  // the destructor may follow.
  void abort() noexcept;
  // The same for several whose kernels may wait for one another, at once: one after the other would
  // hang. Null ones are passed over.
  static void abort_all(std::span<NcclCommunicator* const> communicators) noexcept;

 private:
  friend class NcclGroup;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The sends and receives of this thread from here to end() run side by side, whatever the
// communicator.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclCommunicator& any);
  // Ends a group that an exception left open; what it held may or may not run.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  // Hands the group to NCCL; each communicator in it is then asked ready(). Throws as ready().
  void end();

 private:
  const NcclCommunicator::Impl& any_;
  bool open_ = true;
};

// Collective over `bootstrap`: why those of its ranks that have a GPU cannot share NCCL
// communicators, the same on every rank, or nothing: a rank without NCCL, or with a library or a
// driver that is too old (kDevice), versions that differ (kMismatch), two ranks on one GPU
// (kUsage). One line that names rank and host and says what would work.
[[nodiscard]] std::optional<Error> nccl_refusal(Collectives& bootstrap, Device device,
                                                const NcclLabel& label);

}  // namespace sluice
