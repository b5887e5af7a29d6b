#include "runtime/job/configuration.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/job/build_name.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {

using Json = nlohmann::json;

namespace {

constexpr double kMostRate = std::numeric_limits<float>::max();

bool is_number_from_0(double value) { return std::isfinite(value) && value >= 0; }

// The largest of the groups' factors; at least 1, that of parameters without a group.
double largest_factor(std::span<const ParameterGroup> groups) {
  double most = 1;
  for (const ParameterGroup& group : groups) most = std::max(most, group.learning_rate_scale);
  return most;
}

void require_sensible_groups(const PipelineOptions::Training& training) {
  for (const ParameterGroup& group : training.groups) {
    if (!is_number_from_0(group.learning_rate_scale)) {
      throw_usage("group '{}' has a factor of {} for the learning rate; legal are numbers from 0",
                  group.names, group.learning_rate_scale);
    }
    if (!group.weight_decay) continue;
    if (!is_number_from_0(*group.weight_decay)) {
      throw_usage("group '{}' has a weight decay of {}; legal are numbers from 0", group.names,
                  *group.weight_decay);
    }
    if (training.make_optimizer) {
      throw_usage("group '{}' has a weight decay, which an optimizer of one's own does not get",
                  group.names);
    }
  }
}

void require_sensible_training(const PipelineOptions::Training& training) {
  if (!training.make_optimizer) require_sensible(training.optimizer);
  require_sensible_groups(training);
  require_sensible(training.learning_rate, training.groups);
  if (training.clip >= 0) return;
  throw_usage("options.training.clip is {}; legal are numbers from 0, and 0 for no clipping",
              training.clip);
}

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

void require_sensible(const PipelineOptions& options) {
  if (options.shape.pipeline < 0) {
    throw_usage(
        "options.shape.pipeline is {}; legal are numbers of ranks, and 0 for all ranks / replicas",
        options.shape.pipeline);
  }
  if (options.devices.threads < 1 || options.devices.threads > ComputeContext::kMostThreads) {
    throw_usage("options.devices.threads is {}; legal are 1 to {}", options.devices.threads,
                ComputeContext::kMostThreads);
  }
  require_sensible_training(options.training);
}

void require_sensible(const LearningRate& rate, std::span<const ParameterGroup> groups) {
  if (!is_number_from_0(rate.peak) || !is_number_from_0(rate.final_share) ||
      !is_number_from_0(rate.factor)) {
    throw_usage("a learning rate of {} (final share {}, factor {}); legal are numbers from 0",
                rate.peak, rate.final_share, rate.factor);
  }
  const double factor = largest_factor(groups);
  if (rate.peak * factor <= kMostRate) return;
  throw_usage(
      "a learning rate of {}, times up to {} for groups of parameters; legal are at most {}",
      rate.peak, factor, kMostRate);
}

void require_sensible_at(std::uint64_t step, const LearningRate& rate,
                         std::span<const ParameterGroup> groups) {
  const double here = rate.at(step), factor = largest_factor(groups);
  if (is_number_from_0(here) && here * factor <= kMostRate) return;
  throw_usage(
      "the learning rate of step {} is {}, times up to {} for groups of parameters; legal are 0 to "
      "{}",
      step, here, factor, kMostRate);
}

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
