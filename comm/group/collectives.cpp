#include "comm/group/collectives.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/group/binomial_tree.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/open_requests.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

namespace {

enum TagOffset : int {
  kBarrierTag,
  kBroadcastTag,
  kGatherTag,
  kPointTag,
  kExchangeTag,
  kSumTag,
  kSecondHandSumTag,
  kPartTag,
  kSecondHandPartTag,
  kOtherPartTag,
  kSecondHandOtherPartTag,
  kTagsEnd,
};
static_assert(kTagsEnd == Collectives::kTags);

WaitSubject sends(int peer, int tag, std::size_t bytes) {
  return {WaitSubject::What::kCollectiveSend, peer, tag, bytes};
}

WaitSubject receives(int peer, int tag, std::size_t bytes) {
  return {WaitSubject::What::kCollectiveReceive, peer, tag, bytes};
}

constexpr std::size_t kFirstCopy = 4096;  // bytes

}  // namespace

// Where the ranks' parts lie in the result of a gather.
class Collectives::Parts {
 public:
  Parts(int ranks, int root, std::size_t bytes_each)
      : ranks_(ranks), root_(root), bytes_each_(bytes_each) {}
  Parts(std::span<const std::size_t> ends, int root)
      : ranks_(static_cast<int>(ends.size())), root_(root), ends_(ends) {}

  // Bytes of the first `count` ranks, counted from the root.
  [[nodiscard]] std::size_t before(int count) const {
    const int rank = root_ + count;
    return rank <= ranks_ ? begin(rank) - begin(root_)
                          : begin(ranks_) - begin(root_) + begin(rank - ranks_);
  }

 private:
  [[nodiscard]] std::size_t begin(int rank) const {
    return ends_.empty() ? at(rank) * bytes_each_ : rank == 0 ? 0 : ends_[at(rank) - 1];
  }

  int ranks_, root_;
  std::size_t bytes_each_ = 0;         // where `ends` is empty
  std::span<const std::size_t> ends_;  // [rank]
};

Collectives::Collectives(Communicator& comm, int base_tag, Interrupt* interrupt)
    : comm_(comm),
      base_tag_(base_tag),
      interrupt_(interrupt),
      waiter_(comm.local_size()),
      open_(at(comm.size())),
      copy_(std::make_shared<std::vector<std::byte>>(kFirstCopy)),
      sums_(comm, {.direct = base_tag + kSumTag, .second_hand = base_tag + kSecondHandSumTag},
            {.direct = base_tag + kPartTag, .second_hand = base_tag + kSecondHandPartTag},
            interrupt),
      gathers_(
          comm, {},
          {.direct = base_tag + kOtherPartTag, .second_hand = base_tag + kSecondHandOtherPartTag},
          interrupt) {}

// `expected_bytes`: of a receive; 0 for a send.
void Collectives::wait(Request& request, std::size_t expected_bytes, const WaitSubject& subject) {
  Arrival arrival;
  arrival.bytes = expected_bytes;
  wait_until(waiter_, interrupt_, subject, [&] { return comm_.test(request, &arrival); });
  require_size(comm_, expected_bytes, arrival);
}

void Collectives::renew_copy(std::size_t bytes) {
  if (copy_.use_count() > 1 || copy_->size() < bytes) {
    copy_ = std::make_shared<std::vector<std::byte>>(std::max(bytes, kFirstCopy));
  }
}

void Collectives::send_tagged(int peer, int tag, std::span<const std::byte> bytes,
                              const KeepAlive& owner) {
  if (owner == nullptr) renew_copy(std::min(bytes.size(), kPieceBytes));
  Request request;
  const OpenRequests guard(comm_, {&request, 1}, owner == nullptr ? copy_ : owner);
  do {
    const std::size_t size = std::min(bytes.size(), kPieceBytes);
    std::span<const std::byte> piece = bytes.first(size);
    if (owner == nullptr) {
      std::copy(piece.begin(), piece.end(), copy_->begin());
      piece = std::span(*copy_).first(size);
    }
    request = comm_.start_send(peer, base_tag_ + tag, piece);
    wait(request, 0, sends(peer, base_tag_ + tag, size));
    bytes = bytes.subspan(size);
  } while (!bytes.empty());
}

