#include "comm/group/collectives.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/group/binomial_tree.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

namespace {

enum TagOffset : int {
  kBarrierTag,
  kBroadcastTag,
  kGatherTag,
  kPointTag,
  kScatterTag,
  kPartTag,
  kExchangeTag,
};

WaitSubject sends(int peer, int tag, std::size_t bytes) {
  return {WaitSubject::What::kCollectiveSend, peer, tag, bytes};
}

WaitSubject receives(int peer, int tag, std::size_t bytes) {
  return {WaitSubject::What::kCollectiveReceive, peer, tag, bytes};
}

constexpr std::size_t kFirstCopy = 4096;  // bytes

// Elements of a part per block: two blocks per peer fit a core's L2 cache.
constexpr std::size_t kBlock = 32 * 1024;

struct Range {
  std::size_t begin = 0;
  std::size_t size = 0;
};

// The part of `rank` of the values that are divided at `ends`.
Range part_of(std::span<const std::size_t> ends, int rank) {
  const std::size_t begin = rank == 0 ? 0 : ends[at(rank) - 1];
  return {begin, ends[at(rank)] - begin};
}

// Block `block` of the part of `rank`; empty beyond the end.
Range block_of(std::span<const std::size_t> ends, int rank, std::size_t block) {
  const Range part = part_of(ends, rank);
  const std::size_t before = std::min(part.size, block * kBlock);
  return {part.begin + before, std::min(kBlock, part.size - before)};
}

// Of the largest part.
std::size_t block_count(std::span<const std::size_t> ends) {
  std::size_t largest = 0;
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    largest = std::max(largest, part_of(ends, rank).size);
  }
  return (largest + kBlock - 1) / kBlock;
}

void add(float* __restrict sum, const float* __restrict term, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    sum[i] += term[i];
  }
}

}  // namespace

// Cancels the requests of a call that ends by an exception; the communicator keeps the memory of
// both owners, either of which may be null.
class Collectives::OpenRequests {
 public:
  OpenRequests(Communicator& comm, std::span<Request> requests, KeepAlive owner,
               KeepAlive other = nullptr)
      : comm_(comm), requests_(requests), owners_{std::move(owner), std::move(other)} {}
  ~OpenRequests() {
    bool any = false;
    for (Request& request : requests_) {
      if (request.index == Request::kNone) {
        continue;
      }
      any = true;
      try {
        comm_.cancel(request);
      } catch (...) {  // the request is lost with its communicator
        request.index = Request::kNone;
      }
    }
    for (KeepAlive& owner : owners_) {
      if (any && owner != nullptr) comm_.keep(std::move(owner));
    }
  }
  OpenRequests(const OpenRequests&) = delete;
  OpenRequests& operator=(const OpenRequests&) = delete;

 private:
  Communicator& comm_;
  std::span<Request> requests_;
  std::array<KeepAlive, 2> owners_;
};

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
      open_(4 * at(comm.size())),
      even_ends_(at(comm.size())),
      copy_(std::make_shared<std::vector<std::byte>>(kFirstCopy)),
      blocks_(std::make_shared<std::vector<float>>()) {}

// `expected_bytes`: of a receive; 0 for a send.
void Collectives::wait(Request& request, std::size_t expected_bytes, const WaitSubject& subject) {
  Arrival arrival;
  arrival.bytes = expected_bytes;
  wait_until(waiter_, interrupt_, subject, [&] { return comm_.test(request, &arrival); });
  if (arrival.bytes != expected_bytes) {
    throw Error(ErrorCode::kMismatch,
                fmt::format("rank {} expected {} bytes from rank {}, got {}: the ranks disagree "
                            "about the size of a collective",
                            comm_.rank(), expected_bytes, arrival.source, arrival.bytes),
                comm_.rank());
  }
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

void Collectives::reserve_sum(std::size_t count) {
  if (comm_.size() == 1) return;
  const std::size_t needed = 2 * at(comm_.size()) * std::min(kBlock, count);
  if (blocks_.use_count() > 1 || blocks_->size() < needed) {
    blocks_ = std::make_shared<std::vector<float>>(needed);
  }
}

void Collectives::require_parts(std::span<const float> values,
                                std::span<const std::size_t> ends) const {
  if (ends.size() == at(comm_.size()) && std::is_sorted(ends.begin(), ends.end()) &&
      ends.back() == values.size()) {
    return;
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("{} values in parts that end at {}; legal: {} ends that ascend to {}",
                          values.size(), joined(ends, ", "), comm_.size(), values.size()),
              comm_.rank());
}

void Collectives::ordered_sum(std::span<float> values, const KeepAlive& owner) {
  const std::size_t ranks = at(comm_.size());
  const std::size_t part = (values.size() + ranks - 1) / ranks;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    even_ends_[rank] = std::min(values.size(), (rank + 1) * part);
  }
  ordered_reduce_scatter(values, even_ends_, owner);
  all_gather_parts(values, even_ends_, owner);
}

