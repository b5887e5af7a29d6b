#include "runtime/group/configuration.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <type_traits>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/group/build_name.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/layout/shard_groups.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {

using Json = nlohmann::json;

namespace {

template <typename Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_enum_v<Value>) return fmt::format("{}", static_cast<int>(value));
  if constexpr (!std::is_enum_v<Value>) return fmt::format("{}", value);
}

std::string text_of(TransportChoice choice) { return name_of(choice); }
std::string text_of(ShardLevel level) { return name_of(level); }
std::string text_of(GradientOrder order) { return name_of(order); }
std::string text_of(DType type) { return name_of(type); }
std::string text_of(const std::vector<DeviceChoice>& choices) { return to_string(choices); }
std::string text_of(const std::vector<std::int64_t>& numbers) { return joined(numbers, ","); }
std::string text_of(const std::vector<int>& numbers) { return joined(numbers, ","); }
// What it makes cannot be compared.
std::string text_of(const OptimizerFactory& make) { return make ? "own" : "none"; }

std::string text_of(const std::vector<ParameterGroup>& groups) {
  std::string text;
  for (const auto& [names, learning_rate_scale, weight_decay, frozen] : groups) {
    text += fmt::format("{} {} {} {}; ", names, learning_rate_scale,
                        weight_decay ? fmt::format("{}", *weight_decay) : "-", frozen);
  }
  return text;
}

// Of the program's own order, which no file has checked.
std::string text_of(const std::shared_ptr<const Schedule>& given) {
  if (given == nullptr) return "none";
  try {
    const std::string text = to_schedule_json(*given);
    return sha256_hex(std::as_bytes(std::span<const char>(text)));
  } catch (const Error& error) {
    throw_usage("options.order.given: {}", error.what());
  }
}

// A name for each of the fields.
template <typename... Fields>
void add(Facts& values, const std::array<const char*, sizeof...(Fields)>& names,
         const Fields&... fields) {
  const char* const* name = names.data();
  (values.emplace_back(*name++, text_of(fields)), ...);
}

void add_training(const PipelineOptions::Training& all, Facts& values) {
  const auto& [seed, optimizer, make_optimizer, groups, rate, clip, order, inference, skip] = all;
  add(values,
      {"seed", "own optimizer", "groups of parameters", "clip", "gradient-order", "inference",
       "skip-nonfinite"},
      seed, make_optimizer, groups, clip, order, inference, skip);
  const auto& [kind, beta1, beta2, epsilon, momentum, nesterov, weight_decay, moments] = optimizer;
  add(values,
      {"optimizer", "beta1", "beta2", "epsilon", "momentum", "nesterov", "weight-decay",
       "moment-precision"},
      kind, beta1, beta2, epsilon, momentum, nesterov, weight_decay, moments);
  const auto& [peak, final_share, warmup, steps, decay, factor, every] = rate;
  add(values,
      {"learning-rate", "final-learning-rate-share", "warmup", "steps", "learning-rate-decay",
       "learning-rate factor", "learning-rate falls every"},
      peak, final_share, warmup, steps, decay, factor, every);
}

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

void require_sensible_shard_group(const PipelineOptions::Shape& shape) {
  const int size = shape.shard_group;
  if (size == 0) return;
  if (shape.shard != ShardLevel::kParameters) {
    throw_usage(
        "options.shape.shard_group (--shard-group) with --shard {}, where replicas have whole "
        "parameters; legal: all, or shards of the parameters (--shard parameters)",
        name_of(shape.shard));
  }
  if (size == PipelineOptions::Shape::kWithinHosts || shape.replicas < 2) return;
  if (size > 1 && shape.replicas % size == 0) return;
  throw_usage(
      "options.shape.shard_group (--shard-group) is {}, of {} replicas; legal near it: {}{}", size,
      shape.replicas, legal_shard_groups(size, shape.replicas),
      size == 1 ? ", or shards of the optimizer (--shard optimizer), of which each replica has all "
                  "parameters"
                : "");
}

