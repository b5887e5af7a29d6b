#include "runtime/job/nccl_routes.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#if SLUICE_WITH_NCCL
#include "comm/base/index.hpp"
#include "comm/nccl/nccl_sums.hpp"
#include "comm/nccl/nccl_transport.hpp"
#endif

namespace sluice {

bool NcclRoutes::wanted(const JobLayout& layout) {
  return layout.nccl_in_pipeline() || uses_nccl(layout.wires.sums);
}

#if SLUICE_WITH_NCCL

namespace {

NcclSums::Method method_of(bool all_reduce) {
  return all_reduce ? NcclSums::Method::kAllReduce : NcclSums::Method::kOrdered;
}

// [pipeline rank] its rank among those with a GPU; -1 for a CPU.
std::vector<int> gpus_of(const JobLayout& layout) {
  std::vector<int> gpus;
  int next = 0;
  for (const RankDevice& rank : layout.place.devices) {
    gpus.push_back(rank.device.kind == DeviceKind::kCuda ? next++ : -1);
  }
  return gpus;
}

// Both directions of every NCCL edge and of every NCCL route between uses of a tied parameter.
std::vector<NcclTransport::Edge> edges_of(const JobLayout& layout) {
  const std::vector<int> gpus = gpus_of(layout);
  std::vector<NcclTransport::Edge> edges;
  const auto join = [&](const EdgeRoute& route, int stage, int other) {
    if (route.kind != RouteKind::kNccl) return;
    const int from = gpus[at(layout.plans.placement().rank_of(stage))];
    const int to = gpus[at(layout.plans.placement().rank_of(other))];
    edges.push_back({from, to});
    edges.push_back({to, from});
  };
  for (int s = 1; s < layout.plans.num_stages(); ++s) join(layout.wires.routes[at(s)], s - 1, s);
  for (const TiedParameter& tie : layout.parameters.tied) {
    for (std::size_t use = 1; use < tie.uses.size(); ++use) {
      join(tie.routes[use], tie.uses.front().stage, tie.uses[use].stage);
    }
  }
  return edges;
}

}  // namespace

class NcclMessages final : public Transport {
 public:
  // [pipeline rank] its rank in the transport.
  NcclMessages(NcclTransport& transport, StreamView compute, std::vector<int> gpu_of_rank,
               std::size_t open)
      : transport_(transport), compute_(compute), gpu_of_rank_(std::move(gpu_of_rank)) {
    tickets_.reserve(open);
    free_.reserve(open);
  }

  Ticket start_send(int peer, int /*tag*/, const MessageBuffer& buffer) override {
    buffer.device->ready.record(compute_);
    return opened(transport_.send(gpu_of_rank_[at(peer)],
                                  {buffer.device->payload, buffer.header().bytes},
                                  buffer.device->ready));
  }
  Ticket post_recv(int peer, int /*tag*/, const MessageBuffer& buffer,
                   const MessageHeader& expected) override {
    buffer.header() = expected;  // as if it had arrived
    buffer.device->ready.record(compute_);
    return opened(transport_.recv(gpu_of_rank_[at(peer)], {buffer.device->payload, expected.bytes},
                                  buffer.device->ready));
  }
  void hold() override {
    if (!std::exchange(holds_, true)) transport_.queue().begin_group();
  }
  void flush() override {
    if (std::exchange(holds_, false)) transport_.queue().end_group();
  }
  void progress() override { transport_.queue().progress(); }
  bool test(Ticket ticket) override {
    if (ticket == kDoneTicket) return true;
    NcclQueue& queue = transport_.queue();
    queue.progress();
    if (!queue.issued(tickets_[at(ticket)])) return false;
    queue.wait_on(compute_, tickets_[at(ticket)]);
    free_.push_back(ticket);
    return true;
  }
  void cancel_all() override {}  // NcclRoutes::abort() ends them all

 private:
  Ticket opened(const NcclTicket& made) {
    if (free_.empty()) {
      tickets_.push_back(made);
      return static_cast<Ticket>(tickets_.size()) - 1;
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    tickets_[at(ticket)] = made;
    return ticket;
  }

  NcclTransport& transport_;
  StreamView compute_;
  std::vector<int> gpu_of_rank_;
  std::vector<NcclTicket> tickets_;
  std::vector<Ticket> free_;
  bool holds_ = false;
};

// Its communicators join the pipeline's ranks with a GPU. All ranks call split().
struct NcclRoutes::Impl {
  Impl(JobContext& job, const JobLayout& layout, ComputeContext& compute_in, const SumLoad& load,
       std::size_t open, bool all_reduce)
      : compute(compute_in),
        interrupt(*job.watch),
        gpus(job.pipeline.ranks->split(compute_in.device().kind == DeviceKind::kCuda ? 0 : 1,
                                       layout.place.rank)),
        bootstrap(*gpus, 0, job.watch.get()),
        gpu_of_rank(gpus_of(layout)) {
    if (compute.device().kind == DeviceKind::kCpu) return;
    const std::size_t sum_groups = std::max<std::size_t>(load.count, 1) * NcclSums::kGroupsPerSum;
    queue.emplace(compute.device(), open + sum_groups, job.world.ranks->local_size());
    transport.emplace(*queue, bootstrap, compute.memory(), edges_of(layout),
                      NcclLabel{"the pipeline", job.world.ranks->rank()}, job.watch.get());
    messages.emplace(*transport, compute.stream(), gpu_of_rank, open);
    if (!layout.wires.sums_by_nccl(layout.place.rank)) return;
    sums.emplace(*queue, *job.replicas.collectives, compute.memory(),
                 NcclLabel{"the replicas of pipeline rank " + std::to_string(layout.place.rank),
                           job.world.ranks->rank()},
                 method_of(all_reduce), load.sizes, job.watch.get());
    workspace = compute.memory().allocate(sums->workspace(load.largest) * sizeof(float));
    for (std::size_t i = 0; i < load.count; ++i) ready.emplace_back(compute.device());
  }

