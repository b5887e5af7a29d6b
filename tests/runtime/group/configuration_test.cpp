#include "runtime/group/configuration.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Change = std::function<void(PipelineOptions&)>;

void expect_refused(const std::string& text, const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    PipelineOptions options;
    change(options);
    expect_error(ErrorCode::kUsage, {text, "legal"}, [&] { require_sensible(options); });
  }
}

TEST(SensibleOptionsTest, WhatIsGivenByDefaultIsSensible) {
  require_sensible(PipelineOptions{});
  for (const OptimizerConfig& config : {OptimizerConfig::sgd(), OptimizerConfig::sgd(0.9F, true),
                                        OptimizerConfig::adam(), OptimizerConfig::adamw()}) {
    PipelineOptions options;
    options.training.optimizer = config;
    options.training.clip = std::numeric_limits<double>::infinity();
    options.training.learning_rate = {.peak = 0, .final_share = 0};
    require_sensible(options);
  }
}

TEST(SensibleOptionsTest, ALibrarysSumIsOneOverTheReplicas) {
  expect_refused("virtual replicas", {[](auto& o) {
                   o.shape.virtual_replicas = 4;
                   o.shape.replicas = 2;
                   o.devices.all_reduce = true;
                 }});
  PipelineOptions options;
  options.shape.virtual_replicas = options.shape.replicas = 2;
  options.devices.all_reduce = true;
  require_sensible(options);
}

TEST(SensibleOptionsTest, ShardsAreBounded) {
  for (const int bad : {-1, 4097}) {
    expect_refused("tensor_shards is " + std::to_string(bad),
                   {[&](auto& o) { o.shape.tensor_shards = bad; }});
  }
}

TEST(SensibleOptionsTest, AnOptimizersNumbersAreOnesThatAStepCanWorkWith) {
  for (const float bad : {1.0F, -1.0F, kNan, kInfinity}) {
    expect_refused("beta1", {[&](auto& o) { o.training.optimizer.beta1 = bad; }});
    expect_refused("beta2", {[&](auto& o) { o.training.optimizer.beta2 = bad; }});
  }
  for (const float bad : {0.0F, -1.0F, kNan, kInfinity}) {
    expect_refused("epsilon", {[&](auto& o) { o.training.optimizer.epsilon = bad; }});
  }
  for (const float bad : {-1.0F, kNan, kInfinity}) {
    expect_refused("weight decay",
                   {[&](auto& o) { o.training.optimizer.weight_decay = bad; },
                    [&](auto& o) { o.training.groups = {{.names = "*", .weight_decay = bad}}; }});
    expect_refused("momentum",
                   {[&](auto& o) { o.training.optimizer = OptimizerConfig::sgd(bad); }});
  }
  for (const double bad : {-1.0, static_cast<double>(kNan)}) {
    expect_refused("clip", {[&](auto& o) { o.training.clip = bad; }});
  }
  // A program's own optimizer gets none of them.
  PipelineOptions options;
  options.training.optimizer.beta1 = kNan;
  options.training.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
    return std::unique_ptr<Optimizer>();
  };
  require_sensible(options);
}

TEST(SensibleOptionsTest, F32HoldsEveryLearningRate) {
  for (const double bad : {-1.0, static_cast<double>(kNan), static_cast<double>(kInfinity), 1e39}) {
    expect_refused("learning rate", {[&](auto& o) { o.training.learning_rate.peak = bad; }});
  }
  for (const double bad : {-1.0, static_cast<double>(kNan), 1e300}) {
    expect_refused("learning rate", {[&](auto& o) {
                     o.training.groups = {{.names = "*", .learning_rate_scale = bad}};
                   }});
  }
  const LearningRate grows{
      .peak = 1, .decay = LearningRate::Decay::kStep, .factor = 1e20, .every = 1};
  require_sensible(grows, {});
  require_sensible_at(2, grows, {});
  expect_error(ErrorCode::kUsage, {"the learning rate of step 3 is 1e+40", "legal"},
               [&] { require_sensible_at(3, grows, {}); });
  const std::vector<ParameterGroup> groups = {{.names = "*", .learning_rate_scale = 1e20}};
  expect_error(ErrorCode::kUsage, {"the learning rate of step 2", "times up to 1e+20"},
               [&] { require_sensible_at(2, grows, groups); });
}