void Collectives::recv_tagged(int peer, int tag, std::span<std::byte> bytes,
                              const KeepAlive& owner) {
  if (owner == nullptr) renew_copy(std::min(bytes.size(), kPieceBytes));
  Request request;
  const OpenRequests guard(comm_, {&request, 1}, owner == nullptr ? copy_ : owner);
  do {
    const std::size_t size = std::min(bytes.size(), kPieceBytes);
    const std::span<std::byte> piece =
        owner == nullptr ? std::span(*copy_).first(size) : bytes.first(size);
    request = comm_.post_recv(peer, base_tag_ + tag, piece);
    wait(request, size, receives(peer, base_tag_ + tag, size));
    if (owner == nullptr) std::copy(piece.begin(), piece.end(), bytes.begin());
    bytes = bytes.subspan(size);
  } while (!bytes.empty());
}

void Collectives::send(int peer, std::span<const std::byte> bytes, const KeepAlive& owner) {
  send_tagged(peer, kPointTag, bytes, owner);
}

void Collectives::recv(int peer, std::span<std::byte> bytes, const KeepAlive& owner) {
  recv_tagged(peer, kPointTag, bytes, owner);
}

// Dissemination barrier: after round k every rank has heard from 2^(k+1) ranks.
void Collectives::barrier() {
  const int size = comm_.size();
  for (int distance = 1; distance < size; distance *= 2) {
    renew_copy(2);
    const std::span<std::byte> both = std::span(*copy_).first(2);
    Request requests[2];
    const OpenRequests guard(comm_, requests, copy_);
    const int tag = base_tag_ + kBarrierTag;
    const int from = (comm_.rank() - distance + size) % size;
    const int to = (comm_.rank() + distance) % size;
    requests[0] = comm_.post_recv(from, tag, both.first(1));
    requests[1] = comm_.start_send(to, tag, both.last(1));
    wait(requests[0], 1, receives(from, tag, 1));
    wait(requests[1], 0, sends(to, tag, 1));
  }
}

void Collectives::broadcast(std::span<std::byte> bytes, int root) {
  const int size = comm_.size();
  const int me = (comm_.rank() - root + size) % size;
  if (me != 0) recv_tagged((tree_parent(me) + root) % size, kBroadcastTag, bytes);
  for (int i = child_count(me, size) - 1; i >= 0; --i) {
    send_tagged((tree_child(me, i) + root) % size, kBroadcastTag, bytes);
  }
}

void Collectives::gather(std::span<const std::byte> mine, std::span<std::byte> all, int root) {
  gather_parts(mine, Parts(comm_.size(), root, mine.size()), all, root);
}

void Collectives::gather(std::span<const std::byte> mine, std::span<const std::size_t> ends,
                         std::span<std::byte> all, int root) {
  gather_parts(mine, Parts(ends, root), all, root);
}

// Up the tree of the ranks counted from `root`. The parts of a rank's subtree lie behind each other
// in copy_, its own first; the root's are the result, but begin with its own.
void Collectives::gather_parts(std::span<const std::byte> mine, const Parts& parts,
                               std::span<std::byte> all, int root) {
  const int size = comm_.size();
  const int me = (comm_.rank() - root + size) % size;
  const std::size_t bytes = parts.before(subtree_end(me, size)) - parts.before(me);
  if (mine.size() != parts.before(me + 1) - parts.before(me) || (me == 0 && all.size() != bytes)) {
    throw Error(ErrorCode::kInternal,
                fmt::format("gather of {} bytes, {} with the subtree's, into {}", mine.size(),
                            bytes, all.size()),
                comm_.rank());
  }
  renew_copy(bytes);
  std::copy(mine.begin(), mine.end(), copy_->begin());
  struct Child {
    int rank;
    std::span<std::byte> parts, first_piece;
  };
  const auto child = [&](std::size_t index) -> Child {
    const int place = tree_child(me, static_cast<int>(index));
    const std::size_t begin = parts.before(place);
    const std::span<std::byte> theirs = std::span(*copy_).subspan(
        begin - parts.before(me), parts.before(subtree_end(place, size)) - begin);
    return {(place + root) % size, theirs, theirs.first(std::min(theirs.size(), kPieceBytes))};
  };
  const std::span<Request> open = std::span(open_).first(at(child_count(me, size)));
  const OpenRequests guard(comm_, open, copy_);
  for (std::size_t i = 0; i < open.size(); ++i) {
    open[i] = comm_.post_recv(child(i).rank, base_tag_ + kGatherTag, child(i).first_piece);
  }
  for (std::size_t i = 0; i < open.size(); ++i) {
    const auto [rank, theirs, piece] = child(i);
    wait(open[i], piece.size(), receives(rank, base_tag_ + kGatherTag, piece.size()));
    if (piece.size() < theirs.size()) {
      recv_tagged(rank, kGatherTag, theirs.subspan(piece.size()), copy_);
    }
  }
  const std::span<const std::byte> subtree = std::span(*copy_).first(bytes);
  if (me != 0) return send_tagged((tree_parent(me) + root) % size, kGatherTag, subtree, copy_);
  const auto rank_0 = subtree.begin() + static_cast<std::ptrdiff_t>(parts.before(size - root));
  std::rotate_copy(subtree.begin(), rank_0, subtree.end(), all.begin());
}

