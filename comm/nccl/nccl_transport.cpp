#include "comm/nccl/nccl_transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>

#include "comm/group/edge_probe.hpp"

namespace sluice {

namespace {

constexpr std::size_t kProbeBytes = 1024;

// A receive is posted in advance, and its kernel occupies the multiprocessors of all its blocks
// until the message arrives. By default NCCL takes up to 32, a quarter of an H100. Two blocks fill
// one of its 18 NVLinks (NCCL issue 1703). In a communicator of two ranks NCCL 2.28 takes half of
// its blocks for a message of up to 16 MiB a block (enqueue.cc), so four carry about 50 GB/s on 3 %
// of the multiprocessors, and larger messages get eight. Over a network NCCL takes two or four
// (issue 1424). NCCL_MAX_CTAS in the environment overrides the number. Not measured.
constexpr int kMostMessageBlocks = 8;
// All communicators of a rank have this part of its multiprocessors: a small GPU, or a rank with
// many edges, takes fewer blocks for each. Else the kernels that others wait for may find no room.
constexpr int kPartsForMessages = 2;

// Pairs with an even lower rank come first: in a pipeline these pairs share no rank and connect
// concurrently. Within a pair the edge from the lower rank comes first.
std::vector<NcclTransport::Edge> in_agreed_order(std::span<const NcclTransport::Edge> edges) {
  std::vector<NcclTransport::Edge> order(edges.begin(), edges.end());
  const auto place = [](const NcclTransport::Edge& edge) {
    const auto [low, high] = std::minmax(edge.from, edge.to);
    return std::tuple(low % 2, low, high, edge.from > edge.to);
  };
  std::sort(order.begin(), order.end(),
            [&](const auto& a, const auto& b) { return place(a) < place(b); });
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

// The pairs of ranks that have edges, in classes in which no rank is in two pairs: those of a class
// connect at the same time. A chain has two classes.
using Pair = std::pair<int, int>;
std::vector<std::vector<Pair>> classes_of(const std::vector<NcclTransport::Edge>& order) {
  std::vector<std::vector<Pair>> classes;
  for (const NcclTransport::Edge& edge : order) {
    const Pair pair = std::minmax(edge.from, edge.to);
    const auto has_it = [&](const std::vector<Pair>& each) {
      return std::find(each.begin(), each.end(), pair) != each.end();
    };
    if (std::any_of(classes.begin(), classes.end(), has_it)) continue;
    const auto meets = [&](const Pair& other) {
      return other.first == pair.first || other.first == pair.second ||
             other.second == pair.first || other.second == pair.second;
    };
    const auto free = std::find_if(classes.begin(), classes.end(), [&](const auto& each) {
      return std::none_of(each.begin(), each.end(), meets);
    });
    (free != classes.end() ? *free : classes.emplace_back()).push_back(pair);
  }
  return classes;
}

// A rank's number in the communicator of it and another.
int side_of(int rank, int other) { return rank > other ? 1 : 0; }

// Tells `all`, which may be null, of the waits of a pair, with ranks of the bootstrap communicator
// as peers.
class PairWaits final : public Interrupt {
 public:
  PairWaits(Interrupt* all, Pair pair) : all_(all), pair_(pair) {}
  void poll() override {
    if (all_ != nullptr) all_->poll();
  }
  void begin_wait(const WaitSubject& subject) noexcept override {
    WaitSubject of_all = subject;
    if (subject.peer >= 0) of_all.peer = subject.peer == 0 ? pair_.first : pair_.second;
    if (all_ != nullptr) all_->begin_wait(of_all);
  }
  void end_wait() noexcept override {
    if (all_ != nullptr) all_->end_wait();
  }

 private:
  Interrupt* all_;
  Pair pair_;
};

}  // namespace

NcclTransport::NcclTransport(NcclQueue& queue, Collectives& bootstrap, const DeviceMemory& memory,
                             std::span<const Edge> edges, const NcclLabel& label,
                             Interrupt* interrupt)
    : queue_(queue), rank_(bootstrap.communicator().rank()) {
  // All groups first: whoever waits in split() cannot hear that another rank failed.
  const std::vector<Edge> order = in_agreed_order(edges);
  std::vector<std::pair<Pair, std::unique_ptr<Communicator>>> pairs;  // this rank's
  for (const std::vector<Pair>& each : classes_of(order)) {
    const auto mine = std::find_if(each.begin(), each.end(), [&](const Pair& pair) {
      return pair.first == rank_ || pair.second == rank_;
    });
    const bool joins = mine != each.end();
    const int others = bootstrap.communicator().size();
    auto group = bootstrap.communicator().split(joins ? mine->first : others, rank_);
    if (joins) pairs.emplace_back(*mine, std::move(group));
  }
  const int blocks = blocks_within(memory.device(), kPartsForMessages, communicators(order, rank_),
                                   kMostMessageBlocks);
  const NcclLabel named = {label.group, label.rank < 0 ? rank_ : label.rank};
  for (const auto& [pair, group] : pairs) {
    PairWaits waits(interrupt, pair);
    Collectives both(*group, 0, &waits);
    for (const Edge& edge : order) {
      if (Pair(std::minmax(edge.from, edge.to)) != pair) continue;
      edges_.push_back({edge, queue_.add(std::make_unique<NcclCommunicator>(
                                  both, memory.device(), named, interrupt, blocks))});
    }
  }
  if (!order.empty()) warm_up(memory, interrupt);
}

int NcclTransport::communicators(std::span<const Edge> edges, int rank) {
  const std::vector<Edge> order = in_agreed_order(edges);
  return static_cast<int>(std::count_if(order.begin(), order.end(), [&](const Edge& edge) {
    return edge.from == rank || edge.to == rank;
  }));
}

void NcclTransport::warm_up(const DeviceMemory& memory, Interrupt* interrupt) {
  const Buffer room = memory.allocate(2 * kProbeBytes, DeviceMemory::Use::kTemporary);
  try {
    for (const Own& own : edges_) probe(own, room, interrupt);
  } catch (...) {
    queue_.abort();  // its kernels may wait for a lost peer, and freeing memory waits for them
    throw;
  }
}

void NcclTransport::probe(const Own& own, const Buffer& memory, Interrupt* interrupt) {
  const Edge& edge = own.edge;
  const std::vector<std::byte> expected = probe_bytes({edge.from, edge.to, kProbeBytes});
  const std::span<std::byte> out(memory.data(), kProbeBytes);
  const std::span<std::byte> in(memory.data() + kProbeBytes, kProbeBytes);
  copy_now(memory.device(), out.data(), expected.data(), kProbeBytes);
  std::vector<std::byte> arrived(kProbeBytes);
  copy_now(memory.device(), in.data(), arrived.data(), kProbeBytes);
  const Event now;
  queue_.begin_group();
  NcclTicket sent, received;
  if (edge.from == rank_) sent = send(edge.to, out, now);
  if (edge.to == rank_) received = recv(edge.from, in, now);
  queue_.end_group();
  queue_.wait(sent, interrupt);
  if (edge.to != rank_) return;
  queue_.wait(received, interrupt);
  copy_now(memory.device(), arrived.data(), in.data(), kProbeBytes);
  if (arrived != expected) {
    const NcclCommunicator& ranks = queue_.communicator(own.nccl_stream);
    throw Error(ErrorCode::kDevice,
                fmt::format("NCCL delivers other bytes than were sent from {} to {}: "
                            "direct access between these GPUs is broken (NCCL_P2P_DISABLE=1 "
                            "avoids it)",
                            ranks.name_of(side_of(edge.from, edge.to)),
                            ranks.name_of(side_of(edge.to, edge.from))));
  }
}

NcclTicket NcclTransport::send(int peer, std::span<const std::byte> data, const Event& ready) {
  return queue_.send(nccl_stream_of({rank_, peer}), side_of(peer, rank_), data, ready);
}

NcclTicket NcclTransport::recv(int peer, std::span<std::byte> data, const Event& ready) {
  return queue_.recv(nccl_stream_of({peer, rank_}), side_of(peer, rank_), data, ready);
}

void NcclTransport::register_memory(std::span<std::byte> memory) {
  for (const Own& own : edges_) queue_.communicator(own.nccl_stream).register_memory(memory);
}

int NcclTransport::nccl_stream_of(const Edge& edge) const {
  for (const Own& own : edges_) {
    if (own.edge == edge) return own.nccl_stream;
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("no edge from rank {} to rank {} goes through NCCL", edge.from, edge.to));
}

}  // namespace sluice
