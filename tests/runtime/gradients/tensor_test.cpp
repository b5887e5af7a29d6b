// Trainings whose stages are shared by several ranks have the bits of those of one rank a stage:
// the numbers of the stages here add up alike in any order. Mistakes with such ranks are at the
// end.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/topology.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/tensor/slice_runs.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/first_ranks.hpp"

namespace sluice::testing {
namespace {

// --- a stage ---
using Tensors = std::span<const Tensor>;
constexpr std::int64_t kWidth = 3, kRows = 7;  // of an activation, of what is between the weights

// Where a stage does otherwise than it describes.
struct Fault {
  enum class Kind {
    kNone,
    kForwardSum,
    kBackwardSum,
    kThrow,
    kInfinite,
    kLongSum
  } kind = Kind::kNone;
  int tensor = 0;  // on this one of the ranks that share stage 0
  std::uint64_t step = 1;
};

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A multiple of 1/64.
double fixed(float value) { return std::nearbyint(64.0 * double{value}) / 64; }
// An integer.
double small(double value) { return std::clamp(std::nearbyint(value), -7.0, 7.0); }

// y = small(x + B small(A x + a) + b), whose gradients are those without small() and are made small
// too. All sums are of few multiples of 1/64, so they are exact in any order. Ranks that share a
// stage have rows of A and a, and columns of B.
class SlicedStage : public Stage, public SplitBackward, public LossStage {
 public:
  // `rows`: of the whole.
  SlicedStage(const StagePlace& place, std::int64_t rows, const Fault& fault)
      : place_(place), fault_(fault) {
    const std::string stage = fmt::format("s{}.", place.stage);
    const Slice part = place.slice(0, rows);
    const auto add = [&](const char* name, Shape shape, const Slice& slice) {
      return &set_.add(stage + name, shape, Init::uniform(1), true, false, slice);
    };
    a_ = add("A", {rows, kWidth}, part);
    a_bias_ = add("a", {rows}, part);
    set_.begin_unit();
    b_ = add("B", {kWidth, rows}, place.slice(1, rows));
    b_bias_ = add("b", {kWidth}, {});
    seen_ = &set_.add_buffer(stage + "seen", {rows}, Init::constant(0), ReplicaRule::kMean, part);
  }
  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext&) const override {
    StageDescription description{.outputs = {inputs[0]}};
    const PlannedCollective sum{.bytes = index(inputs[0].shape.elements()) * sizeof(double),
                                .type = DType::kF64};
    description.collectives.forward = {sum};
    if (place_.stage > 0) description.collectives.backward_input = {sum};
    return description;
  }
  ParameterSet* parameters() override { return &set_; }

  void forward(StageContext& ctx, Tensors x, Tensors y) override {
    if (faulty(ctx, Fault::Kind::kThrow)) throw std::runtime_error("no numbers today");
    std::vector<double> sums(index(y[0].elements()));
    for (std::int64_t s = 0; s < ctx.samples; ++s) {
      for (std::int64_t r = 0; r < rows(); ++r) {
        const double h = hidden(x[0], s, r);
        for (std::int64_t i = 0; i < kWidth; ++i) {
          sums[index(s * kWidth + i)] += fixed(b_->value.at(i * rows() + r)) * h;
        }
      }
    }
    if (faulty(ctx, Fault::Kind::kLongSum)) sums.resize(100'000);
    ctx.tensor->sum(sums);
    if (faulty(ctx, Fault::Kind::kForwardSum)) ctx.tensor->sum(sums);
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      const double bias = fixed(b_bias_->value.at(i % kWidth));
      y[0].at(i) = static_cast<float>(small(x[0].at(i) + sums[index(i)] + bias));
    }
    if (ctx.phase != Phase::kTrain) return;
    for (std::int64_t r = 0; r < rows(); ++r) {
      seen_->value.at(r) += static_cast<float>(seen_->slice.begin + r + 1);
    }
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    backward_input(ctx, dy, dx);
    backward_weight(ctx, dy);
  }
  void backward_input(StageContext& ctx, Tensors dy, Tensors dx) override {
    if (dx.empty()) return;
    std::vector<double> sums(index(dx[0].elements()));
    for (std::int64_t s = 0; s < ctx.samples; ++s) {
      for (std::int64_t r = 0; r < rows(); ++r) {
        const double dh = hidden_gradient(ctx, dy[0], s, r);
        for (std::int64_t i = 0; i < kWidth; ++i) {
          sums[index(s * kWidth + i)] += fixed(a_->value.at(r * kWidth + i)) * dh;
        }
      }
    }
    ctx.tensor->sum(sums);
    for (std::int64_t i = 0; i < dx[0].elements(); ++i) {
      dx[0].at(i) =
          static_cast<float>(small(dy[0].at(i) / ctx.loss_scale + sums[index(i)]) * ctx.loss_scale);
    }
  }
  void backward_weight(StageContext& ctx, Tensors dy) override {
    if (faulty(ctx, Fault::Kind::kBackwardSum)) {
      double none = 0;
      ctx.tensor->sum({&none, 1});
    }
    if (faulty(ctx, Fault::Kind::kInfinite)) b_bias_->grad.at(1) = INFINITY;
    const Tensor& x = ctx.inputs[0];
    for (std::int64_t s = 0; s < ctx.samples; ++s) {
      for (std::int64_t i = 0; i < kWidth; ++i) b_bias_->grad.at(i) += dy[0].at(s * kWidth + i);
      for (std::int64_t r = 0; r < rows(); ++r) {
        const auto h = static_cast<float>(hidden(x, s, r));
        const auto dh = static_cast<float>(hidden_gradient(ctx, dy[0], s, r) * ctx.loss_scale);
        a_bias_->grad.at(r) += dh;
        for (std::int64_t i = 0; i < kWidth; ++i) {
          a_->grad.at(r * kWidth + i) += dh * x.at(s * kWidth + i);
          b_->grad.at(i * rows() + r) += dy[0].at(s * kWidth + i) * h;
        }
      }
    }
  }
  // |y - target|.
  void loss(StageContext& ctx, Tensors y, Tensors targets, double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      const float over = y[0].at(i) - targets[0].at(i);
      *sum += std::abs(double{over});
      if (ctx.phase != Phase::kTrain) continue;
      y[0].at(i) = static_cast<float>(ctx.loss_scale * (over > 0 ? 1 : over < 0 ? -1 : 0));
    }
  }
  [[nodiscard]] double target_weight(Tensors targets) const override {
    return static_cast<double>(targets[0].shape()[0]);
  }

