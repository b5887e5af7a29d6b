// A stage of a program that several ranks share: its saves are whole, and any layout goes on from
// them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

// Shards of "second" have several blocks where two ranks share it.
constexpr int kIn = 6, kHidden = 40, kOut = 900, kSamples = 4;

float& element(const Tensor& matrix, std::int64_t row, std::int64_t column) {
  return matrix.at(row * matrix.shape()[1] + column);
}

// y = second (first x + first_bias) + last_bias, the hidden numbers divided among ranks.
class SharedStage : public Stage, public LossStage {
 public:
  explicit SharedStage(const StagePlace& place)
      : hidden_(place.slice(0, kHidden)),
        first_(add("first", {kHidden, kIn}, hidden_)),
        first_bias_(add("first_bias", {kHidden}, hidden_)),
        second_(add("second", {kOut, kHidden}, place.slice(1, kHidden))),
        last_bias_(add("last_bias", {kOut}, {})),
        seen_(set_.add_buffer("seen", {kHidden}, Init::constant(0), ReplicaRule::kMean, hidden_)) {}
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    StageDescription description{.outputs = {{DType::kF32, {in[0].shape[0], kOut}}}};
    description.collectives.forward = {
        {.bytes = at(in[0].shape[0] * kOut) * sizeof(double), .type = DType::kF64}};
    return description;
  }
  ParameterSet* parameters() override { return &set_; }
  void forward(StageContext& ctx, std::span<const Tensor> in,
               std::span<const Tensor> out) override {
    const std::vector<float> hidden = hidden_of(in[0]);
    const std::int64_t rows = rows_here();
    std::vector<double> sums(at(out[0].elements()));
    for (std::int64_t i = 0; i < out[0].elements(); ++i) {
      for (std::int64_t k = 0; k < rows; ++k) {
        sums[at(i)] +=
            double{element(second_.value, i % kOut, k)} * hidden[at(i / kOut * rows + k)];
      }
    }
    for (std::size_t i = 0; i < hidden.size(); ++i) {
      seen_.value.at(static_cast<std::int64_t>(i) % rows) += hidden[i];
    }
    ctx.tensor->sum(sums);
    for (std::int64_t i = 0; i < out[0].elements(); ++i) {
      out[0].at(i) = static_cast<float>(sums[at(i)] + double{last_bias_.value.at(i % kOut)});
    }
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad, std::span<const Tensor>) override {
    const Tensor &x = ctx.inputs[0], &dy = grad[0];
    const std::vector<float> hidden = hidden_of(x);
    const std::int64_t rows = rows_here();
    std::vector<float> of_hidden(hidden.size());
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      const std::int64_t sample = i / kOut, o = i % kOut;
      last_bias_.grad.at(o) += dy.at(i);
      for (std::int64_t k = 0; k < rows; ++k) {
        element(second_.grad, o, k) += dy.at(i) * hidden[at(sample * rows + k)];
        of_hidden[at(sample * rows + k)] += dy.at(i) * element(second_.value, o, k);
      }
    }
    for (std::int64_t i = 0; i < std::ssize(hidden); ++i) {
      first_bias_.grad.at(i % rows) += of_hidden[at(i)];
      for (std::int64_t c = 0; c < kIn; ++c) {
        element(first_.grad, i % rows, c) += of_hidden[at(i)] * element(x, i / rows, c);
      }
    }
  }
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> target,
            double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      y[0].at(i) -= target[0].at(i);
      *sum += std::pow(y[0].at(i), 2.0);
      y[0].at(i) *= static_cast<float>(2 * ctx.loss_scale);
    }
  }
  [[nodiscard]] double target_weight(std::span<const Tensor> target) const override {
    return static_cast<double>(target[0].elements());
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  Parameter& add(const char* name, const Shape& shape, const Slice& slice) {
    return set_.add(name, shape, Init::uniform(0.1), /*decay=*/true, /*tied=*/false, slice);
  }
  [[nodiscard]] std::int64_t rows_here() const { return first_bias_.shape[0]; }
  [[nodiscard]] std::vector<float> hidden_of(const Tensor& x) const {
    const std::int64_t rows = rows_here();
    std::vector<float> hidden(at(x.shape()[0] * rows));
    for (std::int64_t i = 0; i < std::ssize(hidden); ++i) {
      hidden[at(i)] = first_bias_.value.at(i % rows);
      for (std::int64_t c = 0; c < kIn; ++c) {
        hidden[at(i)] += element(first_.value, i % rows, c) * element(x, i / rows, c);
      }
    }
    return hidden;
  }

  ParameterSet set_;
  Slice hidden_;
  Parameter &first_, &first_bias_, &second_, &last_bias_, &seen_;
};

