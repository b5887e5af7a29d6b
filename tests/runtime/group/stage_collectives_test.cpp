// Stages, layers and losses that make collectives of each kind within their actions, in training,
// evaluation and inference, over the ranks that share a stage and over replicas.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/first_ranks.hpp"

namespace sluice::testing {
namespace {

using Tensors = std::span<const Tensor>;
constexpr std::int64_t kWidth = 4;  // of an activation

enum class Fault { kNone, kOtherKind, kTooFew, kTooMany, kOtherBytes, kInLoss, kGrows };

Tensor of(std::vector<float>& values) {
  return {values.data(), {DType::kF32, {static_cast<std::int64_t>(values.size())}}};
}
Tensor of(std::vector<std::int32_t>& values) {
  return {values.data(), {DType::kI32, {static_cast<std::int64_t>(values.size())}}};
}

// y = 2 x. The ranks that share it have equal x, and each computes a part of y. All numbers are
// small integers.
class Doubling : public Stage, public SplitBackward, public LossStage {
 public:
  Doubling(const StagePlace& place, int replicas, Fault fault)
      : place_(place), replicas_(replicas), fault_(fault) {
    weight_ = &set_.add(fmt::format("w{}", place.stage), {1}, Init::constant(1));
  }
  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> in,
                                          ComputeContext&) const override {
    const std::uint64_t bytes = in[0].bytes(), part = bytes / at(place_.tensors);
    const PlannedCollective gather{.kind = CollectiveKind::kAllGather, .bytes = part};
    const PlannedCollective scatter{.kind = CollectiveKind::kReduceScatter, .bytes = bytes};
    const PlannedCollective exchange{.kind = CollectiveKind::kAllToAll,
                                     .bytes = at(place_.tensors) * sizeof(std::int32_t),
                                     .type = DType::kI32};
    const PlannedCollective sum{.bytes = bytes};
    const PlannedCollective count{
        .axis = CollectiveAxis::kReplica, .bytes = sizeof(double), .type = DType::kF64};
    const PlannedCollective total{.bytes = sizeof(double), .type = DType::kF64};
    StageDescription description{.outputs = {in[0]}};
    description.collectives = {.forward = {gather, count, scatter, exchange, sum},
                               .backward_input = {count, gather},
                               .backward_weight = {scatter}};
    if (place_.stage + 1 == place_.stages) description.collectives.loss = {total};
    if (fault_ == Fault::kGrows && in[0].shape[0] < 4) {
      description.collectives.backward_weight[0].bytes = 80;
    }
    return description;
  }
  ParameterSet* parameters() override { return &set_; }

