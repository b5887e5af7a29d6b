// ModelOptions: a model of any layers in bf16, recomputed or not. Half the memory, the same bits at
// every layout, and f32 for layers that know nothing of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/joined.hpp"
#include "stages/network/network_stage.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/scale_layer.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"

namespace sluice::testing {
namespace {

using namespace nn;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kSamples = 8, kSide = 16;
const TensorSpec kImage{DType::kF32, {1, kSide, kSide}};
constexpr ModelOptions kBf16Matmuls{.precision = DType::kBf16};
constexpr ModelOptions kBf16{.precision = DType::kBf16, .stream_precision = DType::kBf16};
constexpr ModelOptions kBf16Recomputed{
    .precision = DType::kBf16, .stream_precision = DType::kBf16, .recompute = true};

Sequential resnet(const ModelOptions& options = {}) {
  const auto block = [](std::int64_t in, std::int64_t out, std::int64_t stride) {
    std::vector<LayerSpec> shortcut;
    if (in != out) {
      shortcut = {conv2d(in, out, 1, {.stride = stride, .bias = false}), batch_norm2d(out)};
    }
    return residual(
        {conv2d(in, out, 3, {.stride = stride, .padding = 1, .bias = false}), batch_norm2d(out),
         relu(), conv2d(out, out, 3, {.padding = 1, .bias = false}), batch_norm2d(out)},
        shortcut);
  };
  return Sequential({conv2d(1, 8, 3, {.padding = 1, .bias = false}), batch_norm2d(8), relu(),
                     block(8, 8, 1), relu(), block(8, 8, 1), relu(), max_pool2d(2), block(8, 16, 2),
                     relu(), block(16, 16, 1), group_norm(2, 16), relu(), avg_pool2d(2),
                     global_avg_pool2d(), linear(16, 3)},
                    cross_entropy_loss({.smoothing = 0.1}), options)
      .with_input(kImage);
}

// Rows of an image are its patches.
Sequential vit(const ModelOptions& options = {}) {
  constexpr std::int64_t kWidth = 32;
  std::vector<LayerSpec> layers = {unflatten({kSide, kSide}), linear(kSide, kWidth)};
  for (int block = 0; block < 3; ++block) {
    layers.push_back(residual({layer_norm(kWidth), attention(kWidth, 4), dropout(0.1)}));
    layers.push_back(residual({layer_norm(kWidth), linear(kWidth, 4 * kWidth), gelu(),
                               linear(4 * kWidth, kWidth), dropout(0.1)}));
  }
  for (LayerSpec& each : std::vector<LayerSpec>{rms_norm(kWidth), flatten(), linear(512, 3)}) {
    layers.push_back(std::move(each));
  }
  return Sequential(std::move(layers), cross_entropy_loss(), options).with_input(kImage);
}

struct Result {
  std::vector<double> losses;
  std::string digest;
  friend bool operator==(const Result&, const Result&) = default;
};

struct Order {
  const char* schedule = "1f1b";
  int chunks = 1;
};

std::vector<float> images() {
  std::vector<float> made(kSamples * kSide * kSide);
  for (std::size_t i = 0; i < made.size(); ++i) {
    const std::size_t sample = i / (kSide * kSide);
    made[i] = to_unit(philox({.seed = 5}, 0, i)[0]) - 0.5F +
              0.3F * static_cast<float>(sample % 3) * std::sin(static_cast<float>(i));
  }
  return made;
}

Result trained(Communicator& comm, const StageFactory& model, const Order& order = {}) {
  PipelineOptions options;
  options.shape = {.pipeline = comm.size(), .micro_batches = 4, .micro_batch_size = 2};
  options.order = {.schedule = order.schedule, .chunks = order.chunks};
  options.training.learning_rate = {.peak = 1e-2};
  const std::vector<float> x = images();
  std::vector<std::int32_t> y(kSamples);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 3);
  const BatchSpec spec{.inputs = {kImage}, .targets = {{DType::kI32, {}}}, .feed = Feed::kRank0};
  Pipeline made(comm, model, spec, options);
  Batch batch;
  if (comm.rank() == 0) {
    batch = {.inputs = {view(x, {kSamples, 1, kSide, kSide})}, .targets = {view(y, {kSamples})}};
  }
  Result result;
  for (int step = 0; step < 6; ++step) result.losses.push_back(made.train_step(batch).loss);
  result.losses.push_back(made.evaluate(batch).loss);
  result.digest = digest_of(made);
  return result;
}

class PrecisionTest : public ::testing::TestWithParam<int> {};

TEST_P(PrecisionTest, PicturesInBf16HaveTheSameBitsAtEveryLayout) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    for (const auto& model : {resnet, vit}) {
      const Result wide = trained(*self, model({}));
      const Result kept = trained(*self, model(kBf16)), mixed = trained(*self, model(kBf16Matmuls));
      EXPECT_LT(kept.losses[5], 0.8 * kept.losses[0]);
      for (std::size_t step = 0; step < 6; ++step) {
        EXPECT_NEAR(kept.losses[step], wide.losses[step], 0.05) << step;
        EXPECT_NEAR(mixed.losses[step], wide.losses[step], 0.05) << step;
      }
      EXPECT_NE(kept.losses, wide.losses);
      EXPECT_EQ(trained(*self, model(kBf16Recomputed)), kept);
      EXPECT_EQ(trained(comm, model(kBf16)), kept);
      EXPECT_EQ(trained(comm, model(kBf16Matmuls), {"zb-h1"}), mixed);
      EXPECT_EQ(trained(comm, model(kBf16Recomputed)), kept);
      EXPECT_EQ(trained(comm, model(kBf16Recomputed), {"zb-h1"}), kept);
      if (comm.size() == 2) {
        EXPECT_EQ(trained(comm, model(kBf16), {"zb-v", 2}), kept);
      }
    }
  });
}