// Values of all ranks by name, put together by the coordinates of their elements.
class Wholes {
 public:
  void take(Pipeline& pipeline) {
    const std::scoped_lock lock(mutex_);
    std::map<std::string, const Parameter*> by_name;
    for (const auto& owned : {pipeline.parameters(), pipeline.buffers()}) {
      for (const Pipeline::Owned& each : owned) {
        by_name[each.parameter->name] = each.parameter;
        add(each.parameter->name, *each.parameter, each.parameter->value, 0);
      }
    }
    for (const OptimizerState& state : pipeline.optimizer_state()) {
      add(state.kind + "." + state.parameter, *by_name.at(state.parameter), state.tensor,
          state.first);
    }
  }
  [[nodiscard]] const std::map<std::string, std::vector<float>>& values() const { return values_; }

 private:
  void add(const std::string& name, const Parameter& parameter, const Tensor& tensor,
           std::int64_t first) {
    const Shape whole = parameter.whole_shape();
    const std::int64_t columns = whole.rank() == 2 ? parameter.shape[1] : 1;
    std::vector<float>& values = values_[name];
    values.resize(static_cast<std::size_t>(whole.elements()), kNone);
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      std::int64_t row = (first + i) / columns, column = (first + i) % columns;
      if (parameter.slice.axis == 0) row += parameter.slice.begin;
      if (parameter.slice.axis == 1) column += parameter.slice.begin;
      const std::int64_t all = whole.rank() == 2 ? whole[1] : 1;
      float& value = values[static_cast<std::size_t>(row * all + column)];
      EXPECT_TRUE(value == kNone || value == tensor.at(i)) << name << " element " << i;
      value = tensor.at(i);
    }
  }

  static constexpr float kNone = std::numeric_limits<float>::max();
  std::mutex mutex_;
  std::map<std::string, std::vector<float>> values_;
};

struct SharedGrid {
  int tensor = 1, replicas = 1;
  ShardLevel shard = ShardLevel::kNone;
};

