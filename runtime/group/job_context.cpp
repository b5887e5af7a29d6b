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
#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/transport.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/layout/division.hpp"
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
  std::int64_t ranks = 1;
  for (const int size : {shape.pipeline, shape.replicas, shape.tensor}) {
    ranks = size < 1 || ranks > kMost ? kMost + 1 : ranks * size;
  }
  if (ranks <= kMost) return static_cast<int>(ranks);
  throw_usage("a pipeline of {} x {} replicas{} cannot be planned; legal are 1 to {} ranks",
              shape.pipeline, shape.replicas,
              shape.tensor == 1 ? "" : fmt::format(" x {} tensor ranks", shape.tensor), kMost);
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
  waits_.activity->begin_wait(of_job, axis_);
}

RankGroup::RankGroup(std::unique_ptr<Communicator> communicator, std::unique_ptr<JobWatch> polled)
    : watch(std::move(polled)),
      ranks(std::move(communicator)),
      collectives(std::make_unique<Collectives>(*ranks, 0, watch.get())) {}

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
  world = RankGroup(std::move(job), std::make_unique<JobWatch>(*waits, std::nullopt, all));
  guarded([&] {
    require_sensible(options);
    if (planned) {
      plan(options);
    } else {
      join(options);
    }
    const TransportChoice transport = options.devices.transport;
    devices.no_nccl = find_why_no_nccl(*world.collectives, devices.ranks, transport);
    devices.no_device_messages =
        why_no_device_messages(*world.collectives, devices.ranks, transport, devices.no_nccl,
                               place.topology.size.pipeline);
  });
  place.driver_note = describe_different_drivers(devices.ranks);
  place.here = place.topology.place_of(rank);
  make_groups();
}

RankGroup JobContext::make_group(Axis axis, int color, const std::vector<int>& members) {
  const auto mine = std::ranges::find(members, place.topology.rank_of(place.here));
  RankGroup made(world.ranks->split(color, static_cast<int>(mine - members.begin())),
                 std::make_unique<JobWatch>(*waits, axis, members));
  if (planned) return made;
  for (HostSums* each : {&made.collectives->sums(), &made.collectives->gathers()}) {
    each->set_hosts(place.hosts_of(members));
  }
  return made;
}

void JobContext::make_groups() {
  for (const Axis axis : kAxes) {
    groups_[static_cast<std::size_t>(axis)] =
        make_group(axis, place.topology.group_number(axis, place.here),
                   place.topology.group(axis, place.here));
  }
  if (const ShardGroups& shards = place.shard_groups; shards.copies > 1 && !planned) {
    const int first = place.topology.group_number(Axis::kReplica, place.here) * shards.replicas;
    const int replica = place.here.replica;
    const auto make = [&](int number, const std::vector<int>& replicas) {
      std::vector<int> members;
      for (const int each : replicas) {
        members.push_back(place.topology.group(Axis::kReplica, place.here)[at(each)]);
      }
      return make_group(Axis::kReplica, first + number, members);
    };
    sharers_ = make(shards.group_of(replica), shards.sharers_of(replica));
    copies_ = make(shards.place_of(replica), shards.copies_of(replica));
  }
  const std::vector<int> pipeline = place.topology.group(Axis::kPipeline, place.here);
  for (const int rank : pipeline) place.devices.push_back(devices.ranks[at(rank)]);
  messages = group(Axis::kPipeline).ranks->duplicate();
  engine_watch = std::make_unique<JobWatch>(*waits, Axis::kPipeline, pipeline, /*in_engine=*/true);
  activity->set_stages(joined(stage_places.stages_of(place.here.pipeline), ", "));
}

void JobContext::join(const PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  const int size = world.ranks->size();
  require_same_configuration(*world.collectives, agreed_values(options));
  const int depth =
      shape.pipeline > 0
          ? shape.pipeline
          : std::max(size / std::max(shape.replicas, 1) / std::max(shape.tensor, 1), 1);
  hosts = world.collectives->all_gather_strings(host_name());
  const Topology numbered =
      make_topology(size, {.pipeline = depth, .replica = shape.replicas, .tensor = shape.tensor},
                    shape.rank_order);
  divide(shape);
  stage_places = stage_placement(options, depth);
  RankArrangement order = arrange_ranks(numbered, options, stage_places, hosts);
  place.topology = std::move(order.topology);
  place.order_reason = std::move(order.reason);
  devices.ranks =
      choose_devices(*world.collectives, place.topology, options.devices.choices, hosts);
  std::vector<int> all(at(size));
  std::iota(all.begin(), all.end(), 0);
  place.hosts = hosts_of(devices.ranks, all);
  group_shards(options);
}

void JobContext::divide(const PipelineOptions::Shape& shape) {
  place.shares = shares_of(shape.virtual_replicas, shape.replicas, kVirtualReplicas);
  place.shards = shape.tensor * shares_of(shape.tensor_shards, shape.tensor, kTensorShards);
}

// Only ranks that have started know their hosts.
void JobContext::group_shards(const PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  place.shard_groups = {.replicas = shape.replicas};
  if (options.training.inference || shape.shard_group == 0 || shape.replicas == 1) return;
  int size = shape.shard_group;
  if (size == PipelineOptions::Shape::kWithinHosts) {
    std::vector<std::vector<int>> all;
    for (const std::vector<int>& group : place.topology.groups(Axis::kReplica)) {
      all.push_back(place.hosts_of(group));
    }
    size = shard_group_within_hosts(all);
    if (planned) {
      throw_usage(
          "options.shape.shard_group (--shard-group) is host, but the hosts of a job that one "
          "process plans are not "
          "known; legal: all, or the number of replicas of a host, such as {}",
          legal_shard_groups(2, shape.replicas));
    }
    if (size == 1) {
      throw_usage(
          "options.shape.shard_group (--shard-group) is host, but {} replicas do not make groups "
          "of neighbours that are on one host each, for all stages; legal: all, numbers that "
          "divide {}, or shards of the optimizer (--shard optimizer)",
          shape.replicas, shape.replicas);
    }
  }
  place.shard_groups.copies = shape.replicas / size;
}

void JobContext::plan(const PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  if (options.devices.choices.size() > 1) {
    throw_usage("{} devices for a job that one process plans; legal is one, which every rank has",
                options.devices.choices.size());
  }
  stage_places = stage_placement(options, shape.pipeline);  // refuses what cannot be placed
  place.topology =
      make_topology(planned_ranks(shape),
                    {.pipeline = shape.pipeline, .replica = shape.replicas, .tensor = shape.tensor},
                    shape.rank_order);
  divide(shape);
  const RankDevice mine =
      choose_devices(*world.collectives, Topology{}, options.devices.choices, {host_name()})
          .front();
  place.hosts.resize(at(place.topology.ranks()));
  group_shards(options);
  for (int rank = 0; rank < place.topology.ranks(); ++rank) {
    RankDevice& device = devices.ranks.emplace_back(mine);
    device.host = device.machine = device.nccl_machine = fmt::format("planned host {}", rank);
    device.host_memory = 0;
    device.memory_group.clear();
    device.allowed_memory = 0;
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
    const auto leave_open = [&](Communicator* each) {
      if (each != nullptr) each->leave_open(/*by_all=*/gone == nullptr);
    };
    for (const RankGroup& each : groups_) leave_open(each.ranks.get());
    for (Communicator* each :
         {sharers_.ranks.get(), copies_.ranks.get(), world.ranks.get(), messages.get()}) {
      leave_open(each);
    }
    throw;
  }
}

}  // namespace sluice