// Sums of connections, too.
TEST_P(PrecisionTest, ConnectionsCarryBf16) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const auto model = [](const ModelOptions& options) {
      const auto block = [](std::int64_t in) {
        return group({conv2d(in, 2, 3, {.padding = 1}), batch_norm2d(2), relu()});
      };
      return Sequential({block(1), block(2), block(2), block(4), skip(0, 2),
                         skip(1, 3, Join::kConcatenate), skip(0, 4), flatten(),
                         linear(2 * kSide * kSide, 3)},
                        cross_entropy_loss(), options)
          .with_input(kImage);
    };
    const Result wide = trained(*self, model({})), kept = trained(*self, model(kBf16));
    EXPECT_NEAR(kept.losses[3], wide.losses[3], 0.05);
    EXPECT_EQ(trained(comm, model(kBf16)), kept);
    EXPECT_EQ(trained(comm, model(kBf16Recomputed), {"zb-h1"}), kept);
  });
}

// Connections and sums from the model's input, and layers that take whatever comes.
TEST_P(PrecisionTest, AnyLayerCanBeTheFirst) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const std::vector<std::vector<LayerSpec>> begins = {
        {residual({conv2d(1, 1, 3, {.padding = 1})})},
        {dropout(0.1), residual({layer_norm(kSide), linear(kSide, kSide)}), skip(-1, 2)},
        {layer_norm(kSide), linear(kSide, kSide), relu(), skip(0, 2)},
        {unflatten({kSide, kSide}),
         transformer_block({.layers = 1, .heads = 2, .width = static_cast<int>(kSide)})},
        {group({conv2d(1, 1, 3, {.padding = 1}), relu()})}};
    for (const std::vector<LayerSpec>& begin : begins) {
      const auto model = [&](const ModelOptions& options) {
        std::vector<LayerSpec> layers = begin;
        for (const LayerSpec& each : {flatten(), linear(kSide * kSide, 8), relu(), linear(8, 3)}) {
          layers.push_back(each);
        }
        return Sequential(layers, cross_entropy_loss(), options).with_input(kImage);
      };
      const Result wide = trained(*self, model({})), kept = trained(*self, model(kBf16));
      EXPECT_NEAR(kept.losses[3], wide.losses[3], 0.05) << begin[0].kind;
      EXPECT_EQ(trained(*self, model(kBf16Recomputed)), kept) << begin[0].kind;
      EXPECT_EQ(trained(comm, model(kBf16)), kept) << begin[0].kind;
    }
  });
}