 private:
  [[nodiscard]] std::int64_t rows() const { return a_bias_->shape[0]; }
  [[nodiscard]] bool faulty(const StageContext& ctx, Fault::Kind kind) const {
    return fault_.kind == kind && fault_.tensor == place_.tensor && place_.stage == 0 &&
           ctx.phase == Phase::kTrain && ctx.step == fault_.step && ctx.micro_batch == 1;
  }
  [[nodiscard]] double hidden(const Tensor& x, std::int64_t s, std::int64_t r) const {
    double sum = fixed(a_bias_->value.at(r));
    for (std::int64_t i = 0; i < kWidth; ++i) {
      sum += fixed(a_->value.at(r * kWidth + i)) * double{x.at(s * kWidth + i)};
    }
    return small(sum);
  }
  // In units of the loss scale.
  [[nodiscard]] double hidden_gradient(const StageContext& ctx, const Tensor& dy, std::int64_t s,
                                       std::int64_t r) const {
    double sum = 0;
    for (std::int64_t i = 0; i < kWidth; ++i) {
      sum += fixed(b_->value.at(i * rows() + r)) * (dy.at(s * kWidth + i) / ctx.loss_scale);
    }
    return small(sum);
  }

  StagePlace place_;
  Fault fault_;
  ParameterSet set_;
  Parameter *a_, *a_bias_, *b_, *b_bias_, *seen_;
};

StageFactory sliced_stages(std::int64_t rows = kRows, const Fault& fault = {}) {
  return [=](const StagePlace& place) -> std::unique_ptr<Stage> {
    return std::make_unique<SlicedStage>(place, rows, fault);
  };
}

// --- data ---
constexpr std::int64_t kSamples = 16;  // of a full step

// The same on all ranks.
struct Numbers {
  std::vector<float> inputs, targets;

  Numbers(std::uint64_t seed, std::int64_t samples) {
    for (std::int64_t i = 0; i < samples * kWidth; ++i) {
      const auto words = philox({.seed = seed}, 0, static_cast<std::uint64_t>(i));
      inputs.push_back(static_cast<float>(words[0] % 7) - 3);
      targets.push_back(static_cast<float>(words[1] % 9) - 4);
    }
  }
  [[nodiscard]] Batch all() const { return share(0, 1); }
  [[nodiscard]] Batch share(int replica, int replicas) const {
    const std::size_t floats = inputs.size() / static_cast<std::size_t>(replicas);
    const auto cut = [&](const std::vector<float>& from) {
      return view(std::span(from).subspan(floats * static_cast<std::size_t>(replica), floats),
                  {static_cast<std::int64_t>(floats) / kWidth, kWidth});
    };
    return {.inputs = {cut(inputs)}, .targets = {cut(targets)}};
  }
};