TEST(SensibleOptionsTest, NamesTheRangeOfThreadsAndOfThePipeline) {
  for (const int bad : {0, -1, 1025, std::numeric_limits<int>::max()}) {
    expect_refused("options.devices.threads is " + std::to_string(bad) + "; legal are 1 to 1024",
                   {[&](auto& o) { o.devices.threads = bad; }});
  }
  expect_refused("shape.pipeline is -1", {[](auto& o) { o.shape.pipeline = -1; }});
}

TEST(SensibleOptionsTest, NamesTheGroupsThatReplicasCanForm) {
  const auto refused = [](const std::string& part, ShardLevel shard, int replicas, int size) {
    expect_refused(part, {[=](auto& o) {
                     o.shape.shard = shard;
                     o.shape.replicas = replicas;
                     o.shape.shard_group = size;
                   }});
  };
  constexpr auto kParameters = ShardLevel::kParameters;
  for (const ShardLevel level :
       {ShardLevel::kNone, ShardLevel::kOptimizer, ShardLevel::kGradients}) {
    for (const int size : {2, PipelineOptions::Shape::kWithinHosts}) {
      refused(std::string("(--shard-group) with --shard ") + name_of(level), level, 4, size);
    }
  }
  refused("is 3, of 8 replicas; legal near it: 2 or 4", kParameters, 8, 3);
  refused("is 16, of 8 replicas; legal near it: 8", kParameters, 8, 16);
  refused("is -2, of 4 replicas; legal near it: 2", kParameters, 4, -2);
  refused("is 1, of 6 replicas; legal near it: 2, or shards of the optimizer", kParameters, 6, 1);
  PipelineOptions legal;
  legal.shape.shard = kParameters;
  for (const auto& [replicas, size] : {std::pair(6, 3), std::pair(4, 4), std::pair(1, 1)}) {
    legal.shape.replicas = replicas;
    legal.shape.shard_group = size;
    require_sensible(legal);
  }
}

// Converts to the type of any field.
struct Anything {
  template <typename Field>
  operator Field() const;  // NOLINT(google-explicit-constructor)
};

// The number of fields of an aggregate.
template <typename Options, typename... Fields>
constexpr std::size_t fields_of() {
  if constexpr (requires { Options{Fields{}..., Anything{}}; }) {
    return fields_of<Options, Fields..., Anything>();
  } else {
    return sizeof...(Fields);
  }
}

template <typename Options>
using Changes = std::array<std::function<void(Options&)>, fields_of<Options>()>;

// Expects one change for each field, and that each shows in the values that ranks compare.
template <typename Options>
void expect_compared(const std::function<Options&(PipelineOptions&)>& part,
                     const Changes<Options>& changes) {
  const Facts defaults = agreed_values({});
  for (std::size_t i = 0; i < changes.size(); ++i) {
    ASSERT_TRUE(changes[i]) << "no change of field " << i;
    PipelineOptions options;
    changes[i](part(options));
    EXPECT_NE(agreed_values(options), defaults) << "field " << i;
  }
}