void Collectives::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  gather(mine, all, 0);
  broadcast(all, 0);
}

std::string Collectives::broadcast_string(const std::string& text, int root) {
  std::uint64_t size = text.size();
  broadcast(object_bytes(size), root);
  std::string result = comm_.rank() == root ? text : std::string(size, '\0');
  if (size > 0) {
    broadcast(std::as_writable_bytes(std::span(result)), root);
  }
  return result;
}

std::vector<std::string> Collectives::all_gather_strings(const std::string& mine) {
  std::vector<std::size_t> ends(at(comm_.size()));
  all_gather(mine.size(), ends);
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::string text(ends.back(), '\0');
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(text));
  if (!text.empty()) {
    gather(std::as_bytes(std::span(mine)), ends, bytes, 0);
    if (copy_->size() > kPieceBytes) copy_ = std::make_shared<std::vector<std::byte>>(kFirstCopy);
    broadcast(bytes, 0);
  }
  std::vector<std::string> all;
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    all.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return all;
}

void Collectives::ordered_sum(std::span<float> values, const KeepAlive& owner) {
  sums_.wait(sums_.start_sum(values, owner));
}

void Collectives::ordered_reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                                         const KeepAlive& owner) {
  sums_.wait(sums_.start_reduce_scatter(values, ends, owner));
}

void Collectives::all_gather_parts(std::span<float> values, std::span<const std::size_t> ends,
                                   const KeepAlive& owner) {
  sums_.wait(sums_.start_gather(values, ends, owner));
}

void Collectives::all_to_all(std::span<const std::byte> send, std::span<std::byte> receive,
                             const KeepAlive& owner) {
  const int size = comm_.size(), me = comm_.rank(), tag = base_tag_ + kExchangeTag;
  const std::size_t part = send.size() / at(size);
  if (send.size() != receive.size() || part * at(size) != send.size()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("an exchange of {} bytes for {} among {} ranks", send.size(),
                            receive.size(), size),
                me);
  }
  exchanged_.resize(2 * at(size));
  const OpenRequests guard(comm_, exchanged_, owner);
  const std::span<const std::byte> own = send.subspan(at(me) * part, part);
  std::copy(own.begin(), own.end(), receive.subspan(at(me) * part).begin());
  for (std::size_t begin = 0; begin < part; begin += kPieceBytes) {
    const std::size_t bytes = std::min(kPieceBytes, part - begin);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      const std::size_t first = at(peer) * part + begin;
      exchanged_[2 * at(peer)] = comm_.post_recv(peer, tag, receive.subspan(first, bytes));
      exchanged_[2 * at(peer) + 1] = comm_.start_send(peer, tag, send.subspan(first, bytes));
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      wait(exchanged_[2 * at(peer)], bytes, receives(peer, tag, bytes));
      wait(exchanged_[2 * at(peer) + 1], 0, sends(peer, tag, bytes));
    }
  }
}

}  // namespace sluice