void Collectives::ordered_reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                                         const KeepAlive& owner) {
  require_parts(values, ends);
  if (comm_.size() == 1) return;
  reserve_sum(values.size());
  const OpenRequests guard(comm_, open_, owner, blocks_);
  reduce_scatter(values, ends);
}

void Collectives::all_gather_parts(std::span<float> values, std::span<const std::size_t> ends,
                                   const KeepAlive& owner) {
  require_parts(values, ends);
  if (comm_.size() == 1) return;
  const OpenRequests guard(comm_, open_, owner);
  gather_blocks(values, ends);
}

Request& Collectives::block_receive(int rank, std::size_t block) {
  return open_[block % 2 * 2 * at(comm_.size()) + at(rank)];
}

Request& Collectives::block_send(int rank, std::size_t block) {
  return open_[(block % 2 * 2 + 1) * at(comm_.size()) + at(rank)];
}

// Every rank sends its block of each part to the part's rank, one block ahead of the sum.
// blocks_: [2 halves, rank, block].
void Collectives::reduce_scatter(std::span<float> values, std::span<const std::size_t> ends) {
  const int size = comm_.size();
  const int me = comm_.rank();
  const std::size_t blocks = block_count(ends);
  const std::size_t stride = block_of(ends, me, 0).size;
  const auto slot = [&](int rank, std::size_t block) {
    return blocks_->data() + (block % 2 * at(size) + at(rank)) * stride;
  };
  const auto start = [&](std::size_t block) {
    const Range mine = block_of(ends, me, block);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      if (mine.size > 0) {
        block_receive(peer, block) =
            comm_.post_recv(peer, base_tag_ + kScatterTag,
                            std::as_writable_bytes(std::span(slot(peer, block), mine.size)));
      }
      const Range theirs = block_of(ends, peer, block);
      if (theirs.size > 0) {
        block_send(peer, block) =
            comm_.start_send(peer, base_tag_ + kScatterTag,
                             std::as_bytes(values.subspan(theirs.begin, theirs.size)));
      }
    }
  };
  if (blocks > 0) start(0);
  for (std::size_t block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) start(block + 1);
    const Range mine = block_of(ends, me, block);
    const auto term = [&](std::size_t rank) {
      return rank == at(me) ? values.data() + mine.begin : slot(static_cast<int>(rank), block);
    };
    for (int rank = 0; rank < size && mine.size > 0; ++rank) {
      const std::size_t bytes = mine.size * sizeof(float);
      if (rank != me) {
        wait(block_receive(rank, block), bytes, receives(rank, base_tag_ + kScatterTag, bytes));
      }
      add_leaf(at(rank), at(size),
               [&](std::size_t into, std::size_t from) { add(term(into), term(from), mine.size); });
    }
    if (me != 0) std::copy_n(term(0), mine.size, term(at(me)));
    for (int rank = 0; rank < size; ++rank) {
      if (block_send(rank, block).index == Request::kNone) continue;
      wait(block_send(rank, block), 0,
           sends(rank, base_tag_ + kScatterTag, block_of(ends, rank, block).size * sizeof(float)));
    }
  }
}

// Every rank sends its part to all, in blocks.
void Collectives::gather_blocks(std::span<float> values, std::span<const std::size_t> ends) {
  const int size = comm_.size();
  const std::size_t blocks = block_count(ends);
  for (std::size_t block = 0; block < blocks; ++block) {
    const Range mine = block_of(ends, comm_.rank(), block);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == comm_.rank()) continue;
      const Range theirs = block_of(ends, peer, block);
      if (theirs.size > 0) {
        block_receive(peer, 0) =
            comm_.post_recv(peer, base_tag_ + kPartTag,
                            std::as_writable_bytes(values.subspan(theirs.begin, theirs.size)));
      }
      if (mine.size > 0) {
        block_send(peer, 0) = comm_.start_send(
            peer, base_tag_ + kPartTag, std::as_bytes(values.subspan(mine.begin, mine.size)));
      }
    }
    for (int peer = 0; peer < size; ++peer) {
      if (block_receive(peer, 0).index != Request::kNone) {
        const std::size_t bytes = block_of(ends, peer, block).size * sizeof(float);
        wait(block_receive(peer, 0), bytes, receives(peer, base_tag_ + kPartTag, bytes));
      }
      if (block_send(peer, 0).index != Request::kNone) {
        wait(block_send(peer, 0), 0, sends(peer, base_tag_ + kPartTag, mine.size * sizeof(float)));
      }
    }
  }
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