BatchSpec batches(Feed feed) {
  const TensorSpec numbers{DType::kF32, {kWidth}};
  return {.inputs = {numbers}, .targets = {numbers}, .feed = feed};
}

// --- configurations ---
struct Layout {
  const char* schedule = "1f1b";
  int chunks = 1;
  int depth = 1, replicas = 1, tensor = 1;
  bool shards = false, clips = false;
  std::int64_t rows = kRows, samples = kSamples;
  int parts = 0;  // virtual replicas

  [[nodiscard]] int ranks() const { return depth * replicas * tensor; }
  [[nodiscard]] int stages() const { return depth * chunks; }
};

std::string to_string(const Layout& of) {
  return fmt::format("{} p{} d{} of {} t{}{}{} rows {}", of.schedule, of.depth, of.replicas,
                     std::max(of.parts, of.replicas), of.tensor, of.shards ? " shards" : "",
                     of.clips ? " clip" : "", of.rows);
}

PipelineOptions options_of(const Layout& of) {
  PipelineOptions options;
  options.shape = {.pipeline = of.depth,
                   .replicas = of.replicas,
                   .virtual_replicas = of.parts,
                   .tensor = of.tensor};
  options.shape.micro_batches = 4;
  options.shape.micro_batch_size = of.samples / 4 / std::max(of.parts, of.replicas);
  if (of.shards) options.shape.shard = ShardLevel::kOptimizer;
  options.order.schedule = of.schedule;
  options.order.chunks = of.chunks;
  options.training.optimizer = OptimizerConfig::sgd();
  options.training.learning_rate = {.peak = 0.25};
  if (of.clips) options.training.clip = 0.5;
  options.checks.replicas_every = 1;
  return options;
}

// --- trainings ---
using Values = std::map<std::string, std::vector<float>>;

std::vector<float> floats_of(std::span<const std::byte> bytes) {
  std::vector<float> floats(bytes.size() / sizeof(float));
  std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

// Whole ones. Each rank looks for its own part in them.
Values values_of(Pipeline& pipeline) {
  Values all;
  for (const auto& [name, tensor] : pipeline.state()) all[name] = floats_of(tensor.bytes);
  std::vector<Pipeline::Owned> mine = pipeline.parameters();
  for (const Pipeline::Owned& buffer : pipeline.buffers()) mine.push_back(buffer);
  for (const Pipeline::Owned& each : mine) {
    const Parameter& parameter = *each.parameter;
    const std::vector<float>& whole = all.at(parameter.name);
    for_runs(parameter.shape, parameter.slice, 0, parameter.shape.elements(),
             [&](std::int64_t here, std::int64_t in_whole, std::int64_t elements) {
               for (std::int64_t i = 0; i < elements; ++i) {
                 EXPECT_EQ(parameter.value.at(here + i), whole.at(index(in_whole + i)))
                     << parameter.name << " " << here + i;
               }
             });
  }
  return all;
}

struct Outcome {
  std::vector<double> numbers;  // losses, norms, counted targets; of evaluations too
  std::vector<float> outputs;   // of the model at the end, on rank 0
  Values drawn, values;
};

void add(Outcome& outcome, const StepReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.grad_norm, report.targets});
}
void add(Outcome& outcome, const EvaluationReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.targets});
}

// The second of three steps has a batch of half the size.
Outcome train(Communicator& comm, const Layout& of) {
  Pipeline pipeline(comm, sliced_stages(of.rows), batches(Feed::kRank0), options_of(of));
  const auto passed = [&](const Numbers& numbers) {
    return comm.rank() == 0 ? numbers.all() : Batch{};
  };
  Outcome outcome;
  outcome.drawn = values_of(pipeline);
  const Numbers other(9, 11);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const Numbers numbers(step, step == 2 ? of.samples / 2 : of.samples);
    add(outcome, pipeline.train_step(passed(numbers)));
    if (step == 1) add(outcome, pipeline.evaluate(passed(other)));
  }
  outcome.values = values_of(pipeline);
  const Tensors outputs = pipeline.infer(passed(other), {.to = 0});
  if (comm.rank() == 0) {
    outcome.outputs = floats_of({outputs[0].as<const std::byte>(), outputs[0].spec.bytes()});
  }
  pipeline.close();
  return outcome;
}

// Over the first ranks of the job; elsewhere nothing happens. An Error, which all of them throw, is
// a failure of the test, and the others go on.
Outcome train_on_some(const Layout& of) {
  const auto part = first_ranks(of.ranks());
  try {
    if (part != nullptr) return train(*part, of);
  } catch (const Error& error) {
    ADD_FAILURE() << to_string(of) << ": " << error.what();
  }
  return {};
}

