#include "comm/group/edge_probe.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/group/collectives.hpp"

namespace sluice {

std::vector<std::byte> probe_bytes(const ProbedEdge& edge) {
  std::vector<std::byte> bytes(edge.bytes);
  auto state = static_cast<std::uint64_t>(edge.from) << 32U | static_cast<std::uint32_t>(edge.to);
  for (std::size_t i = 0; i < bytes.size(); i += sizeof state) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(bytes.data() + i, &state, std::min(sizeof state, bytes.size() - i));
  }
  return bytes;
}

std::optional<ProbedEdge> probe_edges(Communicator& comm, const DeviceMemory& memory,
                                      std::span<const ProbedEdge> edges, Interrupt* interrupt) {
  std::optional<ProbedEdge> broken;
  const Device device = memory.device();
  Collectives messages(comm, 0, interrupt);
  for (const ProbedEdge& edge : edges) {
    const bool sends = comm.rank() == edge.from;
    if (edge.bytes == 0 || edge.from == edge.to || (!sends && comm.rank() != edge.to)) continue;
    const auto own =
        std::make_shared<Buffer>(memory.allocate(edge.bytes, DeviceMemory::Use::kTemporary));
    const std::vector<std::byte> sent = probe_bytes(edge);
    std::vector<std::byte> arrived(edge.bytes);
    copy_now(device, own->data(), sends ? sent.data() : arrived.data(), edge.bytes);
    if (sends) {
      messages.send(edge.to, {own->data(), edge.bytes}, own);
      continue;
    }
    messages.recv(edge.from, {own->data(), edge.bytes}, own);
    copy_now(device, arrived.data(), own->data(), edge.bytes);
    if (!broken && arrived != sent) broken = edge;
  }
  return broken;
}

}  // namespace sluice