// A layer that takes numbers of both types, and says so.
class Halve : public Layer {
 public:
  Edges set_precision(const Precision& /*precision*/) override { return Edges::kStream; }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override { halve(call.x, y); }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    halve(dy, dx);
  }

 private:
  static void halve(const Tensor& from, const Tensor& to) {
    for (std::int64_t i = 0; i < from.elements(); ++i) {
      if (from.spec.dtype == DType::kF32) {
        to.at(i) = from.at(i) / 2;
      } else {
        to.as<Bf16>()[i] = to_bf16(to_float(from.as<Bf16>()[i]) / 2);
      }
    }
  }
};

Sequential own_layers(const ModelOptions& options) {
  return Sequential({flatten(), linear(kSide * kSide, 16), layer<Scale>("scale", 1.5), tanh(),
                     layer<Halve>("halve"), linear(16, 3)},
                    elementwise_loss("own",
                                     [](float output, float target) -> LossTerm {
                                       const double off = output - target;
                                       return {off * off / 2, off};
                                     }),
                    options)
      .with_input(kImage);
}

StageDescription described(const Sequential& model, std::int64_t samples = 4) {
  ComputeContext compute({}, 1);
  const TensorSpec input{DType::kF32, {samples, 1, kSide, kSide}};
  return model(0, 1)->describe({&input, 1}, compute);
}

TEST(PrecisionOptionsTest, ALayerThatSaysNothingComputesInF32AndTheReportNamesIt) {
  EXPECT_EQ(described(own_layers({})).note, "");
  for (const ModelOptions& options : {kBf16, kBf16Matmuls}) {
    EXPECT_EQ(described(own_layers(options)).note,
              "scale computes in f32: it does not say what it takes of bf16");
  }
  for (const auto& model : {resnet, vit}) {
    EXPECT_THAT(described(model(kBf16)).note, Not(HasSubstr("computes in f32")));
    EXPECT_THAT(described(model(kBf16Recomputed)).note, Not(HasSubstr("not recomputed")));
  }
}

TEST(PrecisionOptionsTest, OwnLayersAndLossesTrainInBf16) {
  with_ranks(2, [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const std::vector<float> x = images();
    std::vector<float> y(kSamples * 3, 0.5F);
    const auto losses = [&](Communicator& ranks, const ModelOptions& precision) {
      PipelineOptions options;
      options.shape = {.pipeline = ranks.size(), .micro_batches = 4, .micro_batch_size = 2};
      options.training.learning_rate = {.peak = 1e-2};
      Pipeline made(ranks, own_layers(precision),
                    {.inputs = {kImage}, .targets = {{DType::kF32, {3}}}, .feed = Feed::kRank0},
                    options);
      Batch batch;
      if (ranks.rank() == 0) {
        batch = {.inputs = {view(x, {kSamples, 1, kSide, kSide})},
                 .targets = {view(y, {kSamples, 3})}};
      }
      EXPECT_EQ(made.notes().size(), static_cast<std::size_t>(ranks.size()));
      const std::string notes = joined(made.notes(), "");
      const bool falls_back = notes.find("scale computes in f32") != std::string::npos;
      EXPECT_EQ(falls_back, precision.precision == DType::kBf16);
      std::vector<double> all;
      for (int step = 0; step < 4; ++step) all.push_back(made.train_step(batch).loss);
      return all;
    };
    for (const ModelOptions& options : {kBf16, kBf16Matmuls}) {
      const std::vector<double> wide = losses(*self, {}), kept = losses(*self, options);
      EXPECT_NEAR(kept[3], wide[3], 0.02 * wide[0]);
      EXPECT_EQ(losses(comm, options), kept);
    }
  });
}

// Tensors of other types are not converted, so their gradients are no copies.
template <typename From, typename To>
class Convert : public Layer {
 public:
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    return {dtype_of<To>(), input.shape};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {1}, Init::constant(1.5));
  }
  void forward(LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) {
      y.as<To>()[i] = static_cast<To>(call.x.as<From>()[i] * static_cast<From>(weight()));
    }
  }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      dx.as<From>()[i] = static_cast<From>(dy.as<To>()[i] * static_cast<To>(weight()));
    }
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      weight_->grad.at(0) +=
          static_cast<float>(dy.as<To>()[i] * static_cast<To>(call.x.as<From>()[i]));
    }
  }

 private:
  [[nodiscard]] float weight() const { return weight_->value.at(0); }
  Parameter* weight_ = nullptr;
};

