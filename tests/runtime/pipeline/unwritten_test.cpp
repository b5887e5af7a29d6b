// Numbers that a stage or a layer leaves unwritten are found in its first call, on all ranks.
#include "stages/tensor/unwritten.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

// The element of y or dx that is left out; -1: none.
struct Fault {
  int y_at = -1, dx_at = -1;
};

// y = x, but for the fault.
class Gap : public Layer {
 public:
  explicit Gap(const Fault& fault) : fault_(fault) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override { copy(call.x, y, fault_.y_at); }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    copy(dy, dx, fault_.dx_at);
  }

 private:
  static void copy(const Tensor& from, const Tensor& to, int without) {
    for (std::int64_t i = 0; i < to.elements(); ++i) {
      if (i != without) to.at(i) = from.at(i);
    }
  }

  Fault fault_;
};

// y = x, and a sum over the ranks of its stage in forward().
class Summing : public Gap {
 public:
  Summing() : Gap({}) {}
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    LayerNeeds needs = Gap::needs(input, compute);
    needs.collectives.forward = {{.bytes = sizeof(double), .type = DType::kF64}};
    return needs;
  }
  void forward(LayerCall& call, const Tensor& y) override {
    double one = 1;
    call.stage.tensor->sum({&one, 1});
    Gap::forward(call, y);
  }
};

LayerSpec gap(const Fault& fault) { return layer<Gap>("gap", fault); }

struct Rows {
  std::vector<float> x = std::vector<float>(6 * 4, 0.5F), y = std::vector<float>(6 * 4, 0.25F);
  [[nodiscard]] Batch batch() const {
    return {.inputs = {view(x, {6, 4})}, .targets = {view(y, {6, 4})}};
  }
};

BatchSpec rows() { return {.inputs = {{DType::kF32, {4}}}, .targets = {{DType::kF32, {4}}}}; }

PipelineOptions options_of(int pipeline, const char* schedule, int chunks = 1) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .micro_batches = 3, .micro_batch_size = 2};
  options.order = {.schedule = schedule, .chunks = chunks};
  return options;
}

// Linear, then the layers between, then linear: cut by cost.
Sequential model_with(std::vector<LayerSpec> between) {
  std::vector<LayerSpec> all = {linear(4, 4)};
  all.insert(all.end(), between.begin(), between.end());
  all.push_back(linear(4, 4));
  return Sequential(all, mse_loss()).with_input({DType::kF32, {4}});
}

class UnwrittenTest : public ::testing::TestWithParam<int> {};

TEST_P(UnwrittenTest, ALayersGapEndsTheFirstStepOnAllRanksAndNamesTheLayer) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto found = [&](const LayerSpec& layer, const char* schedule,
                           std::initializer_list<std::string> parts) {
      Pipeline pipeline(comm, model_with({tanh(), layer}), rows(),
                        options_of(comm.size(), schedule));
      const Rows data;
      expect_error(ErrorCode::kUsage, parts, [&] { (void)pipeline.train_step(data.batch()); });
      EXPECT_FALSE(pipeline.usable());
    };
    const std::string one = " leaves 1 of the 8 numbers of its ";
    for (const char* schedule : {"gpipe", "zb-h1"}) {
      found(gap({.y_at = 6}), schedule,
            {"stage ", ", forward of micro-batch 0: layer 2 (gap):" + one +
                           "output, f32 [2, 4], unwritten, the first at [1, 2]"});
      found(gap({.dx_at = 3}), schedule,
            {"stage ", " of micro-batch 0: layer 2 (gap):" + one +
                           "input's gradient, f32 [2, 4], unwritten, the first at [0, 3]"});
    }
    found(residual({relu(), gap({.y_at = 0})}), "1f1b",
          {"layer 2 (residual): layer 1 (gap):" + one + "output"});
    found(group({gap({.dx_at = 0}), relu()}), "1f1b",
          {"layer 2.0 (gap):" + one + "input's gradient"});
  });
}