  void forward(StageContext& ctx, Tensors x, Tensors y) override {
    EXPECT_EQ(ctx.collective == nullptr, ctx.phase != Phase::kTrain);
    if (faulty(ctx, Fault::kOtherKind)) {
      std::vector<float> values(part_of(x[0]).size());
      ctx.tensor->sum(values);
    }
    gather_doubled(ctx, x[0], y[0]);
    count(ctx);
    scatter(ctx, x[0]);
    std::vector<std::int32_t> send(at(place_.tensors)), received(send.size());
    for (std::size_t r = 0; r < send.size(); ++r) {
      send[r] = place_.tensor * 10 + static_cast<std::int32_t>(r);
    }
    ctx.tensor->all_to_all(of(send), of(received));
    for (std::size_t r = 0; r < send.size(); ++r) {
      EXPECT_EQ(received[r], static_cast<std::int32_t>(r) * 10 + place_.tensor);
    }
    if (faulty(ctx, Fault::kTooFew)) return;
    std::vector<float> sums = floats_of(x[0]);
    if (faulty(ctx, Fault::kOtherBytes)) sums.pop_back();
    ctx.tensor->sum(sums);
    for (std::int64_t i = 0; i < x[0].elements(); ++i) {
      EXPECT_EQ(sums[at(static_cast<int>(i))], static_cast<float>(place_.tensors) * x[0].at(i));
    }
    if (faulty(ctx, Fault::kTooMany)) ctx.tensor->sum(sums);
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    backward_input(ctx, dy, dx);
    backward_weight(ctx, dy);
  }
  void backward_input(StageContext& ctx, Tensors dy, Tensors dx) override {
    count(ctx);
    std::vector<float> unused(at(static_cast<int>(dy[0].elements())));
    gather_doubled(ctx, dy[0], dx.empty() ? of(unused) : dx[0]);
  }
  void backward_weight(StageContext& ctx, Tensors dy) override {
    scatter(ctx, dy[0]);
    weight_->grad.at(0) += 1;
  }
  // The sum of the outputs, of which each rank adds up a part.
  void loss(StageContext& ctx, Tensors y, Tensors, double* sum) override {
    double total = 0;
    for (const float each : part_of(y[0])) total += double{each};
    if (faulty(ctx, Fault::kInLoss)) {
      std::vector<float> floats(2);
      ctx.tensor->sum(floats);
    }
    ctx.tensor->sum({&total, 1});
    *sum = total;
    if (ctx.phase != Phase::kTrain) return;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      y[0].at(i) = static_cast<float>(ctx.loss_scale);
    }
  }
  [[nodiscard]] double target_weight(Tensors targets) const override {
    return static_cast<double>(targets[0].shape()[0]);
  }

 private:
  static std::vector<float> floats_of(const Tensor& tensor) {
    return {tensor.as<float>(), tensor.as<float>() + tensor.elements()};
  }
  [[nodiscard]] std::span<const float> part_of(const Tensor& whole) const {
    const std::int64_t part = whole.elements() / place_.tensors;
    return {whole.as<const float>() + part * place_.tensor, static_cast<std::size_t>(part)};
  }
  [[nodiscard]] bool faulty(const StageContext& ctx, Fault fault) const {
    return fault_ == fault && place_.tensor + 1 == place_.tensors && ctx.micro_batch == 1 &&
           ctx.step == 2 && ctx.phase == Phase::kTrain;
  }
  void gather_doubled(StageContext& ctx, const Tensor& x, const Tensor& y) const {
    const std::span<const float> part = part_of(x);
    std::vector<float> mine;
    for (const float each : part) mine.push_back(2 * each);
    ctx.tensor->all_gather(of(mine), y);
  }
  void scatter(StageContext& ctx, const Tensor& x) const {
    std::vector<float> mine(part_of(x).size());
    ctx.tensor->reduce_scatter(x, of(mine));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i], static_cast<float>(place_.tensors) * part_of(x)[i]);
    }
  }
  void count(StageContext& ctx) const {
    double one = 1;
    if (ctx.collective == nullptr) return;
    ctx.collective->sum({&one, 1});
    EXPECT_EQ(one, replicas_);
  }

  StagePlace place_;
  int replicas_;
  Fault fault_;
  ParameterSet set_;
  Parameter* weight_;
};

struct Layout {
  const char* schedule = "1f1b";
  int depth = 1, replicas = 1, tensor = 1, chunks = 1;
};

PipelineOptions options_of(const Layout& of) {
  PipelineOptions options;
  options.shape = {.pipeline = of.depth, .replicas = of.replicas, .tensor = of.tensor};
  options.shape.micro_batches = 2;
  options.shape.micro_batch_size = 4 / of.replicas;
  options.order.schedule = of.schedule;
  options.order.chunks = of.chunks;
  options.training.optimizer = OptimizerConfig::sgd();
  return options;
}

BatchSpec batches() {
  const TensorSpec numbers{DType::kF32, {kWidth}};
  return {.inputs = {numbers}, .targets = {numbers}, .feed = Feed::kRank0};
}