// Two samples of two numbers.
Result trained_on_two(const Sequential& model, const char* schedule = "1f1b") {
  Result result;
  run_loopback(1, [&](Communicator& comm) {  // in every process of mpirun, too
    PipelineOptions options;
    options.shape = {.micro_batches = 1, .micro_batch_size = 2};
    options.order.schedule = schedule;
    options.training.optimizer = OptimizerConfig::sgd(0);
    options.training.learning_rate = {.peak = 1e-2};
    const std::vector<float> x = {0.5F, -0.25F, 0.75F, 1}, y = {1, 2, 3, 4};
    Pipeline made(comm, model, {.inputs = {{DType::kF32, {2}}}, .targets = {{DType::kF32, {2}}}},
                  options);
    const Batch batch{.inputs = {view(x, {2, 2})}, .targets = {view(y, {2, 2})}};
    for (int step = 0; step < 3; ++step) result.losses.push_back(made.train_step(batch).loss);
    result.digest = digest_of(made);
  });
  return result;
}

TEST(PrecisionOptionsTest, LayersOfDoublesHaveTheirGradients) {
  const auto model = [](const ModelOptions& options) {
    return Sequential(
        {layer<Convert<float, double>>("widen"), layer<Convert<double, double>>("scale"),
         layer<Convert<double, float>>("narrow")},
        mse_loss(), options);
  };
  const Result wide = trained_on_two(model({})), kept = trained_on_two(model(kBf16));
  EXPECT_NEAR(kept.losses[2], wide.losses[2], 0.01 * wide.losses[0]);
  EXPECT_EQ(trained_on_two(model(kBf16), "zb-h1"), kept);
}

// Writes no gradient.
class IdleLoss : public Loss {
 public:
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  [[nodiscard]] double weight(const TensorSpec& /*outputs*/, const Tensor& targets) const override {
    return static_cast<double>(targets.elements());
  }
  void compute(StageContext& /*ctx*/, const Tensor& outputs, const Tensor& /*targets*/,
               double* sum) override {
    *sum = outputs.at(0);
  }
};

class LeavesOne : public Scale {
 public:
  explicit LeavesOne(bool in_backward) : Scale(1), in_backward_(in_backward) {}
  void forward(LayerCall& call, const Tensor& y) override {
    const float had = y.at(0);
    Scale::forward(call, y);
    if (!in_backward_) y.at(0) = had;
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const float had = dx.at(0);
    Scale::backward_input(call, dy, dx);
    if (in_backward_) dx.at(0) = had;
  }

 private:
  bool in_backward_;
};