// One rank that has as many stages.
Layout reference_of(const Layout& of) {
  Layout alone{.clips = of.clips, .rows = of.rows};
  alone.chunks = of.stages();
  if (alone.chunks > 1) alone.schedule = "interleaved";
  return alone;
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> all;
  for (const auto& [schedule, chunks] : std::initializer_list<std::pair<const char*, int>>{
           {"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}, {"zb-v", 2}}) {
    for (const int depth : {1, 2}) {
      for (const int replicas : {1, 2}) {
        for (int tensor = 1; tensor <= 8 / depth / replicas && tensor <= 4; ++tensor) {
          for (int more = 0; more < 4; ++more) {
            all.push_back({.schedule = schedule,
                           .chunks = chunks,
                           .depth = depth,
                           .replicas = replicas,
                           .tensor = tensor,
                           .shards = more % 2 != 0,
                           .clips = more / 2 != 0});
          }
        }
      }
    }
  }
  return all;
}

void expect_bits_of_one_rank(const std::vector<Layout>& layouts) {
  std::map<std::tuple<int, bool, std::int64_t>, Outcome> references;
  for (const Layout& each : layouts) {
    const auto [found, is_new] = references.try_emplace({each.stages(), each.clips, each.rows});
    if (is_new) found->second = train_on_some(reference_of(each));
    const Outcome outcome = train_on_some(each);
    if (world().rank() != 0) continue;
    const Outcome& expected = found->second;
    EXPECT_GT(expected.numbers.front(), 1);
    EXPECT_NE(expected.drawn, expected.values);
    const std::string where = to_string(each);
    EXPECT_EQ(expected.drawn, outcome.drawn) << where;
    EXPECT_EQ(expected.numbers, outcome.numbers) << where;
    EXPECT_EQ(expected.values, outcome.values) << where;
    EXPECT_EQ(expected.outputs, outcome.outputs) << where;
  }
}

TEST(TensorTest, RanksThatShareStagesHaveTheBitsOfOneRank) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  expect_bits_of_one_rank(all_layouts());
}

// Ranks without rows, and slices of several blocks, of which replicas update some each.
TEST(TensorTest, SlicesMayBeEmptyOrLarge) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  std::vector<Layout> layouts;
  for (const std::int64_t rows : {2, 13001}) {
    layouts.push_back({.depth = 2, .tensor = 4, .clips = true, .rows = rows});
    layouts.push_back({.replicas = 2, .tensor = 3, .shards = true, .rows = rows});
    layouts.push_back(
        {.depth = 2, .replicas = 2, .tensor = 2, .shards = true, .clips = true, .rows = rows});
  }
  expect_bits_of_one_rank(layouts);
}

// Layers by shards, and layers that each rank computes alike.
Sequential layers_by_shards() {
  using nn::Split;
  return Sequential({nn::unflatten({kWidth, 1, 1}),
                     nn::batch_norm2d(kWidth, {.statistics = nn::BatchStatistics::kReplicas}),
                     nn::flatten(), nn::linear(kWidth, 115, {.split = Split::kColumns}), nn::gelu(),
                     nn::linear(115, 8, {.split = Split::kRows}), nn::cut(), nn::layer_norm(8),
                     nn::linear(8, 40, {.split = Split::kColumns}), nn::relu(),
                     nn::linear(40, 8, {.bias = false, .split = Split::kRows}), nn::dropout(0.1),
                     nn::linear(8, kWidth)},
                    nn::mse_loss());
}

TEST(TensorTest, LayersByShardsHaveTheBitsOfOneRank) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  const auto outcome_of = [](const Layout& of) {
    Outcome outcome;
    const auto part = first_ranks(of.ranks());
    if (part == nullptr) return outcome;
    PipelineOptions options = options_of(of);
    options.shape.tensor_shards = 4;
    Pipeline pipeline(*part, layers_by_shards(), batches(Feed::kRank0), options);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const Numbers numbers(step, of.samples);
      add(outcome, pipeline.train_step(part->rank() == 0 ? numbers.all() : Batch{}));
    }
    for (const auto& [name, tensor] : pipeline.state()) {
      outcome.values[name] = floats_of(tensor.bytes);
    }
    pipeline.close();
    return outcome;
  };
  for (const Layout& each : {Layout{.clips = true}, Layout{.schedule = "zb-h1", .depth = 2},
                             Layout{.replicas = 2, .shards = true, .clips = true}}) {
    const Outcome alone = outcome_of(each);
    for (const int tensor : {2, 4}) {
      Layout shared = each;
      shared.tensor = tensor;
      if (shared.ranks() > world().size()) continue;
      const Outcome outcome = outcome_of(shared);
      if (world().rank() != 0) continue;
      EXPECT_FALSE(alone.values.empty());
      EXPECT_EQ(alone.numbers, outcome.numbers) << to_string(shared);
      EXPECT_EQ(alone.values, outcome.values) << to_string(shared);
    }
  }
}

