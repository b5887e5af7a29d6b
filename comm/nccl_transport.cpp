#include "comm/nccl_transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>

#include "comm/error.hpp"

namespace sluice {

namespace {

constexpr std::size_t kProbeBytes = 1024;

// Pairs of ranks with an even lower rank first: in a pipeline these share no rank, so that they can
// connect at the same time. Within a pair the edge from the lower rank first.
std::vector<NcclTransport::Edge> in_agreed_order(std::span<const NcclTransport::Edge> edges) {
  std::vector<NcclTransport::Edge> order(edges.begin(), edges.end());
  const auto place = [](const NcclTransport::Edge& edge) {
    const auto [low, high] = std::minmax(edge.first, edge.second);
    return std::tuple(low % 2, low, high, edge.first > edge.second);
  };
  std::sort(order.begin(), order.end(),
            [&](const auto& a, const auto& b) { return place(a) < place(b); });
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

// What travels over an edge first: differs from edge to edge and from byte to byte.
std::array<std::byte, kProbeBytes> probe_of(const NcclTransport::Edge& edge) {
  std::array<std::byte, kProbeBytes> bytes{};
  auto state = static_cast<std::uint32_t>(edge.first * 65537 + edge.second + 1);
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

}  // namespace

NcclTransport::NcclTransport(NcclQueue& queue, Collectives& seam, Device device,
                             std::span<const Edge> edges, Communicators communicators,
                             const std::string& label, Interrupt* interrupt)
    : queue_(queue), rank_(seam.communicator().rank()) {
  const std::vector<Edge> order = in_agreed_order(edges);
  if (order.empty()) return;
  add_lanes(seam, device, order, communicators, label, interrupt);
  warm_up(device, order, interrupt);
}

void NcclTransport::add_lanes(Collectives& seam, Device device, const std::vector<Edge>& edges,
                              Communicators communicators, const std::string& label,
                              Interrupt* interrupt) {
  std::vector<std::unique_ptr<NcclCommunicator>> pairs;
  int shared_lane = -1;
  if (communicators == Communicators::kPerEdge) {
    pairs = NcclCommunicator::make_pairs(seam, device, edges, label, interrupt);
  } else {
    shared_lane = queue_.add(std::make_unique<NcclCommunicator>(seam, device, label, interrupt));
  }
  for (std::size_t i = 0; i < edges.size(); ++i) {
    if (edges[i].first != rank_ && edges[i].second != rank_) continue;
    const int lane = pairs.empty() ? shared_lane : queue_.add(std::move(pairs[i]));
    const auto route_to = [&](int peer) {
      return Route{peer, lane, queue_.communicator(lane).rank_of(peer)};
    };
    if (edges[i].first == rank_) outgoing_.push_back(route_to(edges[i].second));
    if (edges[i].second == rank_) incoming_.push_back(route_to(edges[i].first));
  }
}

void NcclTransport::warm_up(Device device, const std::vector<Edge>& edges, Interrupt* interrupt) {
  const Buffer memory(device, 2 * kProbeBytes);
  try {
    for (const Edge& edge : edges) {
      if (edge.first == rank_ || edge.second == rank_) probe(edge, memory, interrupt);
    }
  } catch (...) {
    queue_.abort();  // its kernels may wait for a peer that is gone, and freeing memory for them
    throw;
  }
}

void NcclTransport::probe(const Edge& edge, const Buffer& memory, Interrupt* interrupt) {
  const auto expected = probe_of(edge);
  const std::span<std::byte> out(memory.data(), kProbeBytes);
  const std::span<std::byte> in(memory.data() + kProbeBytes, kProbeBytes);
  copy_now(memory.device(), out.data(), expected.data(), kProbeBytes);
  std::array<std::byte, kProbeBytes> arrived{};
  copy_now(memory.device(), in.data(), arrived.data(), kProbeBytes);
  const Event now;
  queue_.begin_group();
  NcclTicket sent, received;
  if (edge.first == rank_) sent = send(edge.second, out, now);
  if (edge.second == rank_) received = recv(edge.first, in, now);
  queue_.end_group();
  queue_.wait(sent, interrupt);
  if (edge.second != rank_) return;
  queue_.wait(received, interrupt);
  copy_now(memory.device(), arrived.data(), in.data(), kProbeBytes);
  if (arrived != expected) {
    throw Error(ErrorCode::kDevice,
                fmt::format("NCCL delivers other bytes than were sent from rank {} to rank {}: "
                            "direct access between these GPUs is broken (NCCL_P2P_DISABLE=1 "
                            "does without)",
                            edge.first, edge.second));
  }
}

NcclTicket NcclTransport::send(int peer, std::span<const std::byte> data, const Event& ready) {
  const Route& to = route(outgoing_, peer, "to");
  return queue_.send(to.lane, to.nccl_peer, data, ready);
}

NcclTicket NcclTransport::recv(int peer, std::span<std::byte> data, const Event& ready) {
  const Route& from = route(incoming_, peer, "from");
  return queue_.recv(from.lane, from.nccl_peer, data, ready);
}

const NcclTransport::Route& NcclTransport::route(const std::vector<Route>& routes, int peer,
                                                 const char* direction) const {
  const auto found = std::find_if(routes.begin(), routes.end(),
                                  [&](const Route& each) { return each.peer == peer; });
  if (found == routes.end()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("rank {} has no edge {} rank {} through NCCL", rank_, direction, peer));
  }
  return *found;
}

}  // namespace sluice
