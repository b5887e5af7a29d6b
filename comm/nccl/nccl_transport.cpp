#include "comm/nccl/nccl_transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>

namespace sluice {

namespace {

constexpr std::size_t kProbeBytes = 1024;

// A receive is posted in advance, and its kernel occupies the multiprocessors of all its blocks
// until the message arrives. By default NCCL takes up to 32, a quarter of an H100. Two blocks fill
// one of its 18 NVLinks (NCCL issue 1703). In a communicator of n ranks NCCL 2.28 takes 8 / n of
// eight for a message of up to 16 MiB a block, at least one, and more for larger ones (enqueue.cc).
// Communicators of two ranks would give each message four. NCCL rounds up to a power of two.
// NCCL_MAX_CTAS in the environment overrides the number. Not measured.
constexpr int kMessageBlocks = 8;

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

// [edge of `order`] Its communicator: the first in which neither end has an edge. On a chain, and
// on a ring of an even number of ranks, that is the fewest there can be, four; elsewhere less than
// twice that.
std::vector<int> communicator_of(const std::vector<NcclTransport::Edge>& order) {
  std::vector<int> chosen;
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::vector<bool> taken(i + 1);
    for (std::size_t k = 0; k < i; ++k) {
      const auto& [from, to] = order[k];
      const bool meets =
          from == order[i].from || from == order[i].to || to == order[i].from || to == order[i].to;
      if (meets) taken[static_cast<std::size_t>(chosen[k])] = true;
    }
    chosen.push_back(
        static_cast<int>(std::find(taken.begin(), taken.end(), false) - taken.begin()));
  }
  return chosen;
}

// The first message over an edge; its bytes differ from edge to edge.
std::array<std::byte, kProbeBytes> probe_of(const NcclTransport::Edge& edge) {
  std::array<std::byte, kProbeBytes> bytes{};
  auto state = static_cast<std::uint32_t>(edge.from * 65537 + edge.to + 1);
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

}  // namespace

NcclTransport::NcclTransport(NcclQueue& queue, Collectives& bootstrap, const DeviceMemory& memory,
                             std::span<const Edge> edges, const NcclLabel& label,
                             Interrupt* interrupt)
    : queue_(queue), rank_(bootstrap.communicator().rank()) {
  const std::vector<Edge> order = in_agreed_order(edges);
  const std::vector<int> chosen = communicator_of(order);
  std::vector<int> nccl_streams;
  for (int i = 0; i < communicators(edges); ++i) {
    nccl_streams.push_back(queue_.add(std::make_unique<NcclCommunicator>(
        bootstrap, memory.device(), label, interrupt, kMessageBlocks)));
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].from != rank_ && order[i].to != rank_) continue;
    edges_.push_back({order[i], nccl_streams[static_cast<std::size_t>(chosen[i])]});
  }
  if (!order.empty()) warm_up(memory, interrupt);
}

int NcclTransport::communicators(std::span<const Edge> edges) {
  const std::vector<int> chosen = communicator_of(in_agreed_order(edges));
  return chosen.empty() ? 0 : 1 + *std::max_element(chosen.begin(), chosen.end());
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
  const auto expected = probe_of(edge);
  const std::span<std::byte> out(memory.data(), kProbeBytes);
  const std::span<std::byte> in(memory.data() + kProbeBytes, kProbeBytes);
  copy_now(memory.device(), out.data(), expected.data(), kProbeBytes);
  std::array<std::byte, kProbeBytes> arrived{};
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
                            ranks.name_of(edge.from), ranks.name_of(edge.to)));
  }
}

NcclTicket NcclTransport::send(int peer, std::span<const std::byte> data, const Event& ready) {
  return queue_.send(nccl_stream_of({rank_, peer}), peer, data, ready);
}

NcclTicket NcclTransport::recv(int peer, std::span<std::byte> data, const Event& ready) {
  return queue_.recv(nccl_stream_of({peer, rank_}), peer, data, ready);
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