// Of as many samples gradients are no multiples of 1/64, and an order of additions shows.
TEST(TensorTest, RanksThatShareStagesHaveTheBitsOfTheirVirtualReplicas) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  for (const int depth : {1, 2}) {
    const auto train = [&](int parts, int replicas, bool more) {
      return train_on_some({.schedule = more ? "gpipe" : "1f1b",
                            .depth = depth,
                            .replicas = replicas,
                            .tensor = 2,
                            .shards = more,
                            .clips = true,
                            .samples = 3 * kSamples,
                            .parts = parts});
    };
    const Outcome expected = train(4, 1, false), other = train(2, 1, false);
    EXPECT_TRUE(world().rank() > 0 || expected.values != other.values);
    for (const int replicas : {1, 2, 4}) {
      if (2 * depth * replicas > 8) continue;
      const Outcome outcome = train(4, replicas, replicas > 1);
      if (world().rank() != 0) continue;
      EXPECT_EQ(expected.numbers, outcome.numbers) << depth << " " << replicas;
      EXPECT_EQ(expected.values, outcome.values) << depth << " " << replicas;
      EXPECT_EQ(expected.outputs, outcome.outputs) << depth << " " << replicas;
    }
  }
}

// --- values, outputs and batches ---
// Runs `body` with a pipeline over the first ranks of the job.
void with_pipeline(const Layout& of, Feed feed, const Fault& fault,
                   const std::function<void(Communicator&, Pipeline&)>& body) {
  const auto comm = first_ranks(of.ranks());
  if (comm == nullptr) return;
  Pipeline pipeline(*comm, sliced_stages(kRows, fault), batches(feed), options_of(of));
  body(*comm, pipeline);
}

constexpr Layout kShared{.depth = 2, .replicas = 2, .tensor = 2};

TEST(TensorTest, SetStateGivesEachRankItsSlice) {
  const Layout uneven{.schedule = "zb-v", .chunks = 2, .depth = 2, .tensor = 3};
  with_pipeline(uneven, Feed::kRank0, {}, [](Communicator&, Pipeline& pipeline) {
    std::map<std::string, HostTensor> state = pipeline.state();
    EXPECT_EQ(state.size(), 4U * 5);
    EXPECT_EQ(state.at("s0.A").spec.shape, (Shape{kRows, kWidth}));
    EXPECT_EQ(state.at("s3.B").spec.shape, (Shape{kWidth, kRows}));
    float next = 0;
    Values wanted;
    for (auto& [name, tensor] : state) {
      std::vector<float>& floats = wanted[name] = floats_of(tensor.bytes);
      for (float& each : floats) each = ++next;
      std::memcpy(tensor.bytes.data(), floats.data(), tensor.bytes.size());
    }
    pipeline.set_state(state);
    EXPECT_EQ(values_of(pipeline), wanted);
    state.at("s1.B").spec.shape = {kWidth, 3};
    expect_error(ErrorCode::kUsage, {"'s1.B' is f32 [3, 3]", "the model has f32 [3, 7]"},
                 [&] { pipeline.set_state(state); });
    EXPECT_EQ(values_of(pipeline), wanted);
  });
}

TEST(TensorTest, OutputsAreThoseOfTheFirstRankOfTheLastStage) {
  with_pipeline(kShared, Feed::kRank0, {}, [](Communicator& comm, Pipeline& pipeline) {
    const Numbers numbers(1, 11);
    const Batch batch = comm.rank() == 0 ? numbers.all() : Batch{};
    const auto copy = [](Tensors outputs) {
      return outputs.empty()
                 ? std::vector<float>()
                 : floats_of({outputs[0].as<const std::byte>(), outputs[0].spec.bytes()});
    };
    const std::vector<float> everywhere =
        copy(pipeline.infer(batch, {.to = InferOptions::kEveryRank}));
    ASSERT_EQ(everywhere.size(), index(11 * kWidth));
    const std::vector<float> one = copy(pipeline.infer(batch, {.to = 3}));
    EXPECT_EQ(one, comm.rank() == 3 ? everywhere : std::vector<float>());

    const RankPlace& place = PipelineAccess::layout(pipeline).place;
    const bool makes = place.here.pipeline == 1 && place.here.tensor == 0;
    const auto half = everywhere.begin() + 6 * kWidth;  // the first replica's
    const std::vector<float> mine = place.here.replica == 0
                                        ? std::vector<float>(everywhere.begin(), half)
                                        : std::vector<float>(half, everywhere.end());
    EXPECT_EQ(copy(pipeline.infer(batch)), makes ? mine : std::vector<float>());
    std::vector<float> handed;
    const auto take = [&](SampleRange, Tensors outputs) {
      const std::vector<float> part = copy(outputs);
      handed.insert(handed.end(), part.begin(), part.end());
    };
    EXPECT_TRUE(pipeline.infer(batch, {.on_outputs = take}).empty());
    EXPECT_EQ(handed, makes ? mine : std::vector<float>());
  });
}