void require_sensible_shards(const PipelineOptions& options) {
  if (options.shape.shard_gather != ShardGather::kAuto &&
      options.shape.shard != ShardLevel::kParameters) {
    throw_usage(
        "options.shape.shard_gather (--shard-gather) with shards of {}; legal: auto, or shards of "
        "the parameters (--shard parameters)",
        name_of(options.shape.shard));
  }
  require_sensible_shard_group(options.shape);
  if (options.shape.shard == ShardLevel::kNone || options.training.inference) return;
  const OptimizerFactory& own = options.training.make_optimizer;
  if (own && !own.takes_slices()) {
    throw_usage(
        "shards of the {} (options.shape.shard) with an OptimizerFactory of whole parameters; "
        "legal: a factory that takes std::span<const ParameterSlice>, or no shards",
        name_of(options.shape.shard));
  }
  if (options.devices.all_reduce) {
    throw_usage(
        "shards of the {} with --all-reduce, which gives every replica the whole gradient; legal: "
        "one of the two",
        name_of(options.shape.shard));
  }
}

void require_sensible_order(const PipelineOptions& options) {
  if (options.training.gradient_order == GradientOrder::kStep || options.training.inference) return;
  const PipelineOptions::Shape& shape = options.shape;
  constexpr const char* kWhat = "gradients in the order micro-batch (--gradient-order)";
  if (shape.replicas < 2) {
    throw_usage("{} with one replica; legal: the order step, or two replicas or more", kWhat);
  }
  if (shape.virtual_replicas != 0 && shape.virtual_replicas != shape.replicas) {
    throw_usage(
        "{} with {} virtual replicas on {} replicas; legal: the order step, or as many virtual "
        "replicas as replicas",
        kWhat, shape.virtual_replicas, shape.replicas);
  }
  if (shape.shard >= ShardLevel::kGradients) return;
  throw_usage("{} with --shard {}; legal: the order step, or --shard gradients or parameters",
              kWhat, name_of(shape.shard));
}

void require_sensible_offload(const PipelineOptions& options) {
  const PipelineOptions::Offload& offload = options.offload;
  using To = PipelineOptions::Offload::To;
  constexpr std::size_t kLeastPool = std::size_t{64} << 10;
  if (offload.pool < kLeastPool) {
    throw_usage("options.offload.pool is {} bytes; legal are {} and more", offload.pool,
                kLeastPool);
  }
  if (offload.optimizer == To::kHost) {
    throw_usage(
        "the optimizer's state goes to a disk alone; legal: --offload optimizer:disk=DIR, on CPUs");
  }
  if (offload.optimizer != To::kNowhere && options.training.make_optimizer) {
    throw_usage(
        "an optimizer of the program's own (options.training.make_optimizer) keeps its state "
        "itself; legal: options.training.optimizer, or no offload of the optimizer");
  }
  const auto on_disk = [](To to) { return to == To::kDisk || to == To::kCachedDisk; };
  const bool file = on_disk(offload.activations) || on_disk(offload.optimizer);
  if (file != offload.directory.empty()) return;
  throw_usage("options.offload {}; legal: a directory with a disk alone",
              file ? "names a disk and no directory"
                   : fmt::format("names the directory '{}' and no disk", offload.directory));
}

}  // namespace

const char* name_of(ShardLevel level) {
  constexpr std::array kNames = {"none", "optimizer", "gradients", "parameters"};
  return kNames[static_cast<std::size_t>(level)];
}

const char* name_of(GradientOrder order) {
  return order == GradientOrder::kStep ? "step" : "micro-batch";
}