// Samples of kWidth numbers, from `first` on.
std::vector<float> numbers(std::int64_t samples, int first) {
  std::vector<float> all;
  for (std::int64_t i = 0; i < samples * kWidth; ++i) {
    all.push_back(static_cast<float>(first + static_cast<int>(i) % 5));
  }
  return all;
}

Batch batch_of(const Communicator& comm, const std::vector<float>& x) {
  if (comm.rank() != 0) return {};
  const Tensor all = view(x, {static_cast<std::int64_t>(x.size()) / kWidth, kWidth});
  return {.inputs = {all}, .targets = {all}};
}

double mean_of_sums(const std::vector<float>& x) {
  double sum = 0;
  for (const float each : x) sum += double{each};
  return sum * kWidth / static_cast<double>(x.size());
}

StageFactory doubling(const Layout& of, Fault fault = Fault::kNone) {
  return [=](const StagePlace& place) -> std::unique_ptr<Stage> {
    return std::make_unique<Doubling>(place, of.replicas, fault);
  };
}

constexpr Layout kDeep{.depth = 2, .tensor = 2};
constexpr Layout kSplit{.schedule = "zb-h1", .depth = 2, .tensor = 2};
constexpr Layout kReplicas{.replicas = 2, .tensor = 2};
constexpr Layout kChunks{.schedule = "interleaved", .depth = 2, .tensor = 2, .chunks = 2};
constexpr Layout kAlone{};

// Batches of 7 samples have a micro-batch that is smaller than the others.
TEST(StageCollectivesTest, AllKindsInTrainingEvaluationAndInference) {
  for (const Layout& each : {kDeep, kSplit, kReplicas, kChunks, kAlone}) {
    SCOPED_TRACE(
        fmt::format("{} p{} d{} t{}", each.schedule, each.depth, each.replicas, each.tensor));
    const auto comm = first_ranks(each.depth * each.replicas * each.tensor);
    if (comm == nullptr) continue;
    Pipeline pipeline(*comm, doubling(each), batches(), options_of(each));
    const double factor = 1 << (each.depth * each.chunks);
    for (int step = 1; step <= 3; ++step) {
      const std::vector<float> x = numbers(step == 2 && each.replicas == 1 ? 7 : 8, step);
      EXPECT_EQ(pipeline.train_step(batch_of(*comm, x)).loss, factor * mean_of_sums(x));
      const std::vector<float> other = numbers(7, step + 1);
      EXPECT_DOUBLE_EQ(pipeline.evaluate(batch_of(*comm, other)).loss,
                       factor * mean_of_sums(other));
      const Tensors outputs = pipeline.infer(batch_of(*comm, other), {.to = 0});
      for (std::size_t i = 0; comm->rank() == 0 && i < other.size(); ++i) {
        EXPECT_EQ(outputs[0].at(static_cast<std::int64_t>(i)),
                  static_cast<float>(factor) * other[i]);
      }
    }
    pipeline.close();
  }
}

