#include "runtime/job/sensible_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {
namespace {

constexpr double kMostRate = std::numeric_limits<float>::max();

bool is_number_from_0(double value) { return std::isfinite(value) && value >= 0; }

// A program may have made the value from any number.
template <typename Enum>
void require_one_of(const char* option, Enum value, Enum last) {
  const int number = static_cast<int>(value), most = static_cast<int>(last);
  if (number >= 0 && number <= most) return;
  throw_usage("{} is {}, which is none of its {} values", option, number, most + 1);
}

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

}  // namespace

void require_sensible(const PipelineOptions& options) {
  if (options.shape.pipeline < 0) {
    throw_usage(
        "options.shape.pipeline is {}; legal are numbers of ranks, and 0 for all ranks / replicas",
        options.shape.pipeline);
  }
  require_one_of("options.shape.rank_order", options.shape.rank_order, RankOrder::kReplicaFirst);
  require_one_of("options.devices.transport", options.devices.transport, TransportChoice::kNccl);
  for (const DeviceChoice& choice : options.devices.choices) {
    require_one_of("the kind in options.devices.choices", choice.kind, DeviceChoice::Kind::kAuto);
  }
  if (options.devices.threads < 1 || options.devices.threads > ComputeContext::kMostThreads) {
    throw_usage("options.devices.threads is {}; legal are 1 to {}", options.devices.threads,
                ComputeContext::kMostThreads);
  }
  require_sensible_training(options.training);
}

void require_sensible(const LearningRate& rate, std::span<const ParameterGroup> groups) {
  require_one_of("the decay of the learning rate", rate.decay, LearningRate::Decay::kStep);
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

}  // namespace sluice