void require_sensible(const PipelineOptions& options) {
  if (options.shape.pipeline < 0) {
    throw_usage(
        "options.shape.pipeline is {}; legal are numbers of ranks, and 0 for all ranks / replicas "
        "/ tensor",
        options.shape.pipeline);
  }
  if (options.devices.threads < 1 || options.devices.threads > ComputeContext::kMostThreads) {
    throw_usage("options.devices.threads is {}; legal are 1 to {}", options.devices.threads,
                ComputeContext::kMostThreads);
  }
  const int shards = options.shape.tensor_shards;
  if (shards < 0 || shards > kMostTensorShards) {
    throw_usage(
        "options.shape.tensor_shards is {}; legal are 1 to {}, and 0 for as many as tensor ranks",
        shards, kMostTensorShards);
  }
  require_sensible_training(options.training);
  require_sensible_shards(options);
  require_sensible_order(options);
  require_sensible_offload(options);
  const int replicas = options.shape.replicas, parts = options.shape.virtual_replicas;
  if (options.devices.all_reduce && parts != 0 && parts != replicas) {
    throw_usage(
        "{} virtual replicas with {} replicas and --all-reduce, whose sums depend on the replicas; "
        "legal: as many virtual replicas as replicas, or no --all-reduce",
        parts, replicas);
  }
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

// The bindings name every field: a new one does not compile before it stands here.
Facts agreed_values(const PipelineOptions& options) {
  const auto& [shape, order, devices, offload, training, checks, watch, expert] = options;
  const auto& [edge_bytes, gradient_bytes, progress, bucket_bytes, evaluations, save_copy,
               configuration] = expert;
  Facts values = configuration;
  add(values,
      {"bytes between stages", "bytes of a rank's gradients", "progress", "bucket-bytes",
       "evaluations", "save-copy"},
      edge_bytes, gradient_bytes, progress, bucket_bytes, evaluations, save_copy);
  const auto& [replicas_every, trace] = checks;
  add(values, {"build of Sluice", "comparison of replicas every", "trace"}, build_name(),
      replicas_every, trace);
  const auto& [pipeline, replicas, virtual_replicas, tensor, tensor_shards, sequence_parallel,
               rank_order, micro_batches, micro_batch_size, batch_size, shard, shard_gather,
               shard_group] = shape;
  add(values,
      {"pipeline", "replicas", "virtual-replicas", "tensor", "tensor-shards", "sequence-parallel",
       "rank-order", "micro-batches", "micro-batch-size", "batch-size", "shard", "shard-gather",
       "shard-group"},
      pipeline, replicas, virtual_replicas, tensor, tensor_shards, sequence_parallel, rank_order,
      micro_batches, micro_batch_size, batch_size, shard, shard_gather, shard_group);
  const auto& [schedule, chunks, given] = order;
  add(values, {"schedule", "chunks", "SHA-256 of the schedule"}, schedule, chunks, given);
  const auto& [choices, transport, threads, tf32, all_reduce, cuda_graphs, memory] = devices;
  add(values, {"device", "transport", "threads", "tf32", "all-reduce", "cuda-graphs", "memory"},
      choices, transport, threads, tf32, all_reduce, cuda_graphs, memory);
  const auto& [activations, optimizer, scratch, resident, pool] = offload;
  add(values,
      {"offload of activations", "offload of the optimizer", "directory of what is offloaded",
       "what stages do not offload", "memory through which the optimizer's state passes"},
      activations, optimizer, scratch, resident, pool);
  add_training(training, values);
  const auto& [on, timeout, action_timeout, directory, ends_process, first_port, last_port] = watch;
  add(values,
      {"watchdog", "timeout", "action-timeout", "watchdog's directory", "watchdog ends the process",
       "watchdog-ports, first", "watchdog-ports, last"},
      on, timeout, action_timeout, directory, ends_process, first_port, last_port);
  return values;
}

void require_same_configuration(Collectives& comm, const Facts& values) {
  // CBOR carries any bytes: a path is not always UTF-8.
  const auto all = comm.all_gather_strings(to_cbor(Json(values)));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const Json first = from_cbor(all[0]);
    const Json other = from_cbor(all[rank]);
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