TEST(StageCollectivesTest, AnotherCollectiveThanDescribedIsNamedOnAllRanks) {
  const auto refused = [](const Layout& of, Fault fault, int stage, const std::string& part) {
    const auto comm = first_ranks(of.depth * of.replicas * of.tensor);
    if (comm == nullptr) return;
    Pipeline pipeline(*comm, doubling(of, fault), batches(), options_of(of));
    const std::vector<float> x = numbers(8, 1);
    (void)pipeline.train_step(batch_of(*comm, x));
    expect_error(ErrorCode::kUsage,
                 {fmt::format("stage {}, forward of micro-batch 1: the stage ", stage), part},
                 [&] { (void)pipeline.train_step(batch_of(*comm, x)); });
    EXPECT_FALSE(pipeline.usable());
  };
  for (const Layout& each : {kDeep, kReplicas}) {
    const bool deep = each.depth > 1;
    const int bytes = deep ? 64 : 32;  // of a micro-batch
    refused(each, Fault::kOtherKind, 0,
            fmt::format("makes a sum of {0} bytes of f32 over the tensor ranks where its "
                        "description has an all-gather of {0} bytes of f32 over the tensor ranks "
                        "(collective 1 of {1})",
                        bytes / 2, deep ? 5 : 6));
    refused(each, Fault::kOtherBytes, 0,
            fmt::format("makes a sum of {} bytes of f32 over the tensor ranks where its "
                        "description has a sum of {} bytes",
                        bytes - 4, bytes));
    if (deep) {
      refused(each, Fault::kTooFew, 0,
              "does not make a sum of 64 bytes of f32 over the tensor ranks, which its description "
              "has (collective 5 of 5)");
      refused(each, Fault::kTooMany, 0,
              "over the tensor ranks where its description has no more (5 in this action)");
    }
    refused(each, Fault::kInLoss, each.depth - 1,
            "makes a sum of 8 bytes of f32 over the tensor ranks where its description has a sum "
            "of 8 bytes of f64 over the tensor ranks (collective 6 of 6)");
  }
}

TEST(StageCollectivesTest, ASmallerMicroBatchHasTheSameWithNoMoreBytes) {
  const auto comm = first_ranks(4);
  if (comm == nullptr) return;
  Pipeline pipeline(*comm, doubling(kDeep, Fault::kGrows), batches(), options_of(kDeep));
  (void)pipeline.train_step(batch_of(*comm, numbers(8, 1)));
  expect_error(ErrorCode::kUsage,
               {"stage 0 describes other collectives of its weight gradient for a smaller "
                "micro-batch than for the largest: collective 1 is a reduce-scatter of 80 bytes of "
                "f32 over the tensor ranks, not a reduce-scatter of 64 bytes of f32"},
               [&] { (void)pipeline.train_step(batch_of(*comm, numbers(7, 1))); });
}

// --- answers ---
// Rank t of those that share the stage has x times t + 1; an answer has what all have, a column
// each.
class Columns final : public Stage, public LossStage {
 public:
  Columns(const StagePlace& place, bool faulty) : place_(place), faulty_(faulty) {}
  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> in,
                                          ComputeContext&) const override {
    return {
        .outputs = {in[0]},
        .collectives = {.answer = {{.kind = CollectiveKind::kAllGather, .bytes = in[0].bytes()}}},
        .answers = {{DType::kF32, {in[0].shape[0], place_.tensors}}}};
  }
  void forward(StageContext&, Tensors x, Tensors y) override {
    for (std::int64_t i = 0; i < x[0].elements(); ++i) {
      y[0].at(i) = x[0].at(i) * static_cast<float>(place_.tensor + 1);
    }
  }
  void answer(StageContext& ctx, Tensors outputs, Tensors answers) override {
    if (faulty_) return;
    const std::int64_t rows = outputs[0].elements(), ranks = place_.tensors;
    std::vector<float> all(static_cast<std::size_t>(rows * ranks));
    const Tensor gathered{all.data(), {DType::kF32, {ranks, rows}}};
    ctx.tensor->all_gather(outputs[0], gathered);
    for (std::int64_t i = 0; i < rows * ranks; ++i) {
      answers[0].at(i) = gathered.at(i % ranks * rows + i / ranks);
    }
  }
  void backward(StageContext&, Tensors, Tensors) override {}
  void loss(StageContext&, Tensors, Tensors, double*) override {}
  [[nodiscard]] double target_weight(Tensors) const override { return 1; }

 private:
  StagePlace place_;
  bool faulty_;
};