  ComputeContext& compute;
  Interrupt& interrupt;
  std::unique_ptr<Communicator> gpus;
  Collectives bootstrap;
  std::vector<int> gpu_of_rank;  // [pipeline rank] its rank in `gpus`, -1 for a CPU
  Buffer workspace;              // of all sums, which run one after the other
  std::vector<Event> ready;      // of sums, used in turn
  std::size_t next_ready = 0;
  // On a GPU. Destroyed before the members above, whose memory NCCL may still use.
  std::optional<NcclQueue> queue;
  std::optional<NcclTransport> transport;
  std::optional<NcclMessages> messages;
  std::optional<NcclSums> sums;
};

NcclRoutes::NcclRoutes(JobContext& job, const JobLayout& layout, ComputeContext& compute,
                       const SumLoad& sums, std::size_t open, bool all_reduce)
    : impl_(std::make_unique<Impl>(job, layout, compute, sums, open, all_reduce)) {}

NcclRoutes::~NcclRoutes() = default;

Transport* NcclRoutes::messages() { return impl_->messages ? &*impl_->messages : nullptr; }

void NcclRoutes::begin_group() { impl_->queue->begin_group(); }

NcclTicket NcclRoutes::send(int peer, std::span<const std::byte> data, const Event& ready) {
  return impl_->transport->send(impl_->gpu_of_rank[at(peer)], data, ready);
}

NcclTicket NcclRoutes::recv(int peer, std::span<std::byte> data, const Event& ready) {
  return impl_->transport->recv(impl_->gpu_of_rank[at(peer)], data, ready);
}

void NcclRoutes::end_group() { impl_->queue->end_group(); }

void NcclRoutes::wait_on_stream(NcclTicket& ticket) {
  impl_->queue->progress();  // issues later groups without waiting for the next call
  impl_->queue->wait_issued(ticket, &impl_->interrupt);
  impl_->queue->wait_on(impl_->compute.stream(), ticket);
}

void NcclRoutes::progress() {
  if (impl_->queue) impl_->queue->progress();
}

void NcclRoutes::register_messages(std::span<std::byte> memory) {
  if (impl_->transport) impl_->transport->register_memory(memory);
}

void NcclRoutes::finalize() {
  if (impl_->queue) impl_->queue->finalize(&impl_->interrupt);
}

void NcclRoutes::abort() noexcept {
  if (impl_->queue) impl_->queue->abort();
}

int NcclRoutes::message_communicators(const JobLayout& layout, int rank) {
  return NcclTransport::communicators(edges_of(layout), gpus_of(layout)[at(rank)]);
}

std::size_t NcclRoutes::sum_bytes(const SumLoad& sums, int replicas, bool all_reduce) {
  return NcclSums::workspace(sums.largest, replicas, method_of(all_reduce)) * sizeof(float);
}

bool NcclRoutes::sums() const { return impl_->sums.has_value(); }

// Each sum of a step has an event. The next step uses it again: its sum has been issued by then.
NcclTicket NcclRoutes::sum(std::span<float> values) {
  Event& ready = impl_->ready[impl_->next_ready++ % impl_->ready.size()];
  ready.record(impl_->compute.stream());
  return impl_->sums->sum(
      values,
      {reinterpret_cast<float*>(impl_->workspace.data()), impl_->workspace.size() / sizeof(float)},
      ready);
}

#else

// A layout of a build without NCCL has no NCCL routes (RouteQuestion::nccl_refusal).
struct NcclRoutes::Impl {};

NcclRoutes::NcclRoutes(JobContext& /*groups*/, const JobLayout& /*layout*/,
                       ComputeContext& /*compute*/, const SumLoad& /*sums*/, std::size_t /*open*/,
                       bool /*all_reduce*/) {
  throw Error(ErrorCode::kInternal, "this build has no NCCL");
}
NcclRoutes::~NcclRoutes() = default;
Transport* NcclRoutes::messages() { return nullptr; }
void NcclRoutes::begin_group() {}
NcclTicket NcclRoutes::send(int, std::span<const std::byte>, const Event&) { return {}; }
NcclTicket NcclRoutes::recv(int, std::span<std::byte>, const Event&) { return {}; }
void NcclRoutes::end_group() {}
void NcclRoutes::wait_on_stream(NcclTicket& /*ticket*/) {}
void NcclRoutes::progress() {}
void NcclRoutes::register_messages(std::span<std::byte> /*memory*/) {}
void NcclRoutes::finalize() {}
void NcclRoutes::abort() noexcept {}
int NcclRoutes::message_communicators(const JobLayout& /*layout*/, int /*rank*/) { return 0; }
std::size_t NcclRoutes::sum_bytes(const SumLoad&, int, bool) { return 0; }
bool NcclRoutes::sums() const { return false; }
NcclTicket NcclRoutes::sum(std::span<float> /*values*/) { return {}; }

#endif

}  // namespace sluice