TEST(TensorTest, APipelineForInferenceHasTheSameOutputs) {
  const auto outputs_of = [](bool inference) {
    std::vector<float> all;
    if (const auto comm = first_ranks(kShared.ranks()); comm != nullptr) {
      PipelineOptions options = options_of(kShared);
      options.training.inference = inference;
      if (inference) options.training.optimizer = {};
      Pipeline pipeline(*comm, sliced_stages(), batches(Feed::kRank0), options);
      const Numbers numbers(1, 11);
      const Tensors outputs = pipeline.infer(comm->rank() == 0 ? numbers.all() : Batch{},
                                             {.to = InferOptions::kEveryRank});
      all = floats_of({outputs[0].as<const std::byte>(), outputs[0].spec.bytes()});
    }
    return all;
  };
  const std::vector<float> outputs = outputs_of(true);
  EXPECT_EQ(outputs, outputs_of(false));
}

// Logits of tokens of so many positions; of each pipeline of `ranks` ranks in turn.
using Answers = std::map<std::int64_t, std::vector<float>>;
Answers answers_of(const PipelineOptions::Shape& shape, bool inference, DType precision,
                   std::initializer_list<std::int64_t> all_positions) {
  Answers answers;
  const auto comm = first_ranks(shape.pipeline * shape.tensor);
  if (comm == nullptr) return answers;
  constexpr std::int64_t kContext = 8, kTokens = 251, kTexts = 3;
  PipelineOptions options;
  options.shape = shape;
  options.shape.micro_batch_size = 2;
  options.training.inference = inference;
  const TensorSpec window{DType::kI32, {kContext}};
  Pipeline pipeline(
      *comm,
      Transformer({.layers = 2,
                   .heads = 4,
                   .width = 32,
                   .context = kContext,
                   .vocabulary = kTokens,
                   .precision = precision}),
      BatchSpec{
          .inputs = {window}, .targets = {window}, .feed = Feed::kRank0, .position_dimension = 1},
      options);
  for (const std::int64_t positions : all_positions) {
    std::vector<std::int32_t> tokens(index(kTexts * positions));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(i * 37 % kTokens);
    }
    const Tensor input{tokens.data(), {DType::kI32, {kTexts, positions}}};
    const Tensors outputs = pipeline.infer(comm->rank() == 0 ? Batch{.inputs = {input}} : Batch{},
                                           {.to = InferOptions::kEveryRank});
    EXPECT_EQ(outputs[0].spec, (TensorSpec{precision, {kTexts, positions, kTokens}}));
    std::vector<float>& logits = answers[positions];
    for (std::int64_t i = 0; i < outputs[0].elements(); ++i) {
      logits.push_back(precision == DType::kBf16 ? to_float(outputs[0].as<Bf16>()[i])
                                                 : outputs[0].as<float>()[i]);
    }
  }
  return answers;
}

TEST(TensorTest, InferGivesWholeLogitsOfAnyPositions) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  for (const DType precision : {DType::kF32, DType::kBf16}) {
    const auto all = [&](int pipeline, int tensor, int shards) {
      return answers_of({.pipeline = pipeline, .tensor = tensor, .tensor_shards = shards}, true,
                        precision, {8, 3, 7, 4, 1});
    };
    const Answers whole = all(1, 1, 1), expected = all(1, 1, 4);
    for (const auto& [positions, logits] : expected) {
      EXPECT_THAT(logits, ::testing::Pointwise(
                              ::testing::FloatNear(precision == DType::kF32 ? 1e-5F : 0.05F),
                              whole.at(positions)));
    }
    for (const int tensor : {1, 2, 4}) {
      for (const int pipeline : {1, 2}) {
        if (precision == DType::kBf16 && tensor * pipeline != 4) continue;
        const Answers found = all(pipeline, tensor, 4);
        if (world().rank() != 0) continue;
        EXPECT_FALSE(found.empty());
        EXPECT_TRUE(found == expected) << pipeline << " x " << tensor;
      }
    }
    // A pipeline that trains deals the positions of its samples.
    const Answers trains =
        answers_of({.pipeline = 2, .tensor = 2, .tensor_shards = 4}, false, precision, {8, 4});
    if (world().rank() != 0) continue;
    for (const auto& [positions, logits] : trains) {
      EXPECT_EQ(logits, expected.at(positions)) << positions;
    }
  }
}