TEST_P(UnwrittenTest, AnEvaluationFindsThemToo) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    Pipeline pipeline(comm, model_with({gap({.y_at = 1})}), rows(),
                      options_of(comm.size(), "1f1b"));
    const Rows data;
    expect_error(ErrorCode::kUsage, {"forward of micro-batch 0: layer 1 (gap): leaves 1 of the 8"},
                 [&] { (void)pipeline.evaluate(data.batch()); });
  });
}

// Two tensors from stage to stage, f32 and integers, of which some stages leave parts.
class TwoTensors : public Stage, public SplitBackward, public LossStage {
 public:
  struct Options {
    Fault fault = {};
    DType second = DType::kI32;
  };
  TwoTensors(bool last, const Options& options) : last_(last), options_(options) {}
  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> in,
                                          ComputeContext& /*compute*/) const override {
    const TensorSpec first{DType::kF32, in[0].shape};
    if (last_) return {.outputs = {first}};
    return {.outputs = {
                first, {options_.second, {in[0].shape[0]}}, {DType::kF32, {in[0].shape[0], 0}}}};
  }
  void forward(StageContext& /*ctx*/, std::span<const Tensor> in,
               std::span<const Tensor> out) override {
    for (std::int64_t i = 0; i < out[0].elements(); ++i) {
      if (i != options_.fault.y_at) out[0].at(i) = in[0].at(i);
    }
    if (last_ || options_.fault.y_at == 100) return;  // an integer's gap cannot be seen
    if (options_.second == DType::kBf16) {
      for (int i = 0; i < out[1].elements(); ++i) out[1].as<Bf16>()[i] = to_bf16(1);
    } else {
      std::fill_n(out[1].as<std::int32_t>(), out[1].elements(), 7);
    }
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    backward_input(ctx, dy, dx);
  }
  void backward_input(StageContext& /*ctx*/, std::span<const Tensor> dy,
                      std::span<const Tensor> dx) override {
    if (dx.empty()) return;
    for (std::int64_t i = 0; i < dx[0].elements(); ++i) {
      if (i != options_.fault.dx_at) dx[0].at(i) = dy[0].at(i);
    }
    if (dx[1].data != nullptr && options_.fault.dx_at != 100) {
      std::fill_n(dx[1].as<Bf16>(), dx[1].elements(), to_bf16(0));
    }
  }
  void backward_weight(StageContext& /*ctx*/, std::span<const Tensor> /*dy*/) override {}
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> /*targets*/,
            double* sum) override {
    *sum = 0;
    for (float& each : y[0].floats()) {
      *sum += static_cast<double>(each);
      each = static_cast<float>(ctx.loss_scale);
    }
  }
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override {
    return static_cast<double>(targets[0].elements());
  }

 private:
  bool last_;
  Options options_;
};

StageFactory two_tensors(const TwoTensors::Options& options, int faulty) {
  return [=](int stage, int stages) {
    TwoTensors::Options mine = options;
    if (stage != faulty) mine.fault = {};
    return std::make_unique<TwoTensors>(stage + 1 == stages, mine);
  };
}

// Also where two stages of a rank hand tensors over locally.
TEST_P(UnwrittenTest, AStagesGapNamesStageMicroBatchAndTensor) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const int stages = 2 * comm.size();
    const auto step = [&](const TwoTensors::Options& options, int faulty) {
      Pipeline pipeline(comm, two_tensors(options, faulty), rows(),
                        options_of(comm.size(), "looped-bfs", 2));
      const Rows data;
      return pipeline.train_step(data.batch()).loss;
    };
    const auto found = [&](const TwoTensors::Options& options, int faulty,
                           const std::string& text) {
      expect_error(ErrorCode::kUsage, {text}, [&] { (void)step(options, faulty); });
    };
    const int last = stages - 1;
    found({.fault = {.y_at = 7}}, 0,
          "stage 0, forward of micro-batch 0: leaves 1 of the 8 numbers of output 0, f32 [2, 4], "
          "unwritten, the first at [1, 3]");
    found({.fault = {.y_at = 2}}, last,
          "stage " + std::to_string(last) + ", forward of micro-batch 0: leaves 1 of the 8");
    found({.fault = {.dx_at = 0}}, 1,
          "of micro-batch 0: leaves 1 of the 8 numbers of the gradient of input 0, f32 [2, 4], "
          "unwritten, the first at [0, 0]");
    found({.fault = {.y_at = 100}, .second = DType::kBf16}, 0,
          "leaves 2 of the 2 numbers of output 1, bf16 [2], unwritten");
    found({.fault = {.dx_at = 100}, .second = DType::kBf16}, 1,
          "leaves 2 of the 2 numbers of the gradient of input 1, bf16 [2], unwritten");
    // Right ones, and a gap between integers, whose gradients have null data.
    EXPECT_DOUBLE_EQ(step({}, 0), 0.5);
    EXPECT_DOUBLE_EQ(step({.second = DType::kBf16}, 0), 0.5);
    EXPECT_DOUBLE_EQ(step({.fault = {.y_at = 100}}, 0), 0.5);
  });
}