TEST(ConfigurationTest, RanksCompareEveryFieldOfTheOptions) {
  static_assert(fields_of<PipelineOptions>() == 8);
  using Options = PipelineOptions;
  expect_compared<Options::Offload>(
      [](auto& o) -> auto& { return o.offload; },
      {[](auto& o) { o.activations = Options::Offload::To::kHost; },
       [](auto& o) { o.optimizer = Options::Offload::To::kDisk; },
       [](auto& o) { o.directory = "other"; }, [](auto& o) { o.resident = {2}; },
       [](auto& o) { o.pool = 1 << 20; }});
  expect_compared<Options::Shape>(
      [](auto& o) -> auto& { return o.shape; },
      {[](auto& o) { o.pipeline = 2; }, [](auto& o) { o.replicas = 2; },
       [](auto& o) { o.virtual_replicas = 2; }, [](auto& o) { o.tensor = 2; },
       [](auto& o) { o.tensor_shards = 2; }, [](auto& o) { o.sequence_parallel = false; },
       [](auto& o) { o.rank_order = RankOrder::kReplicaFirst; },
       [](auto& o) { o.micro_batches = 2; }, [](auto& o) { o.micro_batch_size = 2; },
       [](auto& o) { o.batch_size = 2; }, [](auto& o) { o.shard = ShardLevel::kOptimizer; },
       [](auto& o) { o.shard_gather = ShardGather::kStep; }, [](auto& o) { o.shard_group = 2; }});
  expect_compared<Options::Order>(
      [](auto& o) -> auto& { return o.order; },
      {[](auto& o) { o.schedule = "gpipe"; }, [](auto& o) { o.chunks = 2; },
       [](auto& o) {
         o.given = std::make_shared<const Schedule>(empty_schedule("own", Placement::linear(1), 1));
       }});
  expect_compared<Options::Devices>(
      [](auto& o) -> auto& { return o.devices; },
      {[](auto& o) { o.choices = parse_devices("cpu,auto"); },
       [](auto& o) { o.transport = TransportChoice::kMpi; }, [](auto& o) { o.threads = 2; },
       [](auto& o) { o.tf32 = true; }, [](auto& o) { o.all_reduce = true; },
       [](auto& o) { o.cuda_graphs = true; }, [](auto& o) { o.memory = 1; }});
  expect_compared<Options::Training>(
      [](auto& o) -> auto& { return o.training; },
      {[](auto& o) { o.seed = 2; }, [](auto& o) { o.optimizer = OptimizerConfig::sgd(); },
       [](auto& o) {
         o.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
           return std::unique_ptr<Optimizer>();
         };
       },
       [](auto& o) { o.groups = {{.names = "*"}}; }, [](auto& o) { o.learning_rate.peak = 2; },
       [](auto& o) { o.clip = 2; }, [](auto& o) { o.gradient_order = GradientOrder::kMicroBatch; },
       [](auto& o) { o.inference = true; }, [](auto& o) { o.skip_nonfinite = true; }});
  expect_compared<OptimizerConfig>(
      [](auto& o) -> auto& { return o.training.optimizer; },
      {[](auto& o) { o.kind = OptimizerConfig::Kind::kSgd; }, [](auto& o) { o.beta1 = 0; },
       [](auto& o) { o.beta2 = 0; }, [](auto& o) { o.epsilon = 1; },
       [](auto& o) { o.momentum = 1; }, [](auto& o) { o.nesterov = true; },
       [](auto& o) { o.weight_decay = 1; }, [](auto& o) { o.moments = DType::kBf16; }});
  expect_compared<LearningRate>([](auto& o) -> auto& { return o.training.learning_rate; },
                                {[](auto& o) { o.peak = 2; }, [](auto& o) { o.final_share = 1; },
                                 [](auto& o) { o.warmup = 2; }, [](auto& o) { o.steps = 2; },
                                 [](auto& o) { o.decay = LearningRate::Decay::kStep; },
                                 [](auto& o) { o.factor = 1; }, [](auto& o) { o.every = 2; }});
  expect_compared<Options::Checks>(
      [](auto& o) -> auto& { return o.checks; },
      {[](auto& o) { o.replicas_every = 2; }, [](auto& o) { o.trace = true; }});
  expect_compared<Options::Expert>(
      [](auto& o) -> auto& { return o.expert; },
      {[](auto& o) { o.edge_bytes = 1; }, [](auto& o) { o.gradient_bytes = 1; },
       [](auto& o) { o.progress_in_actions = false; }, [](auto& o) { o.bucket_bytes = 1; },
       [](auto& o) { o.evaluations = {2}; }, [](auto& o) { o.save_copy = true; },
       [](auto& o) {
         o.configuration = {{"own", "value"}};
       }});
  expect_compared<Options::Watch>(
      [](auto& o) -> auto& { return o.watch; },
      {[](auto& o) { o.on = true; }, [](auto& o) { o.timeout = 2; },
       [](auto& o) { o.action_timeout = 2; }, [](auto& o) { o.directory = "run"; },
       [](auto& o) { o.ends_process = true; }, [](auto& o) { o.first_port = 2; },
       [](auto& o) { o.last_port = 2; }});
}

TEST(ConfigurationTest, AnOrderThatNoFileCanHoldIsTheUsersMistake) {
  Schedule order = empty_schedule("own", Placement::linear(1), 1);
  append(order, ActionKind::kForward, 0, 0);
  PipelineOptions options;
  const auto values = [&] {
    options.order.given = std::make_shared<const Schedule>(order);
    return agreed_values(options);
  };
  (void)values();
  for (const ActionKind kind : {ActionKind::kReduceTied, ActionKind::kOptimizer,
                                ActionKind::kSendForward, static_cast<ActionKind>(99)}) {
    order.ranks[0].push_back({.action = {.kind = kind}});
    expect_error(ErrorCode::kUsage, {"options.order.given", "schedule 'own'"},
                 [&] { (void)values(); });
    order.ranks[0].pop_back();
  }
  order.name = std::string(201, 'x');
  expect_error(ErrorCode::kUsage, {"options.order.given", "name"}, [&] { (void)values(); });
}

}  // namespace
}  // namespace sluice