TEST(TensorTest, EachRankMayPassItsReplicasShare) {
  Outcome whole;
  with_pipeline(kShared, Feed::kRank0, {}, [&](Communicator& comm, Pipeline& pipeline) {
    add(whole, pipeline.train_step(comm.rank() == 0 ? Numbers(1, 16).all() : Batch{}));
  });
  with_pipeline(kShared, Feed::kPerStage, {}, [&](Communicator& comm, Pipeline& pipeline) {
    const Place here = PipelineAccess::layout(pipeline).place.here;
    const BatchShare share = pipeline.share();
    EXPECT_EQ(share.inputs, here.pipeline == 0);
    EXPECT_EQ(share.targets, here.pipeline == 1);
    const Numbers numbers(1, 16), more(1, 18);
    const Batch mine = numbers.share(share.replica, share.replicas);
    // The last rank of the first stage passes more.
    const bool differs = here.pipeline == 0 && here.replica == 1 && here.tensor == 1;
    expect_error(ErrorCode::kUsage, {"passes inputs of 9 samples, rank ", " targets of 8"}, [&] {
      (void)pipeline.train_step(differs ? more.share(share.replica, share.replicas) : mine);
    });
    const bool last = here.replica == 1 && here.tensor == 1;
    expect_error(
        ErrorCode::kUsage,
        {"passes inputs of 8 samples, rank ", " of 9; ranks that share a stage pass the same"},
        [&] { (void)pipeline.evaluate(last ? more.share(share.replica, share.replicas) : mine); });
    expect_error(
        ErrorCode::kUsage,
        {"evaluate() of a batch: ranks ", "of other values; ranks that share a stage"}, [&] {
          (void)pipeline.evaluate(last ? Numbers(2, 16).share(share.replica, share.replicas)
                                       : mine);
        });
    Outcome shares;
    add(shares, pipeline.train_step(mine));
    if (comm.rank() == 0) {
      EXPECT_EQ(shares.numbers, whole.numbers);
    }
  });
}

// Short collectives, long ones, and sums over replicas of one block and of several.
TEST(TensorTest, TheMemoryTableHasWhatSumsAndCollectivesTake) {
  for (const auto& [of, size] : std::initializer_list<std::pair<Layout, std::int64_t>>{
           {kShared, 2},
           {kShared, 200},
           {{.tensor = 4, .rows = 2}, 400},
           {{.replicas = 3}, 2},
           {{.replicas = 2, .rows = 13001}, 1},
           {{.replicas = 4, .shards = true}, 1}}) {
    const auto comm = first_ranks(of.ranks());
    if (comm == nullptr) continue;
    PipelineOptions options = options_of(of);
    options.shape.micro_batch_size = size;
    Pipeline pipeline(*comm, sliced_stages(of.rows), batches(Feed::kRank0), options);
    const Numbers numbers(1, size * options.shape.micro_batches * of.replicas);
    (void)pipeline.train_step(comm->rank() == 0 ? numbers.all() : Batch{});
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    const Place here = layout.place.here;
    const std::size_t planned = layout.memory.of(here).collectives;
    EXPECT_GT(planned, 0U);
    // The first of a group's ranks has what the others send it first.
    const std::size_t held = PipelineAccess::collective_bytes(pipeline);
    if (here.tensor == 0) {
      EXPECT_EQ(held, planned) << to_string(of) << " of " << size;
    } else {
      EXPECT_LE(held, planned) << to_string(of) << " of " << size;
    }
    pipeline.close();
  }
}