class SlicedTrainingTest : public ::testing::Test {
 protected:
  void run(const SharedGrid& grid, const std::function<void(Pipeline&, Communicator&)>& body) {
    run_loopback(grid.tensor * grid.replicas, [&](Communicator& comm) {
      PipelineOptions options;
      options.shape = {.pipeline = 1,
                       .replicas = grid.replicas,
                       .tensor = grid.tensor,
                       .micro_batches = kSamples / grid.replicas,
                       .shard = grid.shard};
      options.training.optimizer = OptimizerConfig::sgd(0.9F);
      options.training.learning_rate = {.peak = 1e-2};
      options.expert.save_copy = true;
      const BatchSpec spec{.inputs = {{DType::kF32, {kIn}}},
                           .targets = {{DType::kF32, {kOut}}},
                           .feed = Feed::kRank0};
      const StageFactory make = [](const StagePlace& place) {
        return std::make_unique<SharedStage>(place);
      };
      Pipeline pipeline(comm, make, spec, options);
      body(pipeline, comm);
    });
  }
  static void train(Pipeline& pipeline, Communicator& comm, int steps) {
    std::vector<float> x(at(kSamples * kIn)), y(at(kSamples * kOut));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = std::cos(static_cast<float>(i));
    Batch batch;
    if (comm.rank() == 0) {
      batch = {.inputs = {view(x, {kSamples, kIn})}, .targets = {view(y, {kSamples, kOut})}};
    }
    for (int step = 0; step < steps; ++step) (void)pipeline.train_step(batch);
  }
  [[nodiscard]] fs::path saves(std::size_t number) const {
    return directory_.path() / std::to_string(number);
  }
  // The model's file of a save holds these wholes, under their names alone.
  static void expect_whole_model(const Save& save, const Wholes& wholes, const SharedGrid& grid) {
    SavedTensors saved(save.directory, save.state);
    saved.prefer_masters();
    const WeightsDirectory model(save.directory, "model");
    EXPECT_THAT(model.names(), ElementsAre("first", "first_bias", "last_bias", "second", "seen"));
    for (const std::string& name : model.names()) {
      std::vector<float> values(static_cast<std::size_t>(saved.find(name)->shape.elements()));
      saved.read(name, values);
      EXPECT_EQ(values, wholes.values().at(name)) << name;
    }
    EXPECT_EQ(model.find("second")->spec.shape, (Shape{kOut, kHidden}));
    EXPECT_EQ(save.state.layout.contains("tensor"), grid.tensor > 1);
  }

  TemporaryDirectory directory_;
};

TEST_F(SlicedTrainingTest, EachLayoutGoesOnFromEachOther) {
  constexpr ShardLevel kDivided = ShardLevel::kOptimizer;
  const std::vector<SharedGrid> chain = {
      {2, 1}, {1, 1},           {2, 1},           {3, 1}, {2, 2, kDivided},
      {3, 1}, {1, 2, kDivided}, {3, 2, kDivided}, {2, 2}, {1, 1}};
  Wholes wholes;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    SCOPED_TRACE(i);
    Wholes loaded;
    run(chain[i], [&](Pipeline& pipeline, Communicator& comm) {
      if (i == 0) train(pipeline, comm, 3);
      if (i > 0) {
        EXPECT_EQ(load_checkpoint(pipeline, saves(i - 1), Verify::kRead).step, 3U);
      }
      (i == 0 ? wholes : loaded).take(pipeline);
      save_checkpoint(
          pipeline, {.directory = saves(i), .precision = i % 2 == 0 ? DType::kF32 : DType::kBf16});
    });
    if (i > 0) {
      EXPECT_EQ(loaded.values(), wholes.values());
    }
    const Save save = scan_saves(saves(i)).saves.at(0);
    expect_whole_model(save, wholes, chain[i]);
  }
  EXPECT_EQ(wholes.values().size(), 9U);
  for (const auto& [name, values] : wholes.values()) {
    EXPECT_GT(std::ranges::count_if(values, [](float value) { return value != 0; }), 0) << name;
  }
}

TEST_F(SlicedTrainingTest, AResumedTrainingHasTheBitsOfOneThatGoesOn) {
  for (const SharedGrid& grid : {SharedGrid{2, 1}, SharedGrid{2, 2, ShardLevel::kOptimizer}}) {
    const fs::path path = saves(at(grid.replicas));
    Wholes whole, resumed;
    run(grid, [&](Pipeline& pipeline, Communicator& comm) {
      train(pipeline, comm, 2);
      save_checkpoint(pipeline, {.directory = path});
      train(pipeline, comm, 2);
      whole.take(pipeline);
    });
    run(grid, [&](Pipeline& pipeline, Communicator& comm) {
      (void)load_checkpoint(pipeline, path);
      train(pipeline, comm, 2);
      resumed.take(pipeline);
    });
    EXPECT_EQ(whole.values(), resumed.values());
  }
}

}  // namespace
}  // namespace sluice::testing
