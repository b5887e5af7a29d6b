#include "comm/group/edge_probe.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace sluice {

namespace {

// Bytes that differ from edge to edge.
std::vector<std::byte> pattern_of(const ProbedEdge& edge) {
  std::vector<std::byte> bytes(edge.bytes);
  auto state = static_cast<std::uint64_t>(edge.from) << 32U | static_cast<std::uint32_t>(edge.to);
  for (std::size_t i = 0; i < bytes.size(); i += sizeof state) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(bytes.data() + i, &state, std::min(sizeof state, bytes.size() - i));
  }
  return bytes;
}

// A message under way, with the memory that it uses.
class Message {
 public:
  Message(Communicator& comm, const DeviceMemory& memory, std::size_t bytes)
      : comm_(comm),
        memory_(std::make_shared<Buffer>(memory.allocate(bytes, DeviceMemory::Use::kTemporary))) {}
  ~Message() {
    if (request.index == Request::kNone) return;
    try {
      comm_.cancel(request);
      comm_.keep(memory_);
    } catch (...) {  // the communicator has failed: nothing more can be cancelled
    }
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return {memory_->data(), memory_->size()}; }
  void finish(Interrupt* interrupt, const WaitSubject& subject) {
    Waiter waiter(comm_.local_size());
    const WaitScope scope(interrupt, subject);
    while (!comm_.test(request)) {
      scope.poll();
      waiter.pause();
    }
  }

  Request request;

 private:
  Communicator& comm_;
  std::shared_ptr<Buffer> memory_;
};

}  // namespace

std::optional<ProbedEdge> probe_edges(Communicator& comm, const DeviceMemory& memory,
                                      std::span<const ProbedEdge> edges, Interrupt* interrupt) {
  std::optional<ProbedEdge> broken;
  const Device device = memory.device();
  for (const ProbedEdge& edge : edges) {
    if (edge.bytes == 0 || edge.from == edge.to) continue;
    const WaitSubject subject{
        .what = comm.rank() == edge.to ? WaitSubject::What::kReceive : WaitSubject::What::kSend,
        .peer = comm.rank() == edge.to ? edge.from : edge.to,
        .tag = 0,
        .bytes = edge.bytes};
    if (comm.rank() == edge.from) {
      Message message(comm, memory, edge.bytes);
      const std::vector<std::byte> sent = pattern_of(edge);
      copy_now(device, message.bytes().data(), sent.data(), sent.size());
      message.request = comm.start_send(edge.to, 0, message.bytes());
      message.finish(interrupt, subject);
    } else if (comm.rank() == edge.to) {
      Message message(comm, memory, edge.bytes);
      std::vector<std::byte> arrived(edge.bytes);
      copy_now(device, message.bytes().data(), arrived.data(), arrived.size());
      message.request = comm.post_recv(edge.from, 0, message.bytes());
      message.finish(interrupt, subject);
      copy_now(device, arrived.data(), message.bytes().data(), arrived.size());
      if (!broken && arrived != pattern_of(edge)) broken = edge;
    }
  }
  return broken;
}

}  // namespace sluice