TEST(TensorTest, SourcesAndLoadersReadOnAllRanksOfAStage) {
  const Numbers numbers(1, 2 * kSamples);
  const Batch whole = numbers.all();
  const auto data = make_array_dataset({host_copy(whole.inputs[0])}, {host_copy(whole.targets[0])});
  const auto source = make_array_source(numbers.inputs, kWidth, numbers.targets, kWidth, kSamples);
  const auto train = [&](const Layout& of) {
    Outcome outcome;
    const auto comm = first_ranks(of.ranks());
    if (comm == nullptr) return outcome;
    Pipeline pipeline(*comm, sliced_stages(), *source, options_of(of));
    for (int step = 0; step < 2; ++step) add(outcome, pipeline.train_step());
    add(outcome, pipeline.evaluate(*source, 11));
    for (const Feed feed : {Feed::kPerStage, Feed::kRank0}) {
      Pipeline other(*comm, sliced_stages(), batches(feed), options_of(of));
      DataLoader loader = other.loader(data, {.batch_size = kSamples, .shuffle = true});
      while (const LoadedBatch* batch = loader.next()) add(outcome, other.train_step(*batch));
    }
    outcome.values = values_of(pipeline);
    return outcome;
  };
  Layout alone = kShared;
  alone.tensor = 1;
  const Outcome expected = train(alone), outcome = train(kShared);
  if (world().rank() != 0) return;
  EXPECT_EQ(expected.numbers, outcome.numbers);
  EXPECT_EQ(expected.values, outcome.values);
}

// --- mistakes ---
// Of every rank's second step.
void expect_end(const Layout& of, const Fault& fault, ErrorCode code,
                std::initializer_list<std::string> parts) {
  with_pipeline(of, Feed::kRank0, fault, [&](Communicator& comm, Pipeline& pipeline) {
    const Numbers numbers(1, kSamples);
    const Batch batch = comm.rank() == 0 ? numbers.all() : Batch{};
    (void)pipeline.train_step(batch);
    expect_error(code, parts, [&] { (void)pipeline.train_step(batch); });
    EXPECT_FALSE(pipeline.usable()) << to_string(of);
  });
}

TEST(TensorMistakesTest, SumsThatAStageDoesNotDescribeAreNamedOnAllRanks) {
  for (const Layout& each : {Layout{}, Layout{.depth = 2, .tensor = 3}, kShared}) {
    expect_end(each, {.kind = Fault::Kind::kForwardSum, .tensor = each.tensor - 1, .step = 2},
               ErrorCode::kUsage,
               {"stage 0, forward of micro-batch 1: the stage makes a sum of ",
                " bytes of f64 over the tensor ranks where its description has no more (1 in this "
                "action)"});
    expect_end(each, {.kind = Fault::Kind::kBackwardSum, .step = 2}, ErrorCode::kUsage,
               {"stage 0, backward of micro-batch 1: the stage makes a sum of 8 bytes of f64 over "
                "the tensor ranks where its description has no more (0 in this action)"});
  }
  expect_end({.schedule = "zb-v", .chunks = 2, .depth = 2, .tensor = 2},
             {.kind = Fault::Kind::kBackwardSum, .step = 2}, ErrorCode::kUsage,
             {"stage 0, weight gradient of micro-batch 1", "no more (0 in this action)"});
}

// Every rank that has the parameter computes its gradient.
TEST(TensorMistakesTest, AGradientThatOneRankAloneHasNotFiniteChangesNothing) {
  for (const Layout& each : {Layout{.tensor = 4}, Layout{.depth = 2, .tensor = 3}, kShared}) {
    const Fault fault{.kind = Fault::Kind::kInfinite, .tensor = each.tensor - 1, .step = 1};
    with_pipeline(each, Feed::kRank0, fault, [](Communicator& comm, Pipeline& pipeline) {
      const Values before = values_of(pipeline);
      const Numbers numbers(1, kSamples);
      expect_error(ErrorCode::kNumeric, {"not finite, first in parameter 's0.b'"},
                   [&] { (void)pipeline.train_step(comm.rank() == 0 ? numbers.all() : Batch{}); });
      EXPECT_EQ(values_of(pipeline), before);
    });
  }
}

TEST(TensorMistakesTest, SumsOfOtherLengthsAreNamedBeforeAnyMessage) {
  for (const Layout& each : {Layout{.tensor = 2}, Layout{.depth = 2, .tensor = 4}, kShared}) {
    for (const int tensor : {0, each.tensor - 1}) {
      expect_end(each, {.kind = Fault::Kind::kLongSum, .tensor = tensor, .step = 2},
                 ErrorCode::kUsage,
                 {"stage 0, forward of micro-batch 1: the stage makes a sum of 800000 bytes of f64 "
                  "over the tensor ranks where its description has a sum of "});
    }
  }
}

TEST(TensorMistakesTest, AnErrorWithinAStageEndsAllRanks) {
  for (const Layout& each : {Layout{.tensor = 4}, Layout{.depth = 2, .tensor = 3}, kShared}) {
    expect_end(each, {.kind = Fault::Kind::kThrow, .tensor = each.tensor - 1, .step = 2},
               ErrorCode::kUser, {"stage 0, forward of micro-batch 1: no numbers today"});
  }
}

}  // namespace
}  // namespace sluice::testing
