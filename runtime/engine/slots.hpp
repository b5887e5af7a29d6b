// The engine's buffers, in pools, each with its state. Internal to the engine.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/transport.hpp"
#include "runtime/layout/edge_route.hpp"
#include "stages/network/state_bytes.hpp"

namespace sluice {

enum class SlotState : std::uint8_t { kFree, kPosted, kFilled, kSending };
[[nodiscard]] const char* describe(SlotState state);  // "free", "posted", "filled", "being sent"

class SlotPool;

// One message buffer per tensor of an edge. tensors[i] is a view of buffers[i]'s payload, on the
// device, in the shape of its micro-batch. Its data are null where the edge has no gradient. A slot
// of kState has `memory` instead, one of kStored nothing.
struct Slot {
  SlotState state = SlotState::kFree;
  UnitShape shape = {.samples = -1};   // of the tensors; -1: none, or as received
  RouteKind route = RouteKind::kHost;  // its pool's
  const SlotPool* pool = nullptr;      // its own
  std::vector<Tensor> tensors;
  std::vector<MessageBuffer> buffers;
  std::vector<MessageHeader> headers;  // each describes its tensor
  std::vector<DeviceSide> device;      // of buffers, for messages from or to a GPU
  std::vector<Ticket> tickets;         // [tensor] of the last message
  double started = 0;                  // when the open operation began, for traces
  StageContext::State memory;
  std::uint64_t move = 0;      // likewise: StateStore::Number of the last one
  std::span<std::byte> whole;  // likewise: all of `memory`
};

// The header of the message that carries tensor `index` of the slot for a message op.
[[nodiscard]] inline MessageHeader header_of(const PlanOp& op, const Slot& slot, std::size_t index,
                                             Phase phase, std::uint64_t step) {
  MessageHeader header = slot.headers[index];
  header.phase = static_cast<std::uint8_t>(phase);
  header.step = step;
  header.channel = op.channel;
  header.micro_batch = op.micro_batch;
  return header;
}
// Gives tensor `index` the shape that `arrived` names.
void reshape(Slot& slot, std::size_t index, const MessageHeader& arrived);
// Gives tensor `index` the shape that its received message names.
inline void take_shape(Slot& slot, std::size_t index) {
  const MessageHeader &arrived = slot.buffers[index].header(), &own = slot.headers[index];
  if (same_words(arrived.shape, own.shape) && arrived.rank == own.rank) return;
  reshape(slot, index, arrived);
}

// The memory of slots. Engines that never run at the same time share one store: then it has the
// memory of the largest, not of all. It grows where a later pool is larger than those before it.
class SlotStore {
 public:
  struct Memory {
    Buffer device;
    // Of messages of a GPU's slots. kStaged: with the layout of `device`. kDirect, kNccl: headers
    // alone.
    HostBuffer host;
  };
  // For slots of one stage and kind: `bytes` on the device, `host_bytes` page-locked for `locked`.
  // Slots at equal places of two such pools have the same memory.
  [[nodiscard]] const Memory& take(const BufferPool& pool, const DeviceMemory& memory,
                                   std::size_t bytes, std::size_t host_bytes, Device locked);
  // The device memory of all messages so far.
  [[nodiscard]] std::vector<std::span<std::byte>> message_memory() const;

 private:
  // What was outgrown stays: engines point to it.
  std::map<std::pair<int, BufferKind>, std::deque<Memory>> memory_;
};

// All slots of one stage and kind.
class SlotPool {
 public:
  struct Place {
    const DeviceMemory& memory;
    SlotStore& store;  // outlives the pool
    RouteKind route = RouteKind::kHost;
    StateBytes state = {};  // of a slot of kState
  };
  SlotPool(const BufferPool& pool, const EdgeTable& edges, const Place& place);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  [[nodiscard]] Slot& slot(std::int32_t index) { return slots_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] int count() const { return static_cast<int>(slots_.size()); }
  // Sets the tensors' shapes for a micro-batch of this one.
  void shape(Slot& slot, UnitShape shape) const {
    if (slot.shape != shape) reshape(slot, shape);
  }
  [[nodiscard]] const BufferPool& description() const { return description_; }
  [[nodiscard]] RouteKind route() const { return route_; }

  // Index of the edge (as EdgeTable::inputs counts) that this pool's tensors belong to.
  [[nodiscard]] static int edge_of(const BufferPool& pool);
  [[nodiscard]] static bool has_tensors(BufferKind kind) {
    return kind != BufferKind::kState && kind != BufferKind::kStored;
  }
  [[nodiscard]] static bool is_gradient(BufferKind kind) {
    return kind == BufferKind::kGradOutput || kind == BufferKind::kGradInput;
  }
  // Bytes on the device for messages. A GPU's staged pool has the same amount of page-locked host
  // memory.
  [[nodiscard]] static std::size_t bytes(const BufferPool& pool, const EdgeTable& edges);

 private:
  void reshape(Slot& slot, UnitShape shape) const;

  BufferPool description_;
  RouteKind route_;
  const EdgeTable* edges_;
  std::vector<Slot> slots_;
};

}  // namespace sluice
