#include "runtime/job/configuration.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>

#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule_file.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/job/build_name.hpp"

namespace sluice {

using Json = nlohmann::json;

namespace {

void add_training(const PipelineOptions::Training& training, NamedValues& values) {
  const auto add = [&](const char* name, const auto& value) {
    values.emplace_back(name, fmt::format("{}", value));
  };
  add("optimizer", static_cast<int>(training.optimizer.kind));
  add("beta1", training.optimizer.beta1);
  add("beta2", training.optimizer.beta2);
  add("epsilon", training.optimizer.epsilon);
  add("momentum", training.optimizer.momentum);
  add("nesterov", training.optimizer.nesterov);
  add("moment-precision", name_of(training.optimizer.moments));
  add("weight-decay", training.optimizer.weight_decay);
  add("own optimizer", static_cast<bool>(training.make_optimizer));
  std::string groups;
  for (const ParameterGroup& group : training.groups) {
    groups += fmt::format("{} {} {} {}; ", group.names, group.learning_rate_scale,
                          group.weight_decay ? fmt::format("{}", *group.weight_decay) : "-",
                          group.frozen);
  }
  add("groups of parameters", groups);
  add("learning-rate", training.learning_rate.peak);
  add("final-learning-rate-share", training.learning_rate.final_share);
  add("warmup", training.learning_rate.warmup);
  add("steps", training.learning_rate.steps);
  add("learning-rate-decay", static_cast<int>(training.learning_rate.decay));
  add("learning-rate factor", training.learning_rate.factor);
  add("learning-rate falls every", training.learning_rate.every);
  add("clip", training.clip);
  add("inference", training.inference);
  add("skip-nonfinite", training.skip_nonfinite);
  add("save-copy", training.save_copy);
  values.emplace_back("evaluations", fmt::format("{}", fmt::join(training.evaluations, ",")));
}

// Of the program's own order, which no file has checked.
std::string text_of(const Schedule& given) {
  try {
    return to_schedule_json(given);
  } catch (const std::invalid_argument& error) {
    throw_usage("options.order.given: {}", error.what());
  }
}

}  // namespace

NamedValues agreed_values(const PipelineOptions& options) {
  NamedValues values = options.checks.configuration;
  values.emplace_back("build of Sluice", build_name());
  const auto add = [&](const char* name, const auto& value) {
    values.emplace_back(name, fmt::format("{}", value));
  };
  add("pipeline", options.shape.pipeline);
  add("replicas", options.shape.replicas);
  add("rank-order", static_cast<int>(options.shape.rank_order));
  add("bytes between stages", options.shape.edge_bytes);
  add("bytes of a rank's gradients", options.shape.gradient_bytes);
  if (options.order.given == nullptr) {
    add("schedule", options.order.schedule);
    add("chunks", options.order.chunks);
  } else {
    const std::string text = text_of(*options.order.given);
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
  add_training(options.training, values);
  add("comparison of replicas every", options.checks.replicas_every);
  add("trace", options.checks.trace);
  const PipelineOptions::Watch& watch = options.watch;
  add("watchdog", watch.on);
  add("timeout", watch.timeout);
  add("action-timeout", watch.action_timeout);
  add("watchdog's directory", watch.directory);
  add("watchdog ends the process", watch.ends_process);
  add("watchdog-ports", fmt::format("{}-{}", watch.first_port, watch.last_port));
  return values;
}

void require_same_configuration(Collectives& comm, const NamedValues& values) {
  // CBOR carries any bytes: a path is not always UTF-8.
  const std::vector<std::uint8_t> mine = Json::to_cbor(Json(values));
  const auto all = comm.all_gather_strings(std::string(mine.begin(), mine.end()));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const Json first = Json::from_cbor(all[0]);
    const Json other = Json::from_cbor(all[rank]);
    for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      throw_error(ErrorCode::kMismatch,
                  "ranks disagree about '{}': rank 0 has '{}', rank {} has '{}'",
                  first[i][0].get<std::string>(), first[i][1].get<std::string>(), rank,
                  other[i][1].get<std::string>());
    }
    throw_error(ErrorCode::kMismatch, "ranks disagree: rank 0 has {} settings, rank {} has {}",
                first.size(), rank, other.size());
  }
}

}  // namespace sluice