// y = x, and changes its input in one of its calls.
class Scribbler : public Layer {
 public:
  explicit Scribbler(bool forward) : forward_(forward) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override { copy(call.x, y, call.x, forward_); }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    copy(dy, dx, call.x, !forward_);
  }

 private:
  static void copy(const Tensor& from, const Tensor& to, const Tensor& x, bool scribbles) {
    std::copy_n(from.as<float>(), from.elements(), to.as<float>());
    if (scribbles) x.at(1) += 1;
  }

  bool forward_;
};

TEST_P(UnwrittenTest, ALayerThatChangesItsInputIsNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const bool forward : {true, false}) {
      Pipeline pipeline(comm, model_with({tanh(), layer<Scribbler>("scribbler", forward)}), rows(),
                        options_of(comm.size(), "1f1b"));
      const Rows data;
      expect_error(
          ErrorCode::kUsage,
          {" of micro-batch 0: layer 2 (scribbler): changes input 0, f32 [2, 4]; legal: to "
           "read it alone"},
          [&] { (void)pipeline.train_step(data.batch()); });
    }
  });
}

// The sum of y, or that of y^2 / 2, whose gradient is y itself; without what it leaves out.
class SumLoss : public Loss {
 public:
  struct Left {
    bool sum = false, gradient = false, squares = false;
  };
  explicit SumLoss(const Left& left) : left_(left) {}
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  [[nodiscard]] double weight(const TensorSpec& /*outputs*/,
                              const Tensor& /*targets*/) const override {
    return 1.0 / 3;  // for each of three micro-batches
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& /*targets*/,
               double* sum) override {
    double total = 0;
    for (float& y : outputs.floats()) {
      total += static_cast<double>(left_.squares ? y * y / 2 : y);
      if (ctx.phase != Phase::kTrain || left_.gradient) continue;
      y = static_cast<float>(ctx.loss_scale) * (left_.squares ? y : 1);
    }
    if (!left_.sum) *sum = total;
  }

 private:
  SumLoss::Left left_;
};

TEST_P(UnwrittenTest, ALossThatLeavesItsSumOrItsGradientUnwrittenIsNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto step = [&](const SumLoss::Left& left, bool evaluates, bool sums = false) {
      const LayerSpec last = sums ? layer<Summing>("summing") : linear(4, 4);
      const Sequential model = Sequential({linear(4, 4), tanh(), last}, loss<SumLoss>("own", left))
                                   .with_input({DType::kF32, {4}});
      Pipeline pipeline(comm, model, rows(), options_of(comm.size(), "1f1b"));
      const Rows data;
      if (evaluates) return pipeline.evaluate(data.batch()).loss;
      return pipeline.train_step(data.batch()).loss;
    };
    const std::string where =
        "stage " + std::to_string(comm.size() - 1) + ", forward of micro-batch ";
    for (const bool evaluates : {false, true}) {
      expect_error(ErrorCode::kUsage, {where + "0: loss() leaves *sum unwritten"},
                   [&] { (void)step({.sum = true, .gradient = true}, evaluates); });
    }
    for (const bool sums : {false, true}) {
      expect_error(ErrorCode::kUsage,
                   {where + "0: loss() leaves output 0, f32 [2, 4], as forward() wrote it; legal "
                            "in training: its gradient times ctx.loss_scale"},
                   [&] { (void)step({.gradient = true}, false, sums); });
    }
    (void)step({.gradient = true}, true);
    EXPECT_NE(step({}, false), 0);
    EXPECT_NE(step({.squares = true}, false), 0);
  });
}

