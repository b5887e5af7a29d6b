#include "runtime/job/job_groups.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>

#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule_file.hpp>

#include "comm/group/transport.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/layout/edge_link.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

// What every rank must agree on, beyond what the program adds.
std::vector<std::pair<std::string, std::string>> agreed_values(const PipelineOptions& options) {
  std::vector<std::pair<std::string, std::string>> values = options.checks.configuration;
  const auto add = [&](const char* name, const auto& value) {
    values.emplace_back(name, fmt::format("{}", value));
  };
  add("pipeline", options.shape.pipeline);
  add("replicas", options.shape.replicas);
  add("rank-order", static_cast<int>(options.shape.rank_order));
  if (options.order.given == nullptr) {
    add("schedule", options.order.schedule);
    add("chunks", options.order.chunks);
  } else {
    const std::string text = to_schedule_json(*options.order.given);
    add("schedule", options.order.given->name);
    add("SHA-256 of the schedule", sha256_hex(std::as_bytes(std::span<const char>(text))));
  }
  add("micro-batches", options.shape.micro_batches);
  add("micro-batch-size", options.shape.micro_batch_size);
  add("batch-size", options.shape.batch_size);
  add("seed", options.training.seed);
  add("threads", options.devices.threads);
  add("tf32", options.devices.tf32);
  add("device", to_string(options.devices.choices));
  add("transport", name_of(options.devices.transport));
  add("all-reduce", options.devices.all_reduce);
  add("cuda-graphs", options.devices.cuda_graphs);
  add("bucket-bytes", options.devices.bucket_bytes);
  add("optimizer", static_cast<int>(options.training.optimizer.kind));
  add("beta1", options.training.optimizer.beta1);
  add("beta2", options.training.optimizer.beta2);
  add("epsilon", options.training.optimizer.epsilon);
  add("momentum", options.training.optimizer.momentum);
  add("weight-decay", options.training.optimizer.weight_decay);
  add("learning-rate", options.training.learning_rate.peak);
  add("final-learning-rate-share", options.training.learning_rate.final_share);
  add("warmup", options.training.learning_rate.warmup);
  add("steps", options.training.learning_rate.steps);
  add("clip", options.training.clip);
  add("learning-rate-constant", options.training.learning_rate.constant);
  add("inference", options.training.inference);
  values.emplace_back("evaluations",
                      fmt::format("{}", fmt::join(options.training.evaluations, ",")));
  add("check-replicas", options.checks.replicas_every);
  add("trace", options.checks.trace);
  return values;
}

}  // namespace

void JobWatch::poll() {
  control_.poll();
  if (messages_ != nullptr) messages_->poll();
}

void require_same_configuration(Collectives& comm,
                                const std::vector<std::pair<std::string, std::string>>& values) {
  // CBOR carries any bytes: a path is not always UTF-8.
  const std::vector<std::uint8_t> mine = Json::to_cbor(Json(values));
  const auto all = comm.all_gather_strings(std::string(mine.begin(), mine.end()));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const Json first = Json::from_cbor(all[0]);
    const Json other = Json::from_cbor(all[rank]);
    for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      throw Error(ErrorCode::kMismatch,
                  fmt::format("ranks disagree about '{}': rank 0 has '{}', rank {} has '{}'",
                              first[i][0].get<std::string>(), first[i][1].get<std::string>(), rank,
                              other[i][1].get<std::string>()));
    }
    throw Error(ErrorCode::kMismatch,
                fmt::format("ranks disagree: rank 0 has {} settings, rank {} has {}", first.size(),
                            rank, other.size()));
  }
}

JobGroups::JobGroups(Communicator& comm, const PipelineOptions& options)
    : world(comm.duplicate()),
      control(std::make_unique<ControlChannel>(*world)),
      watch(std::make_unique<JobWatch>(*control)) {
  in_world = std::make_unique<Collectives>(*world, 0, watch.get());
  guarded([&] {
    require_same_configuration(*in_world, agreed_values(options));
    const int replicas_asked = std::max(options.shape.replicas, 1);
    const int depth = options.shape.pipeline > 0 ? options.shape.pipeline
                                                 : std::max(world->size() / replicas_asked, 1);
    topology =
        make_topology(world->size(), depth, options.shape.replicas, options.shape.rank_order);
    devices = choose_devices(*in_world, topology, options.devices.choices);
    device = devices[static_cast<std::size_t>(world->rank())].device;
    no_nccl = find_why_no_nccl(*in_world, devices, options.devices.transport);
    no_device_messages =
        why_no_device_messages(*in_world, devices, options.devices.transport, no_nccl, depth);
  });
  rank = topology.pipeline_rank(world->rank());
  replica = topology.replica(world->rank());
  pipeline = world->split(replica, rank);
  messages = pipeline->duplicate();
  replicas = world->split(rank, replica);
  in_pipeline = std::make_unique<Collectives>(*pipeline, 0, watch.get());
  in_replicas = std::make_unique<Collectives>(*replicas, 0, watch.get());
}

std::vector<RankDevice> JobGroups::pipeline_devices() const {
  std::vector<RankDevice> mine;
  for (int r = 0; r < topology.pipeline; ++r) {
    mine.push_back(devices[static_cast<std::size_t>(topology.rank_of(replica, r))]);
  }
  return mine;
}

std::size_t JobGroups::piece_bytes() const {
  constexpr std::size_t kStagedPiece = std::size_t{4} << 20;
  const bool staged = std::any_of(devices.begin(), devices.end(), [](const RankDevice& other) {
    return other.device.kind != DeviceKind::kCpu;
  });
  return staged ? kStagedPiece : kMaxPieceBytes;
}

void JobGroups::guarded(const std::function<void()>& body) {
  sluice::guarded(*control, world->rank(), body);
}

}  // namespace sluice