TEST(StageCollectivesTest, AStageWritesItsAnswers) {
  const auto infer = [](int tensors, bool faulty) {
    const auto comm = first_ranks(tensors);
    if (comm == nullptr) return;
    PipelineOptions options;
    options.shape = {.tensor = tensors, .micro_batch_size = 2};
    options.training.inference = true;
    const TensorSpec number{DType::kF32, {}};
    // A second input passes by the stage.
    Pipeline pipeline(*comm, StageFactory([&](const StagePlace& place) -> std::unique_ptr<Stage> {
      return pass_through(std::make_unique<Columns>(place, faulty), 1);
    }),
                      BatchSpec{.inputs = {number, number}, .feed = Feed::kRank0}, options);
    std::vector<float> x = {3, 1, 4, 1, 5}, other = {2, 7, 1, 8, 2};
    const TensorSpec five{DType::kF32, {5}};
    const Batch batch{.inputs = {{x.data(), five}, {other.data(), five}}};
    const auto outputs = [&] {
      return pipeline.infer(comm->rank() == 0 ? batch : Batch{}, {.to = InferOptions::kEveryRank});
    };
    if (faulty) {
      return expect_error(ErrorCode::kUsage,
                          {"the stage does not make an all-gather of 8 bytes of f32 over the "
                           "tensor ranks, which its description has (collective 1 of 1)"},
                          [&] { (void)outputs(); });
    }
    const Tensors given = outputs();
    ASSERT_EQ(given.size(), 2U);
    EXPECT_EQ(given[0].spec, (TensorSpec{DType::kF32, {5, tensors}}));
    for (std::int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(given[1].at(i), other[static_cast<std::size_t>(i)]);
      for (int t = 0; t < tensors; ++t) {
        EXPECT_EQ(given[0].at(i * tensors + t),
                  x[static_cast<std::size_t>(i)] * static_cast<float>(t + 1));
      }
    }
  };
  for (const int tensors : {1, 2, 4}) infer(tensors, false);
  infer(2, true);
}

// --- layers ---
// y = weight x, and the mean of the same of all ranks that share the stage, in each direction.
class Agreeing final : public nn::Layer {
 public:
  // `dropped`: lists that a layer may not have.
  explicit Agreeing(int tensors, StageCollectives dropped = {})
      : tensors_(tensors), dropped_(std::move(dropped)) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  [[nodiscard]] nn::LayerNeeds needs(const TensorSpec& input, ComputeContext&) const override {
    nn::LayerNeeds needs{.memory = {.gradients = 4, .scratch = at(tensors_) * input.bytes()}};
    const PlannedCollective gather{.kind = CollectiveKind::kAllGather, .bytes = input.bytes()};
    needs.collectives = {.forward = {gather},
                         .loss = dropped_.loss,
                         .backward_input = {gather, gather},
                         .backward_weight = dropped_.backward_weight};
    return needs;
  }
  void forward(nn::LayerCall& call, const Tensor& y) override { agree(call, call.x, y); }
  void backward_input(nn::LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    std::vector<float> unused(static_cast<std::size_t>(dy.elements()));
    const Tensor to = dx.data == nullptr ? of(unused) : dx;
    agree(call, dy, to);
    agree(call, to, to);
  }

 private:
  void agree(const nn::LayerCall& call, const Tensor& from, const Tensor& to) const {
    const std::int64_t count = from.elements();
    const Tensor all{call.scratch, {DType::kF32, {tensors_, count}}};
    call.stage.tensor->all_gather(from, all);
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (std::int64_t r = 0; r < tensors_; ++r) sum += all.at(r * count + i);
      to.at(i) = sum / static_cast<float>(tensors_);
    }
  }
  int tensors_;
  StageCollectives dropped_;
};