// Passes on, and notes which calls found marks in what they are to write.
class Witness : public Layer {
 public:
  struct Calls {
    std::vector<bool> forward, backward;
  };
  explicit Witness(std::shared_ptr<Calls> calls) : calls_(std::move(calls)) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override { pass_on(call.x, y, calls_->forward); }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    pass_on(dy, dx, calls_->backward);
  }

 private:
  static void pass_on(const Tensor& from, const Tensor& to, std::vector<bool>& marked) {
    marked.push_back(find_unwritten(to).count > 0);
    std::copy_n(from.as<float>(), from.elements(), to.as<float>());
  }

  std::shared_ptr<Calls> calls_;
};

// Later calls cost nothing: nobody marks what they write.
TEST_P(UnwrittenTest, OnlyTheFirstCallsAreWatched) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto calls = std::make_shared<Witness::Calls>();  // of this rank
    Pipeline pipeline(comm, model_with({layer<Witness>("witness", calls)}), rows(),
                      options_of(comm.size(), "1f1b"));
    const Rows data;
    for (int step = 0; step < 3; ++step) (void)pipeline.train_step(data.batch());
    const bool mine = !calls->forward.empty();
    EXPECT_EQ(comm.split(mine ? 0 : 1, comm.rank())->size(), mine ? 1 : comm.size() - 1);
    if (!mine) return;
    std::vector<bool> expected(9);  // three micro-batches a step
    expected[0] = true;
    EXPECT_EQ(calls->forward, expected);
    EXPECT_EQ(calls->backward, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, UnwrittenTest, ::testing::Values(1, 2, 3));

TEST(UnwrittenNumbersTest, EveryFloatTypeHasAMarkAndIntegersHaveNone) {
  for (const DType type : {DType::kF32, DType::kF64, DType::kBf16, DType::kF16}) {
    HostTensor values{{type, {3, 2}}, std::vector<std::byte>(size_of(type) * 6)};
    EXPECT_EQ(find_unwritten(values.tensor()).count, 0) << name_of(type);
    mark_unwritten(values.tensor());
    EXPECT_EQ(find_unwritten(values.tensor()).count, 6) << name_of(type);
    std::fill_n(values.bytes.begin(), size_of(type), std::byte{0});
    const Unwritten found = find_unwritten(values.tensor());
    EXPECT_EQ(found.count, 5) << name_of(type);
    EXPECT_EQ(found.first, 1) << name_of(type);
  }
  for (const DType type : {DType::kI32, DType::kI64, DType::kU8}) {
    HostTensor values{{type, {2}}, std::vector<std::byte>(size_of(type) * 2)};
    const std::vector<std::byte> before = values.bytes;
    mark_unwritten(values.tensor());
    EXPECT_EQ(values.bytes, before) << name_of(type);
    EXPECT_EQ(find_unwritten(values.tensor()).count, 0) << name_of(type);
  }
  mark_unwritten({nullptr, {DType::kF32, {4}}});
  EXPECT_EQ(find_unwritten({nullptr, {DType::kF32, {4}}}).count, 0);
}

// The NaNs of arithmetic, conversions and libraries are no marks.
TEST(UnwrittenNumbersTest, OtherNansAreNumbersThatWereWritten) {
  const float infinity = std::numeric_limits<float>::infinity();
  float nans[] = {std::nanf(""), infinity - infinity, std::sqrt(-1.0F), 0 * infinity};
  EXPECT_EQ(find_unwritten({nans, {DType::kF32, {4}}}).count, 0);
  Bf16 rounded[] = {to_bf16(std::nanf("")), to_bf16(nans[1])};
  EXPECT_EQ(find_unwritten({rounded, {DType::kBf16, {2}}}).count, 0);
  // A mark that was only added to keeps its payload.
  float sum = 0;
  mark_unwritten({&sum, {DType::kF32, {1}}});
  sum += 3;
  EXPECT_EQ(find_unwritten({&sum, {DType::kF32, {1}}}).count, 1);
}

}  // namespace
}  // namespace sluice::testing
