#include "runtime/group/job_context.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/host.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/transport.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/group/guard.hpp"
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
  return placement_of(name, {depth, options.shape.micro_batches, options.order.chunks});
}

// Refuses more than what one process plans in seconds.
int planned_ranks(const PipelineOptions::Shape& shape) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::int64_t ranks = std::int64_t{shape.pipeline} * shape.replicas;
  if (shape.pipeline >= 1 && shape.replicas >= 1 && ranks <= kMost) return static_cast<int>(ranks);
  throw_usage("a pipeline of {} x {} replicas cannot be planned; legal are 1 to {} ranks",
              shape.pipeline, shape.replicas, kMost);
}

}  // namespace

void JobWatch::poll() {
  waits_.activity->poll();
  waits_.control->poll();
  if (!in_engine_ && waits_.engine != nullptr) waits_.engine->poll();
}

void JobWatch::begin_wait(const WaitSubject& subject) noexcept {
  WaitSubject of_job = subject;
  const auto peer = static_cast<std::size_t>(subject.peer);
  if (subject.peer >= 0) of_job.peer = peer < job_ranks_.size() ? job_ranks_[peer] : -1;
  waits_.activity->begin_wait(of_job, group_);
}

RankGroup::RankGroup(std::unique_ptr<Communicator> communicator, Interrupt* interrupt)
    : ranks(std::move(communicator)),
      collectives(std::make_unique<Collectives>(*ranks, 0, interrupt)) {}

JobContext::JobContext(Communicator& comm, const PipelineOptions& options, JobSize job_size)
    : planned(job_size == JobSize::kPlanned) {
  std::unique_ptr<Communicator> job = comm.duplicate();
  control = std::make_unique<ControlChannel>(*job);
  const int rank = job->rank(), size = job->size();
  activity = std::make_unique<ActivityBoard>(rank, host_name());
  const ActivityScope setting_up(*activity, Doing::kSettingUp);
  waits =
      std::make_unique<JobWaits>(JobWaits{.control = control.get(), .activity = activity.get()});
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  watch = std::make_unique<JobWatch>(*waits, WaitGroup::kJob, all);
  world = RankGroup(std::move(job), watch.get());
  guarded([&] {
    require_sensible(options);
    if (planned) {
      plan(options);
    } else {
      join(options);
    }
    const TransportChoice transport = options.devices.transport;
    devices.no_nccl = find_why_no_nccl(*world.collectives, devices.ranks, transport);
    devices.no_device_messages = why_no_device_messages(
        *world.collectives, devices.ranks, transport, devices.no_nccl, place.topology.pipeline);
  });
  place.driver_note = describe_different_drivers(devices.ranks);
  place.rank = place.topology.pipeline_rank(rank);
  place.replica = place.topology.replica(rank);
  make_groups();
}

void JobContext::make_groups() {
  std::vector<int> of_pipeline, of_replicas;
  for (int r = 0; r < place.topology.pipeline; ++r) {
    of_pipeline.push_back(place.topology.rank_of(place.replica, r));
    place.devices.push_back(devices.ranks[static_cast<std::size_t>(of_pipeline.back())]);
  }
  for (int r = 0; r < place.topology.replicas; ++r) {
    of_replicas.push_back(place.topology.rank_of(r, place.rank));
  }
  pipeline_watch = std::make_unique<JobWatch>(*waits, WaitGroup::kPipeline, of_pipeline);
  engine_watch = std::make_unique<JobWatch>(*waits, WaitGroup::kPipeline, of_pipeline,
                                            /*in_engine=*/true);
  replicas_watch = std::make_unique<JobWatch>(*waits, WaitGroup::kReplicas, of_replicas);
  pipeline = RankGroup(world.ranks->split(place.replica, place.rank), pipeline_watch.get());
  messages = pipeline.ranks->duplicate();
  replicas = RankGroup(world.ranks->split(place.rank, place.replica), replicas_watch.get());
  activity->set_stages(joined(stage_places.stages_of(place.rank), ", "));
}

void JobContext::join(const PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  const int size = world.ranks->size();
  require_same_configuration(*world.collectives, agreed_values(options));
  const int depth =
      shape.pipeline > 0 ? shape.pipeline : std::max(size / std::max(shape.replicas, 1), 1);
  hosts = world.collectives->all_gather_strings(host_name());
  const Topology numbered = make_topology(size, depth, shape.replicas, shape.rank_order);
  stage_places = stage_placement(options, depth);
  RankArrangement order = arrange_ranks(numbered, options, stage_places, hosts);
  place.topology = std::move(order.topology);
  place.order_reason = std::move(order.reason);
  devices.ranks =
      choose_devices(*world.collectives, place.topology, options.devices.choices, hosts);
}

void JobContext::plan(const PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  if (options.devices.choices.size() > 1) {
    throw_usage("{} devices for a job that one process plans; legal is one, which every rank has",
                options.devices.choices.size());
  }
  stage_places = stage_placement(options, shape.pipeline);  // refuses what cannot be placed
  place.topology =
      make_topology(planned_ranks(shape), shape.pipeline, shape.replicas, shape.rank_order);
  const RankDevice mine =
      choose_devices(*world.collectives, make_topology(1, 1, 1, shape.rank_order),
                     options.devices.choices, {host_name()})
          .front();
  for (int rank = 0; rank < place.topology.ranks(); ++rank) {
    RankDevice& device = devices.ranks.emplace_back(mine);
    device.host = device.machine = device.nccl_machine = fmt::format("planned host {}", rank);
    device.host_memory = 0;
    if (!mine.identity.empty()) device.identity = fmt::format("planned GPU {}", rank);
  }
}

std::size_t JobContext::piece_bytes() const {
  constexpr std::size_t kStagedPiece = std::size_t{4} << 20;
  const bool staged =
      std::any_of(devices.ranks.begin(), devices.ranks.end(),
                  [](const RankDevice& rank) { return rank.device.kind != DeviceKind::kCpu; });
  return staged ? kStagedPiece : kMaxPieceBytes;
}

void JobContext::guarded(const std::function<void()>& body) {
  std::exception_ptr gone;  // a rank: nothing is sent to ranks that may not answer
  try {
    const auto watched = [&] {
      try {
        body();
      } catch (...) {
        if (!activity->interrupted()) {
          activity->enter(Doing::kFailing);
          throw;
        }
        gone = std::current_exception();
      }
    };
    sluice::guarded(*control, world.ranks->rank(), std::cref(watched));  // allocates nothing
    if (gone != nullptr) {
      activity->poll();  // throws what the watchdog has found
      std::rethrow_exception(gone);
    }
  } catch (...) {
    for (Communicator* each :
         {world.ranks.get(), pipeline.ranks.get(), messages.get(), replicas.ranks.get()}) {
      if (each != nullptr) each->leave_open(/*by_all=*/gone == nullptr);
    }
    throw;
  }
}

}  // namespace sluice
