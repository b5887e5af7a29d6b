// Slots: the engine's buffers, by pool, with the state each is in. Internal to the engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/transport.hpp"
#include "comm/nccl/nccl_queue.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/edges.hpp"

namespace sluice {

enum class SlotState : std::uint8_t { kFree, kPosted, kFilled, kSending };
[[nodiscard]] const char* describe(SlotState state);  // "free", "posted", "filled", "being sent"

class SlotPool;

// One slot: a message buffer per tensor of the edge. tensors[i] is a view of buffers[i]'s payload,
// on the device, in the shape of the micro-batch that sits there; null data where the edge carries
// no gradient.
struct Slot {
  SlotState state = SlotState::kFree;
  std::int64_t samples = -1;        // that the shapes are for; -1: none, or what arrived
  RouteKind route = RouteKind::kHost;  // its pool's
  const SlotPool* pool = nullptr;   // it is of
  std::vector<Tensor> tensors;
  std::vector<MessageBuffer> buffers;
  std::vector<MessageHeader> headers;  // what each tensor, as it is, says of itself
  std::vector<DeviceSide> device;      // of buffers, where they travel from or to a GPU
  std::vector<Ticket> tickets;         // open operations, one per tensor that travels
  std::vector<NcclTicket> nccl;        // the same where NCCL carries them
  double started = 0;                  // when the open operation began, for traces
};

// Of the message that carries tensor `index` of the slot for a message op.
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
// Gives tensor `index` the shape that the message which arrived for it names.
inline void take_shape(Slot& slot, std::size_t index) {
  const MessageHeader &arrived = slot.buffers[index].header(), &own = slot.headers[index];
  if (same_words(arrived.shape, own.shape) && arrived.rank == own.rank) return;
  reshape(slot, index, arrived);
}

// What the slots of a pool lie in.
struct SlotMemory {
  Buffer device;
  // Messages of a GPU's slots: laid out as `device` is where they are staged, one header after the
  // other where they are direct.
  HostBuffer host;
};

// All slots of one (stage, kind). kState pools have slots without memory: the stage owns that.
class SlotPool {
 public:
  // How the slots are filled or read decides whether a GPU's pool has host memory beside.
  struct Place {
    const DeviceMemory& memory;
    SlotMemory& slots;  // what the slots lie in, filled here; outlives the pool
    RouteKind route = RouteKind::kHost;
  };
  SlotPool(const BufferPool& pool, const EdgeTable& edges, const Place& place);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  [[nodiscard]] Slot& slot(std::int32_t index) { return slots_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] int count() const { return static_cast<int>(slots_.size()); }
  // Sets the tensors' shapes for a micro-batch of `samples`.
  void shape(Slot& slot, std::int64_t samples) const {
    if (slot.samples != samples) reshape(slot, samples);
  }
  [[nodiscard]] const BufferPool& description() const { return description_; }

  // Index of the edge (as EdgeTable::inputs counts) that this pool's tensors belong to.
  [[nodiscard]] static int edge_of(const BufferPool& pool);
  [[nodiscard]] static bool is_gradient(BufferKind kind) {
    return kind == BufferKind::kGradOutput || kind == BufferKind::kGradInput;
  }
  // Of the device; a GPU's staged pool has as much page-locked host memory again.
  [[nodiscard]] static std::size_t bytes(const BufferPool& pool, const EdgeTable& edges);

 private:
  void reshape(Slot& slot, std::int64_t samples) const;

  BufferPool description_;
  RouteKind route_;
  const EdgeTable* edges_;
  std::vector<Slot> slots_;
};

}  // namespace sluice
