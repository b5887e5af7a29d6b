// Small blocking collectives, built from point-to-point messages in fixed rank order. They serve
// start-up, step reports and replicas, never a pipeline's activations. All ranks of `comm` make the
// same calls. `interrupt` may be null. A call that throws has cancelled its requests; the object
// may be used again only if every rank threw. Sizes that differ between ranks are Error(kMismatch).
// Messages that go on after a throw use the object's own memory, or memory whose owner the caller
// names; the communicator keeps both. Broadcasts and gathers are binomial trees
// (binomial_tree.hpp): of n ranks none exchanges more than ceil(log2(n)) messages for each, and a
// rank that gathers holds its subtree's bytes. Long messages travel in pieces.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/group/communicator.hpp"
#include "comm/group/host_sums.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

class Collectives {
 public:
  // kTags tags of `comm`, from base_tag on, are this object's.
  static constexpr int kTags = 11;
  Collectives(Communicator& comm, int base_tag, Interrupt* interrupt);

  void barrier();
  // All ranks receive rank `root`'s bytes; sizes agree.
  void broadcast(std::span<std::byte> bytes, int root);
  // result = rank-major concatenation, on `root` only. Sizes agree on every rank.
  void gather(std::span<const std::byte> mine, std::span<std::byte> all, int root);
  // The same of parts of any sizes: that of rank r ends at byte ends[r] of the result. All ranks
  // pass the same `ends`.
  void gather(std::span<const std::byte> mine, std::span<const std::size_t> ends,
              std::span<std::byte> all, int root);
  // As gather, on all ranks.
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);
  // A value of each rank; `all` has one for each.
  template <typename T>
  void all_gather(const T& mine, std::vector<T>& all) {
    all_gather(object_bytes(mine), std::as_writable_bytes(std::span(all)));
  }
  // Strings of any length, in one gather and one broadcast after those of the lengths; for start-up
  // and errors. Allocates.
  [[nodiscard]] std::vector<std::string> all_gather_strings(const std::string& mine);
  [[nodiscard]] std::string broadcast_string(const std::string& text, int root);

  // Blocking point to point. Without an `owner` of the bytes, they pass through a copy of at most
  // kPieceBytes.
  void send(int peer, std::span<const std::byte> bytes, const KeepAlive& owner = nullptr);
  void recv(int peer, std::span<std::byte> bytes, const KeepAlive& owner = nullptr);

  // HostSums' calls, each waited for.
  void ordered_sum(std::span<float> values, const KeepAlive& owner = nullptr);
  void ordered_reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                              const KeepAlive& owner = nullptr);
  void all_gather_parts(std::span<float> values, std::span<const std::size_t> ends,
                        const KeepAlive& owner = nullptr);
  // Both have an equal part for each rank: `receive` gets what each rank has for this one. Without
  // an `owner` of both, the caller keeps their memory as HostSums says.
  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive,
                  const KeepAlive& owner = nullptr);
  // The same without waiting, over this object's ranks and interrupt.
  [[nodiscard]] HostSums& sums() { return sums_; }
  // The same for gathers that wait for no sums of sums(), and hold up none. It makes no sums.
  [[nodiscard]] HostSums& gathers() { return gathers_; }

  [[nodiscard]] Communicator& communicator() { return comm_; }

  // Longer messages travel in pieces.
  static constexpr std::size_t kPieceBytes = std::size_t{4} << 20;

 private:
  class Parts;

  void wait(Request& request, std::size_t expected_bytes, const WaitSubject& subject);
  void send_tagged(int peer, int tag, std::span<const std::byte> bytes,
                   const KeepAlive& owner = nullptr);
  void recv_tagged(int peer, int tag, std::span<std::byte> bytes, const KeepAlive& owner = nullptr);
  // Makes copy_ one of at least `bytes` that no message uses.
  void renew_copy(std::size_t bytes);
  void gather_parts(std::span<const std::byte> mine, const Parts& parts, std::span<std::byte> all,
                    int root);

  Communicator& comm_;
  int base_tag_;
  Interrupt* interrupt_;
  Waiter waiter_;
  std::vector<Request> open_;       // of the running gather; sized once
  std::vector<Request> exchanged_;  // of the running all_to_all(); sized by the first
  // Of the piece that is being sent or received, or of a gather's subtree. The communicator shares
  // it after a throw.
  std::shared_ptr<std::vector<std::byte>> copy_;
  HostSums sums_, gathers_;
};

}  // namespace sluice