TEST(PrecisionOptionsTest, MistakesOfOwnLayersAndLossesAreFoundInBf16Too) {
  const auto refusal = [](const Sequential& model) -> std::string {
    try {
      (void)trained_on_two(model);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto leaves = [](bool in_backward, const ModelOptions& options) {
    return Sequential({linear(2, 2), layer<LeavesOne>("own", in_backward), linear(2, 2)},
                      mse_loss(), options);
  };
  const LossSpec idle = loss<IdleLoss>("idle");
  for (const ModelOptions& options : {ModelOptions{}, kBf16Matmuls, kBf16}) {
    EXPECT_THAT(refusal(leaves(false, options)),
                HasSubstr("leaves 1 of the 4 numbers of its output"));
    EXPECT_THAT(refusal(leaves(true, options)),
                HasSubstr("leaves 1 of the 4 numbers of its input's gradient"));
    EXPECT_THAT(refusal(Sequential({linear(2, 2)}, idle, options)),
                HasSubstr("as forward() wrote it; legal in training"));
  }
}

// Refuses every input.
class Picky : public Scale {
 public:
  explicit Picky(Edges edges) : Scale(1), edges_(edges) {}
  Edges set_precision(const Precision& /*precision*/) override { return edges_; }
  void check_inputs(const Tensor& x) const override {
    throw Error(ErrorCode::kData, to_string(x.spec) + " is refused");
  }

 private:
  Edges edges_;
};

TEST(PrecisionOptionsTest, TheFirstLayerLooksAtTheModelsInputBeforeAnyConversion) {
  for (const Edges edges : {Edges::kF32, Edges::kWidened, Edges::kOperands, Edges::kStream}) {
    expect_error(ErrorCode::kData, {"layer 0 (picky): f32 [1, 2] is refused"}, [&] {
      (void)trained_on_two(Sequential({layer<Picky>("picky", edges)}, mse_loss(), kBf16));
    });
  }
}

TEST(PrecisionOptionsTest, ARefusalSaysThatTheInputWasConverted) {
  expect_error(
      ErrorCode::kUsage,
      {"layer 0 (linear): the input is bf16 [1, 3]; legal: bf16 [samples, ..., 2] "
       "(converted from f32)"},
      [] {
        (void)Sequential({linear(2, 2)}, mse_loss(), kBf16Matmuls).with_input({DType::kF32, {3}});
      });
}

// What is kept of a micro-batch: the outputs of layers, and what layers keep.
std::size_t kept_bytes(const Sequential& model) {
  const StageDescription each = described(model);
  return each.state_bytes_until_input + each.state_bytes_until_weight;
}

TEST(PrecisionOptionsTest, Bf16KeepsHalfAndTakesThePlannedBytes) {
  for (const auto& model : {resnet, vit}) {
    const auto wide = static_cast<double>(kept_bytes(model({})));
    EXPECT_LE(static_cast<double>(kept_bytes(model(kBf16))), 0.6 * wide);
    EXPECT_LE(static_cast<double>(kept_bytes(model({.recompute = true}))), 0.5 * wide);
    EXPECT_LE(static_cast<double>(kept_bytes(model(kBf16Recomputed))), 0.3 * wide);
    for (const ModelOptions& options : {kBf16, kBf16Matmuls, kBf16Recomputed}) {
      for (const bool split : {false, true}) {
        const StageDescription planned = described(model(options));
        ComputeContext compute({}, 1);
        const std::unique_ptr<Stage> stage = model(options)(0, 1);
        const StateSlot slot(Device{}, planned);
        prepare(*stage, {.compute = &compute,
                         .state = slot.state(),
                         .split_backward = split,
                         .input_sizes = {{{DType::kF32, {4, 1, kSide, kSide}}}}});
        EXPECT_EQ(dynamic_cast<NetworkStage&>(*stage).prepared_bytes(),
                  planned.workspace_bytes + (split ? 0 : planned.shared_gradient_bytes));
      }
    }
  }
}

TEST(PrecisionOptionsTest, IllegalTypesAreRefused) {
  const auto refusal = [](const ModelOptions& options) -> std::string {
    try {
      (void)Sequential({relu()}, {}, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal({.precision = DType::kF16}),
              HasSubstr("legal: f32 with f32, and bf16 with f32 or bf16"));
  EXPECT_THAT(refusal({.stream_precision = DType::kBf16}), HasSubstr("precision f32 with"));
  EXPECT_EQ(refusal(kBf16), "");
}

TEST(PrecisionOptionsTest, RanksOfOneModelHaveOnePrecision) {
  with_ranks(2, [&](Communicator& comm) {
    const Sequential model = vit(comm.rank() == 0 ? kBf16Matmuls : ModelOptions{});
    try {
      (void)trained(comm, model);
      ADD_FAILURE() << "nothing was refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      EXPECT_THAT(error.what(), HasSubstr("precision bf16"));
    }
  });
}

// The precision of a transformer's configuration is that of the model.
TEST(PrecisionOptionsTest, ATransformerIsItsLayersWithItsPrecision) {
  for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
    for (const DType stream : {DType::kF32, DType::kBf16}) {
      TransformerConfig config = small_model();
      config.kind = kind;
      config.dropout = 0.1F;
      const TransformerConfig plain = config;
      config.precision = DType::kBf16;
      config.stream_precision = stream;
      const Sequential parts(transformer_layers(plain), transformer_loss(plain),
                             {.precision = DType::kBf16, .stream_precision = stream});
      with_ranks(2, [&](Communicator& comm) {
        const auto result = [&](const StageFactory& model) {
          PipelineOptions options;
          options.shape = {.pipeline = 2, .micro_batches = 2, .micro_batch_size = 2};
          const std::unique_ptr<DataSource> tokens = synthetic_tokens(config);
          Pipeline made(comm, model, *tokens, options);
          Result each;
          for (int step = 0; step < 3; ++step) each.losses.push_back(made.train_step().loss);
          each.digest = digest_of(made);
          return each;
        };
        const TensorSpec sample{DType::kI32, {config.context}};
        EXPECT_EQ(result(parts.with_input(sample)), result(Transformer(config)));
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, PrecisionTest, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace sluice::testing
