#include "runtime/group/nccl_routes.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <sluice/error.hpp>
#if SLUICE_WITH_NCCL
#include "comm/base/index.hpp"
#include "comm/nccl/nccl_transport.hpp"
#include "runtime/group/nccl_collective.hpp"
#endif

namespace sluice {

bool NcclRoutes::wanted(const JobLayout& layout) {
  return layout.nccl_in_pipeline() || uses_nccl(layout.wires.sums) ||
         uses_nccl(layout.wires.tensor);
}

#if SLUICE_WITH_NCCL

namespace {

NcclSums::Method method_of(bool all_reduce) {
  return all_reduce ? NcclSums::Method::kAllReduce : NcclSums::Method::kOrdered;
}

// Floats that the sums share, which run one after the other.
std::size_t sum_workspace(const SumLoad& load, int replicas, bool all_reduce) {
  return std::max(NcclSums::workspace(load.largest, replicas, method_of(all_reduce)),
                  NcclSums::scatter_workspace(load.largest_piece, replicas));
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

// [rank among those of this pipeline with a GPU] Its rank of the job.
std::vector<int> job_ranks_of_gpus(const RankPlace& place) {
  std::vector<int> ranks;
  for (const int rank : place.topology.group(Axis::kPipeline, place.here)) {
    const RankDevice& device = place.devices[at(place.topology.place_of(rank).pipeline)];
    if (device.device.kind == DeviceKind::kCuda) ranks.push_back(rank);
  }
  return ranks;
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
class Routes final : public NcclRoutes {
 public:
  Routes(JobContext& job, const JobLayout& layout, ComputeContext& compute, const SumLoad& load,
         std::size_t open, bool all_reduce)
      : compute_(compute),
        interrupt_(*job.world.watch),
        gpus_(job.group(Axis::kPipeline)
                  .ranks->split(compute.device().kind == DeviceKind::kCuda ? 0 : 1,
                                layout.place.here.pipeline)),
        watch_(*job.waits, Axis::kPipeline, job_ranks_of_gpus(layout.place)),
        bootstrap_(*gpus_, 0, &watch_),
        gpu_of_rank_(gpus_of(layout)) {
    if (compute.device().kind == DeviceKind::kCpu) return;
    const std::size_t sums = std::max<std::size_t>(load.count, 1) + 1;  // one of tensor ranks
    queue_.emplace(compute.device(), open + sums * NcclSums::kGroupsPerSum,
                   job.world.ranks->local_size());
    transport_.emplace(*queue_, bootstrap_, compute.memory(), edges_of(layout),
                       NcclLabel{"the pipeline", job.world.ranks->rank()}, &watch_);
    messages_.emplace(*transport_, compute.stream(), gpu_of_rank_, open);
    const int mine = layout.place.here.pipeline;
    const auto label = [&](const char* group) {
      return NcclLabel{group + (" of pipeline rank " + std::to_string(mine)),
                       job.world.ranks->rank()};
    };
    if (layout.wires.tensor_by_nccl(mine)) {
      tensor_workspace_ = compute.memory().allocate(load.tensor * sizeof(float));
      tensor_.emplace(*queue_, *job.group(Axis::kTensor).collectives, compute,
                      label("the tensor ranks"), floats_of(tensor_workspace_), interrupt_);
    }
    if (!layout.wires.sums_by_nccl(mine)) return;
    sums_.emplace(*queue_, *job.group(Axis::kReplica).collectives, compute.memory(),
                  label("the replicas"), method_of(all_reduce), load.sizes, &interrupt_);
    workspace_ = compute.memory().allocate(
        sum_workspace(load, layout.place.topology.size.replica, all_reduce) * sizeof(float));
    for (std::size_t i = 0; i < load.count; ++i) ready_.emplace_back(compute.device());
  }

  Transport* messages() override { return messages_ ? &*messages_ : nullptr; }
  NcclTicket send(int peer, std::span<const std::byte> data, const Event& ready) override {
    return alone([&] { return transport_->send(gpu_of_rank_[at(peer)], data, ready); });
  }
  NcclTicket recv(int peer, std::span<std::byte> data, const Event& ready) override {
    return alone([&] { return transport_->recv(gpu_of_rank_[at(peer)], data, ready); });
  }
  void wait_on_stream(NcclTicket& ticket) override {
    queue_->progress();  // issues later groups without waiting for the next call
    queue_->wait_issued(ticket, &interrupt_);
    queue_->wait_on(compute_.stream(), ticket);
  }
  void progress() override {
    if (queue_) queue_->progress();
  }
  bool sums() const override { return sums_.has_value(); }
  NcclTicket sum(std::span<float> values) override {
    return sums_->sum(values, workspace(), next_ready());
  }
  NcclTicket reduce_scatter(std::span<float> values,
                            std::span<const NcclSums::Piece> pieces) override {
    return sums_->reduce_scatter(values, pieces, workspace(), next_ready());
  }
  NcclTicket gather(std::span<float> values, std::span<const NcclSums::Piece> pieces,
                    std::span<const int> among) override {
    return sums_->gather(values, pieces, next_ready(), among);
  }
  Collective* tensor() override { return tensor_ ? &*tensor_ : nullptr; }
  void register_messages(std::span<std::byte> memory) override {
    if (transport_) transport_->register_memory(memory);
  }
  void finalize() override {
    if (queue_) queue_->finalize(&interrupt_);
  }
  void abort() noexcept override {
    if (queue_) queue_->abort();
  }

 private:
  // Each sum of a step, and each gather that may be open beside them, has an event. A step's
  // gathers after the update, later units and the next step use it again: what it is of has been
  // issued by then.
  [[nodiscard]] const Event& next_ready() {
    Event& ready = ready_[next_ready_++ % ready_.size()];
    ready.record(compute_.stream());
    return ready;
  }
  [[nodiscard]] static std::span<float> floats_of(const Buffer& buffer) {
    return {reinterpret_cast<float*>(buffer.data()), buffer.size() / sizeof(float)};
  }
  [[nodiscard]] std::span<float> workspace() const { return floats_of(workspace_); }
  template <typename Message>
  NcclTicket alone(const Message& message) {
    queue_->begin_group();
    const NcclTicket ticket = message();
    queue_->end_group();
    return ticket;
  }

  ComputeContext& compute_;
  Interrupt& interrupt_;
  std::unique_ptr<Communicator> gpus_;
  JobWatch watch_;
  Collectives bootstrap_;
  std::vector<int> gpu_of_rank_;  // [pipeline rank] its rank in gpus_, -1 for a CPU
  Buffer workspace_;              // of all sums
  Buffer tensor_workspace_;       // of all collectives of tensor ranks
  std::vector<Event> ready_;      // of sums, used in turn
  std::size_t next_ready_ = 0;
  // On a GPU. Destroyed before the members above, whose memory NCCL may still use.
  std::optional<NcclQueue> queue_;
  std::optional<NcclTransport> transport_;
  std::optional<NcclMessages> messages_;
  std::optional<NcclCollective> tensor_;
  std::optional<NcclSums> sums_;
};

}  // namespace

std::unique_ptr<NcclRoutes> NcclRoutes::make(JobContext& job, const JobLayout& layout,
                                             ComputeContext& compute, const SumLoad& sums,
                                             std::size_t open, bool all_reduce) {
  return std::make_unique<Routes>(job, layout, compute, sums, open, all_reduce);
}

int NcclRoutes::message_communicators(const JobLayout& layout, int rank) {
  return NcclTransport::communicators(edges_of(layout), gpus_of(layout)[at(rank)]);
}

std::size_t NcclRoutes::sum_bytes(const SumLoad& sums, int replicas, bool all_reduce) {
  return sum_workspace(sums, replicas, all_reduce) * sizeof(float);
}

std::size_t NcclRoutes::collective_floats(const PlannedCollective& collective, int ranks) {
  return NcclCollective::workspace(collective, ranks);
}

#else

// A layout of a build without NCCL has no NCCL routes (RouteQuestion::nccl_refusal).
std::unique_ptr<NcclRoutes> NcclRoutes::make(JobContext&, const JobLayout&, ComputeContext&,
                                             const SumLoad&, std::size_t, bool) {
  throw Error(ErrorCode::kInternal, "this build has no NCCL");
}
int NcclRoutes::message_communicators(const JobLayout&, int) { return 0; }
std::size_t NcclRoutes::sum_bytes(const SumLoad&, int, bool) { return 0; }
std::size_t NcclRoutes::collective_floats(const PlannedCollective&, int) { return 0; }

#endif

}  // namespace sluice
