#include "runtime/job/job_context.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/generate.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/host.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/transport.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/rank_arrangement.hpp"

namespace sluice {

namespace {

Placement stage_placement(const PipelineOptions& options, int depth) {
  if (const Schedule* given = options.order.given.get()) {
    if (given->placement.ranks() == depth) return given->placement;
    throw_usage("schedule '{}' is for {} ranks, the pipeline has {}", given->name,
                given->placement.ranks(), depth);
  }
  const std::string name = options.training.inference ? "forward-only" : options.order.schedule;
  try {
    return placement_of(name, {depth, options.shape.micro_batches, options.order.chunks});
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::kUsage, error.what());
  }
}

}  // namespace

void JobWatch::poll() {
  control_.poll();
  if (engine_ != nullptr) engine_->poll();
}

RankGroup::RankGroup(std::unique_ptr<Communicator> communicator, Interrupt* interrupt)
    : ranks(std::move(communicator)),
      collectives(std::make_unique<Collectives>(*ranks, 0, interrupt)) {}

JobContext::JobContext(Communicator& comm, const PipelineOptions& options) {
  std::unique_ptr<Communicator> job = comm.duplicate();
  control = std::make_unique<ControlChannel>(*job);
  watch = std::make_unique<JobWatch>(*control);
  world = RankGroup(std::move(job), watch.get());
  const int rank = world.ranks->rank(), size = world.ranks->size();
  guarded([&] {
    const PipelineOptions::Shape& shape = options.shape;
    const TransportChoice transport = options.devices.transport;
    require_same_configuration(*world.collectives, agreed_values(options));
    const int depth =
        shape.pipeline > 0 ? shape.pipeline : std::max(size / std::max(shape.replicas, 1), 1);
    const std::vector<std::string> hosts = world.collectives->all_gather_strings(host_name());
    const Topology numbered = make_topology(size, depth, shape.replicas, shape.rank_order);
    RankArrangement order =
        arrange_ranks(numbered, options, stage_placement(options, depth), hosts);
    place.topology = std::move(order.topology);
    place.order_reason = std::move(order.reason);
    devices.ranks =
        choose_devices(*world.collectives, place.topology, options.devices.choices, hosts);
    devices.no_nccl = find_why_no_nccl(*world.collectives, devices.ranks, transport);
    devices.no_device_messages = why_no_device_messages(*world.collectives, devices.ranks,
                                                        transport, devices.no_nccl, depth);
  });
  place.rank = place.topology.pipeline_rank(rank);
  place.replica = place.topology.replica(rank);
  for (int r = 0; r < place.topology.pipeline; ++r) {
    const int job_rank = place.topology.rank_of(place.replica, r);
    place.devices.push_back(devices.ranks[static_cast<std::size_t>(job_rank)]);
  }
  pipeline = RankGroup(world.ranks->split(place.replica, place.rank), watch.get());
  messages = pipeline.ranks->duplicate();
  replicas = RankGroup(world.ranks->split(place.rank, place.replica), watch.get());
}

std::size_t JobContext::piece_bytes() const {
  constexpr std::size_t kStagedPiece = std::size_t{4} << 20;
  const bool staged =
      std::any_of(devices.ranks.begin(), devices.ranks.end(),
                  [](const RankDevice& rank) { return rank.device.kind != DeviceKind::kCpu; });
  return staged ? kStagedPiece : kMaxPieceBytes;
}

void JobContext::guarded(const std::function<void()>& body) {
  try {
    sluice::guarded(*control, world.ranks->rank(), body);
  } catch (...) {
    for (Communicator* each :
         {world.ranks.get(), pipeline.ranks.get(), messages.get(), replicas.ranks.get()}) {
      if (each != nullptr) each->leave_open();
    }
    throw;
  }
}

}  // namespace sluice
