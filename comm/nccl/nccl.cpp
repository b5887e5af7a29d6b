#include "comm/nccl/nccl.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <sluice/cuda.hpp>

#include "comm/base/index.hpp"
#include "comm/device/hardware_queues.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/waiter.hpp"
#include "comm/nccl/nccl_api.hpp"
#include "comm/nccl/nccl_peers.hpp"

namespace sluice {

namespace {

// The peer table, and this rank's library.
struct PeerInfo {
  std::optional<nccl::Library> library;
  std::vector<nccl::Peer> peer_table;
};

PeerInfo exchange_peer_info(Collectives& bootstrap, Device device, int rank, int most_blocks) {
  PeerInfo info;
  std::string problem;
  if (device.kind == DeviceKind::kCuda) {
    try {
      info.library.emplace();
      use_device(device);
      cuda::load_kernels();  // loading one later may wait for NCCL's kernels
      problem = cuda::too_few_hardware_queues();
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  const int version = problem.empty() && info.library ? info.library->version() : 0;
  nccl::Peer mine = nccl::describe_rank(device, version, problem);
  mine.rank = rank < 0 ? bootstrap.communicator().rank() : rank;
  mine.most_blocks = most_blocks;
  info.peer_table = nccl::gather_peer_table(bootstrap, mine);
  return info;
}

// Sent by rank 0: NCCL's id, or why NCCL made none.
struct NcclIdMessage {
  nccl::Result made;
  nccl::UniqueId id;
};

}  // namespace

int blocks_within(Device device, int parts, int kernels, int most) {
  const int share = properties_of(device).multiprocessors / parts / std::max(kernels, 1);
  return std::clamp(share, 1, most);
}

struct NcclCommunicator::Impl {
  Impl(const PeerInfo& info, const Communicator& bootstrap, std::string name)
      : library(*info.library),
        label(std::move(name)),
        peer_table(info.peer_table),
        myself(nccl::name_of(info.peer_table[at(bootstrap.rank())])),
        peer(bootstrap.size() == 2 ? nccl::name_of(info.peer_table[at(1 - bootstrap.rank())]) : ""),
        local_ranks(bootstrap.local_size()),
        size(bootstrap.size()),
        rank(bootstrap.rank()),
        device(info.peer_table[at(rank)].device) {}
  ~Impl() { abort(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void check(const nccl::Result& result, const char* what) const {
    if (result.ok()) return;
    const ErrorCode code =
        result.status == nccl::Status::kRemote ? ErrorCode::kPeer : ErrorCode::kDevice;
    throw Error(code, fmt::format("NCCL of {}, {}{}: {} failed: {}", label, myself,
                                  peer.empty() ? "" : " with " + peer, what,
                                  library.describe(result, handle)));
  }

  void start(const NcclIdMessage& message, Interrupt* interrupt, int most_blocks) {
    check(message.made, "making an id");
    if (interrupt != nullptr) interrupt->poll();  // rather than wait for a rank that is gone
    use_device(device);
    check(library.init(handle, size, message.id, rank, label.c_str(), most_blocks),
          "making a communicator");
    wait_ready(interrupt, "making a communicator");
  }

  [[nodiscard]] nccl::Handle open() const {
    if (handle == nullptr) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("NCCL of {}, {}: used after its end", label, myself));
    }
    return handle;
  }

  [[nodiscard]] bool ready(const char* what) const {
    const nccl::Result state = library.state(open());
    check(state, what);
    return state.status == nccl::Status::kSuccess;
  }

  void wait_ready(Interrupt* interrupt, const char* what) const {
    Waiter waiter(local_ranks);
    wait_until(waiter, interrupt, {WaitSubject::What::kNccl}, [&] { return ready(what); });
  }

  void abort() noexcept {
    if (handle != nullptr) static_cast<void>(library.abort(std::exchange(handle, nullptr)));
  }

  nccl::Library library;
  std::string label;  // NCCL keeps a pointer to it
  std::vector<nccl::Peer> peer_table;
  std::string myself, peer;  // for messages; the peer of a pair, else empty
  int local_ranks, size, rank;
  Device device;
  nccl::Handle handle = nullptr;
  std::vector<void*> registered;  // memory
};

NcclCommunicator::NcclCommunicator(Collectives& bootstrap, Device device, const NcclLabel& label,
                                   Interrupt* interrupt, int most_blocks) {
  const PeerInfo info = exchange_peer_info(bootstrap, device, label.rank, most_blocks);
  if (const auto refused = nccl::refusal(info.peer_table, label.group)) throw *refused;
  impl_ = std::make_unique<Impl>(info, bootstrap.communicator(), label.group);
  NcclIdMessage message;
  if (impl_->rank == 0) message.made = impl_->library.make_id(message.id);
  bootstrap.broadcast(object_bytes(message), 0);
  impl_->start(message, interrupt, nccl::most_blocks_of(info.peer_table));
}

NcclCommunicator::~NcclCommunicator() = default;

int NcclCommunicator::rank() const { return impl_->rank; }

int NcclCommunicator::size() const { return impl_->size; }

Device NcclCommunicator::device() const { return impl_->device; }

std::string NcclCommunicator::name_of(int rank) const {
  return nccl::name_of(impl_->peer_table[at(rank)]);
}

bool NcclCommunicator::ready() const { return impl_->ready("communication"); }

void NcclCommunicator::wait_ready(Interrupt* interrupt) const {
  impl_->wait_ready(interrupt, "communication");
}

void NcclCommunicator::send(int peer, std::span<const std::byte> data, StreamView stream) const {
  impl_->check(impl_->library.send(data.data(), data.size(), peer, impl_->open(), stream),
               "a send");
}

void NcclCommunicator::recv(int peer, std::span<std::byte> data, StreamView stream) const {
  impl_->check(impl_->library.recv(data.data(), data.size(), peer, impl_->open(), stream),
               "a receive");
}

void NcclCommunicator::all_reduce_sum(std::span<float> values, StreamView stream) const {
  impl_->check(impl_->library.all_reduce_sum(values.data(), values.size(), impl_->open(), stream),
               "an all-reduce");
}

bool NcclCommunicator::register_memory(std::span<std::byte> memory) {
  void* const handle = impl_->library.register_memory(impl_->open(), memory.data(), memory.size());
  if (handle != nullptr) impl_->registered.push_back(handle);
  return handle != nullptr;
}

void NcclCommunicator::finalize(Interrupt* interrupt) {
  impl_->wait_ready(interrupt, "communication");
  for (void* const each : std::exchange(impl_->registered, {})) {
    impl_->library.forget_memory(impl_->open(), each);
  }
  impl_->check(impl_->library.finalize(impl_->open()), "the end of a communicator");
  impl_->wait_ready(interrupt, "the end of a communicator");
  // Reset first: a communicator whose freeing failed must not be aborted either.
  const nccl::Result freed = impl_->library.destroy(std::exchange(impl_->handle, nullptr));
  if (!freed.ok()) impl_->check(freed, "freeing a communicator");
}

void NcclCommunicator::abort() noexcept { impl_->abort(); }

void NcclCommunicator::abort_all(std::span<NcclCommunicator* const> communicators) noexcept {
  const nccl::Library* library = nullptr;
  for (NcclCommunicator* const each : communicators) {
    if (each == nullptr || each->impl_->handle == nullptr) continue;
    if (library == nullptr) {
      library = &each->impl_->library;
      static_cast<void>(library->group_start());
    }
    each->impl_->abort();
  }
  if (library != nullptr) static_cast<void>(library->group_end());
}

NcclGroup::NcclGroup(const NcclCommunicator& any) : any_(*any.impl_) {
  any_.check(any_.library.group_start(), "beginning a group");
}

NcclGroup::~NcclGroup() {
  if (open_) static_cast<void>(any_.library.group_end());
}

void NcclGroup::end() {
  open_ = false;
  any_.check(any_.library.group_end(), "a group");
}

std::optional<Error> nccl_refusal(Collectives& bootstrap, Device device, const NcclLabel& label) {
  PeerInfo info = exchange_peer_info(bootstrap, device, label.rank, 0);
  std::erase_if(info.peer_table,
                [](const nccl::Peer& member) { return member.device.kind != DeviceKind::kCuda; });
  return nccl::refusal(info.peer_table, label.group);
}

}  // namespace sluice