// The sum of the outputs, added up by one rank after the other.
class SharedSum final : public nn::Loss {
 public:
  // `dropped`: lists that a loss may not have.
  explicit SharedSum(int tensors, StageCollectives dropped = {})
      : tensors_(tensors), dropped_(std::move(dropped)) {}
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  [[nodiscard]] double weight(const TensorSpec&, const Tensor& targets) const override {
    return static_cast<double>(targets.elements());
  }
  [[nodiscard]] nn::LayerNeeds needs(const TensorSpec&, ComputeContext&) const override {
    nn::LayerNeeds needs;
    needs.collectives = dropped_;
    needs.collectives.forward = {{.bytes = sizeof(double), .type = DType::kF64}};
    return needs;
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor&, double* sum) override {
    double total = 0;
    for (std::int64_t i = 0; i < outputs.elements(); ++i) {
      total += double{outputs.at(i)} / tensors_;
      if (ctx.phase == Phase::kTrain) outputs.at(i) = static_cast<float>(ctx.loss_scale);
    }
    ctx.tensor->sum({&total, 1});
    *sum = total;
  }

 private:
  int tensors_;
  StageCollectives dropped_;
};

// Sequential: with recompute(), layers that make collectives keep what they keep.
std::vector<double> train_layers(Communicator& comm, const Layout& layout) {
  const auto agreeing = [&] { return nn::layer<Agreeing>("agreeing", layout.tensor); };
  const Sequential model(
      {agreeing(), nn::linear(kWidth, 3), nn::residual({agreeing()}, {nn::relu(), agreeing()}),
       nn::cut(), nn::recompute({nn::linear(3, kWidth), agreeing()})},
      nn::loss<SharedSum>("shared_sum", layout.tensor));
  // All parameters are whole, with equal gradients.
  const StageFactory make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
    return model(place.stage, place.stages);
  };
  Pipeline pipeline(comm, make, batches(), options_of(layout));
  std::vector<double> losses;
  for (int step = 1; step <= 3; ++step) {
    losses.push_back(pipeline.train_step(batch_of(comm, numbers(7, step))).loss);
    losses.push_back(pipeline.evaluate(batch_of(comm, numbers(7, step))).loss);
    losses.push_back(pipeline.train_step(batch_of(comm, numbers(8, step))).grad_norm);
  }
  return losses;
}

TEST(StageCollectivesTest, LayersAndLossesMakeThemToo) {
  std::vector<double> alone;
  for (Layout each : {Layout{.schedule = "interleaved", .chunks = 2}, kDeep, kSplit}) {
    const auto comm = first_ranks(each.depth * each.tensor);
    if (comm == nullptr) continue;
    const std::vector<double> losses = train_layers(*comm, each);
    if (comm->rank() != 0) continue;
    if (alone.empty()) alone = losses;
    EXPECT_EQ(losses, alone) << each.schedule;  // means of two equal numbers are exact
  }
}

TEST(StageCollectivesTest, ListsOfLayersAndLossesThatNothingWouldMakeAreRefused) {
  const auto comm = first_ranks(1);
  if (comm == nullptr) return;
  const std::vector<PlannedCollective> some = {{.bytes = 4}};
  const auto refused = [&](const StageCollectives& of_layer, const StageCollectives& of_loss,
                           const std::string& text) {
    const Sequential model({nn::layer<Agreeing>("agreeing", 1, of_layer)},
                           nn::loss<SharedSum>("shared_sum", 1, of_loss));
    expect_error(ErrorCode::kUsage, {text},
                 [&] { const Pipeline none(*comm, model, batches(), options_of(kAlone)); });
  };
  const std::string of_layer =
      "; legal in a layer: collectives.forward and collectives.backward_input";
  refused({.loss = some}, {}, "layer 0 (agreeing): needs() has collectives of loss" + of_layer);
  refused({.backward_weight = some}, {}, "needs() has collectives of backward_weight" + of_layer);
  const std::string of_loss = "; legal in a loss: collectives.forward";
  refused({}, {.loss = some}, "shared_sum: needs() has collectives of loss" + of_loss);
  refused({}, {.backward_input = some}, "needs() has collectives of backward_input" + of_loss);
  refused({}, {.backward_weight = some}, "needs() has collectives of backward_weight" + of_loss);
}

}  // namespace
}  // namespace sluice::testing
