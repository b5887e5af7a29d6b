#include "runtime/engine/slots.hpp"

#include <array>

#include "comm/base/byte_sums.hpp"

namespace sluice {
namespace {

static_assert(kMaxDims == Shape::kMaxDims, "a message carries every shape");

// The payload starts aligned; the header sits in the bytes just before it.
std::size_t tensor_bytes(const EdgeTensor& tensor) {
  return sum_of_bytes({kBufferAlignment, round_up(tensor.spec.bytes(), kBufferAlignment)});
}

void set_spec(Slot& slot, std::size_t index, const TensorSpec& spec) {
  slot.tensors[index].spec = spec;
  MessageHeader header;
  header.dtype = static_cast<std::uint8_t>(spec.dtype);
  header.tensor = static_cast<std::uint16_t>(index);
  header.tensor_count = static_cast<std::uint16_t>(slot.tensors.size());
  header.rank = static_cast<std::uint32_t>(spec.shape.rank());
  for (int d = 0; d < spec.shape.rank(); ++d) {
    header.shape[static_cast<std::size_t>(d)] = static_cast<std::int32_t>(spec.shape[d]);
  }
  header.bytes = spec.bytes();
  slot.headers[index] = header;
}

}  // namespace

const char* describe(SlotState state) {
  constexpr std::array kNames = {"free", "posted", "filled", "being sent"};
  return kNames.at(static_cast<std::size_t>(state));
}

void reshape(Slot& slot, std::size_t index, const MessageHeader& arrived) {
  std::array<std::int64_t, kMaxDims> dims = {};
  for (std::size_t d = 0; d < arrived.rank; ++d) dims[d] = arrived.shape[d];
  set_spec(slot, index,
           {slot.tensors[index].spec.dtype,
            Shape(std::span<const std::int64_t>(dims.data(), arrived.rank))});
  slot.shape = {.samples = -1};
}

int SlotPool::edge_of(const BufferPool& pool) {
  const bool towards_next =
      pool.kind == BufferKind::kOutput || pool.kind == BufferKind::kGradOutput;
  return towards_next ? pool.stage + 1 : pool.stage;
}

std::size_t SlotPool::bytes(const BufferPool& pool, const EdgeTable& edges) {
  if (!has_tensors(pool.kind)) return 0;
  std::size_t slot_bytes = 0;
  for (const EdgeTensor& tensor : edges.inputs(edges.largest(), edge_of(pool))) {
    if (!is_gradient(pool.kind) || tensor.wants_gradient)
      add_bytes(slot_bytes, tensor_bytes(tensor));
  }
  return multiply_bytes(slot_bytes, static_cast<std::size_t>(pool.count));
}

const SlotStore::Memory& SlotStore::take(const BufferPool& pool, const DeviceMemory& memory,
                                         std::size_t bytes, std::size_t host_bytes, Device locked) {
  std::deque<Memory>& taken = memory_[{pool.stage, pool.kind}];
  if (taken.empty() || taken.back().device.size() < bytes ||
      taken.back().host.size() < host_bytes) {
    Memory& more = taken.emplace_back();
    more.device = memory.allocate(bytes);
    if (host_bytes > 0) more.host = HostBuffer(locked, host_bytes);
  }
  return taken.back();
}

std::vector<std::span<std::byte>> SlotStore::message_memory() const {
  std::vector<std::span<std::byte>> all;
  for (const auto& [pool, taken] : memory_) {
    if (!SlotPool::has_tensors(pool.second)) continue;
    for (const Memory& memory : taken) {
      if (memory.device.size() > 0) all.emplace_back(memory.device.data(), memory.device.size());
    }
  }
  return all;
}

SlotPool::SlotPool(const BufferPool& pool, const EdgeTable& edges, const Place& place)
    : description_(pool),
      route_(place.route),
      edges_(&edges),
      slots_(static_cast<std::size_t>(pool.count)) {
  for (Slot& slot : slots_) slot.pool = this;
  if (pool.kind == BufferKind::kState) {
    const std::size_t bytes = place.state.memory(slots_.size());
    std::byte* const states = place.store.take(pool, place.memory, bytes, 0, {}).device.data();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].memory = place.state.cut(states, i);
      slots_[i].whole = {place.state.place(states, i), place.state.slot()};
    }
  }
  if (!has_tensors(pool.kind)) return;
  const bool staged = route_ == RouteKind::kStaged, direct = route_ == RouteKind::kDirect;
  const bool nccl = route_ == RouteKind::kNccl, headers_alone = direct || nccl;
  const bool from_device = staged || headers_alone;
  const Device device = place.memory.device();
  const auto tensors = edges.inputs(edges.largest(), edge_of(pool));
  const std::size_t on_device = bytes(pool, edges);
  const std::size_t on_host = staged          ? on_device
                              : headers_alone ? slots_.size() * tensors.size() * kHeaderBytes
                                              : 0;
  const auto& [memory, host] =
      place.store.take(pool, place.memory, on_device, on_host, staged ? device : Device{});
  std::size_t next = 0, next_header = 0;
  for (Slot& slot : slots_) {
    slot.route = route_;
    slot.tensors.resize(tensors.size());
    slot.buffers.resize(tensors.size());
    slot.headers.resize(tensors.size());
    slot.tickets.reserve(tensors.size());
    if (from_device) slot.device.resize(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      set_spec(slot, i, tensors[i].spec);
      if (is_gradient(pool.kind) && !tensors[i].wants_gradient) continue;
      const std::size_t payload = next + kBufferAlignment;
      slot.tensors[i].data = memory.data() + payload;
      slot.buffers[i].capacity = tensors[i].spec.bytes();
      if (headers_alone) {
        slot.buffers[i].message = host.data() + next_header;
        next_header += kHeaderBytes;
      } else if (staged || device.kind == DeviceKind::kCpu) {  // a local hand-over has no header
        std::byte* const base = staged ? host.data() : memory.data();
        slot.buffers[i].message = base + payload - kHeaderBytes;
      }
      if (from_device) {
        slot.device[i] = {.payload = memory.data() + payload,
                          .ready = Event(device),
                          .arrived = nccl ? Event() : Event(device),
                          .direct = direct};
        slot.buffers[i].device = &slot.device[i];
      }
      next += tensor_bytes(tensors[i]);
    }
  }
}

void SlotPool::reshape(Slot& slot, UnitShape shape) const {
  slot.shape = shape;
  if (slot.tensors.empty()) return;
  const auto tensors = edges_->inputs(shape, edge_of(description_));
  for (std::size_t i = 0; i < tensors.size(); ++i) set_spec(slot, i, tensors[i].spec);
}

}  // namespace sluice
