// A message of full size over each of a set of edges, before anything depends on them: a library
// may take a GPU's memory for small messages, or within a host, and fail for others.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

// From one rank to another.
struct ProbedEdge {
  int from = 0, to = 0;
  std::size_t bytes = 0;
  friend bool operator==(const ProbedEdge&, const ProbedEdge&) = default;
};

// The bytes that go over an edge; they differ from edge to edge.
[[nodiscard]] std::vector<std::byte> probe_bytes(const ProbedEdge& edge);

// Collective over `comm`, which has no other open messages. Sends over one edge after the other,
// from `memory` to `memory`, from which it takes a message temporarily; more bytes than
// Collectives::kPieceBytes go in pieces. `edges` are equal on all ranks, in one order. Returns the
// first edge to this rank that delivered other bytes than were sent. `interrupt`, which may be
// null, is polled by waits. Throws what the communicator throws; then the memory stays until its
// messages have ended.
[[nodiscard]] std::optional<ProbedEdge> probe_edges(Communicator& comm, const DeviceMemory& memory,
                                                    std::span<const ProbedEdge> edges,
                                                    Interrupt* interrupt);

}  // namespace sluice
