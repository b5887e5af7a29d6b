// LibTorch modules as stages: a split network has the bits of the whole one under plain LibTorch.
// Each case runs on every number of ranks of the job that it can be split over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/torch.hpp>

#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/stages/prepared.hpp"

namespace sluice::testing {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

constexpr int kMicroBatches = 4;
constexpr std::int64_t kMicroBatchSize = 4, kBatch = kMicroBatches * kMicroBatchSize;
constexpr std::int64_t kPixels = 36;  // of an image of 6 x 6
constexpr int kSteps = 3;
constexpr float kRate = 0.01F;

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("conv1", conv1);
    register_module("norm1", norm1);
    register_module("conv2", conv2);
    register_module("norm2", norm2);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(x + norm2(conv2(torch::relu(norm1(conv1(x))))));
  }
  nn::Conv2d conv1{nn::Conv2dOptions(4, 4, 3).padding(1)},
      conv2{nn::Conv2dOptions(4, 4, 3).padding(1)};
  nn::BatchNorm2d norm1{4}, norm2{4};
};
TORCH_MODULE(Block);

// Layers [first, last) of a small residual network; 0, 6 is all of it. Every part is made from the
// whole network, so each has the same initial values.
nn::Sequential residual_network(int first, int last) {
  torch::manual_seed(7);
  const nn::Sequential whole(nn::Unflatten(nn::UnflattenOptions(1, {1, 6, 6})),
                             nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)), Block(), Block(),
                             nn::Flatten(), nn::Linear(4 * kPixels, 3));
  nn::Sequential part;
  for (int i = first; i < last; ++i) {
    part->push_back("layer" + std::to_string(i), *(whole->begin() + i));
  }
  return part;
}

std::vector<float> numbers(std::int64_t count, const char* site) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word =
        philox({.seed = 1, .site = hash_name(site)}, 0, static_cast<std::uint64_t>(i));
    values.push_back(to_unit(word[0]) - 0.5F);
  }
  return values;
}

struct Data {
  std::vector<float> inputs = numbers(kSteps * kBatch * kPixels, "inputs");
  std::vector<float> targets = numbers(kSteps * kBatch * 3, "targets");
  [[nodiscard]] std::unique_ptr<DataSource> source() const {
    return make_array_source(inputs, kPixels, targets, 3, kBatch);
  }
  torch::Tensor input(std::int64_t first) {
    return torch::from_blob(&inputs[static_cast<std::size_t>(first * kPixels)],
                            {kMicroBatchSize, kPixels});
  }
  torch::Tensor target(std::int64_t first) {
    return torch::from_blob(&targets[static_cast<std::size_t>(first * 3)], {kMicroBatchSize, 3});
  }
};

torch::Tensor squared_error(const torch::Tensor& y, const torch::Tensor& target) {
  return torch::mse_loss(y, target, torch::Reduction::Sum);
}

PipelineOptions options_for(int ranks, const std::string& schedule, int chunks = 1) {
  PipelineOptions options;
  options.shape = {
      .pipeline = ranks, .micro_batches = kMicroBatches, .micro_batch_size = kMicroBatchSize};
  options.order = {.schedule = schedule, .chunks = chunks};
  options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
  options.training.learning_rate = {.peak = double{kRate}};
  options.expert.evaluations = {kBatch};
  return options;
}

// Runs `body` on the first `ranks` of the job.
void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  const bool mine = world().rank() < ranks;
  const auto part = world().split(mine ? 0 : 1, world().rank());
  if (mine) body(*part);
}

std::vector<float> values_of(const torch::Tensor& tensor) {
  const torch::Tensor flat = tensor.detach().to(torch::kFloat32).reshape({-1}).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

struct Trained {
  std::vector<double> losses;
  double evaluation = 0;
  std::map<std::string, std::vector<float>> values;  // parameters and buffers
};

// Plain LibTorch: the whole network, gradients summed over micro-batches, SGD by hand.
Trained train_plainly() {
  torch::set_num_threads(1);
  Data data;
  nn::Sequential net = residual_network(0, 6);
  Trained trained;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    double sum = 0;
    net->zero_grad();
    for (int i = 0; i < kMicroBatches; ++i) {
      const std::int64_t first = step * kBatch + i * kMicroBatchSize;
      const torch::Tensor loss = squared_error(net->forward(data.input(first)), data.target(first));
      sum += loss.item<double>();
      (loss * (1.0 / (kBatch * 3))).backward();
    }
    trained.losses.push_back(sum / (kBatch * 3));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : net->parameters()) {
      parameter.sub_(parameter.grad() * kRate);
    }
  }
  net->eval();
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < kMicroBatches; ++i) {
    const std::int64_t first = i * kMicroBatchSize;
    trained.evaluation +=
        squared_error(net->forward(data.input(first)), data.target(first)).item<double>();
  }
  trained.evaluation /= kBatch * 3;
  for (const auto& item : net->named_parameters())
    trained.values[item.key()] = values_of(item.value());
  for (const auto& item : net->named_buffers())
    trained.values[item.key()] = values_of(item.value());
  return trained;
}

// The values are those of this rank's stages.
Trained train_split(Communicator& comm, const std::string& schedule, int chunks) {
  const std::vector<std::vector<int>> cuts = {{}, {0, 6}, {0, 3, 6}, {0, 2, 3, 6}, {0, 2, 3, 5, 6}};
  std::vector<nn::Sequential> nets;
  const StageFactory make_stage = [&](int stage, int stages) {
    const std::vector<int>& cut = cuts.at(static_cast<std::size_t>(stages));
    nets.push_back(residual_network(cut[static_cast<std::size_t>(stage)],
                                    cut[static_cast<std::size_t>(stage) + 1]));
    return torch_stage("", nets.back(), squared_error);
  };
  const auto source = Data().source();
  Trained trained;
  {
    Pipeline pipeline(comm, make_stage, *source, options_for(comm.size(), schedule, chunks));
    for (int step = 0; step < kSteps; ++step) {
      trained.losses.push_back(pipeline.train_step().loss);
      if (step == 0) (void)pipeline.evaluate(*source, kBatch);  // changes nothing
    }
    trained.evaluation = pipeline.evaluate(*source, kBatch).loss;
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      const std::span<float> values = owned.parameter->value.floats();
      trained.values[owned.parameter->name] = {values.begin(), values.end()};
    }
  }
  // The modules outlive the pipeline.
  for (const nn::Sequential& net : nets) {
    for (const auto& item : net->named_parameters()) {
      EXPECT_EQ(trained.values[item.key()], values_of(item.value())) << item.key();
    }
    for (const auto& item : net->named_buffers())
      trained.values[item.key()] = values_of(item.value());
  }
  return trained;
}

struct Split {
  const char* schedule;
  int ranks, chunks;
};

TEST(TorchStageTest, SplitResidualNetworkHasTheBitsOfPlainLibTorch) {
  const Trained plain = train_plainly();
  ASSERT_NE(plain.losses.back(), plain.losses.front());
  for (const Split& split : std::vector<Split>{{"gpipe", 1, 1},
                                               {"1f1b", 1, 1},
                                               {"zb-h1", 1, 1},
                                               {"interleaved", 2, 2},
                                               {"gpipe", 2, 1},
                                               {"1f1b", 2, 1},
                                               {"zb-h1", 2, 1},
                                               {"gpipe", 3, 1},
                                               {"1f1b", 3, 1},
                                               {"zb-h1", 3, 1}}) {
    if (split.ranks > world().size()) continue;
    on_ranks(split.ranks, [&](Communicator& comm) {
      const Trained trained = train_split(comm, split.schedule, split.chunks);
      EXPECT_EQ(trained.losses, plain.losses) << split.schedule << " " << split.ranks;
      EXPECT_EQ(trained.evaluation, plain.evaluation) << split.schedule << " " << split.ranks;
      for (const auto& [name, values] : trained.values) {
        EXPECT_EQ(values, plain.values.at(name)) << name << ", " << split.schedule;
      }
    });
  }
}

// Three layers with dropout, each a stage whose module is made by a function.
std::vector<double> train_dropout(Communicator& comm, const std::string& schedule, int chunks,
                                  std::uint64_t seed) {
  const StageFactory make_stage = [](int stage, int) {
    return torch_stage(
        "layer" + std::to_string(stage),
        [stage] {
          return nn::Sequential(nn::Linear(stage == 0 ? kPixels : 8, stage == 2 ? 3 : 8),
                                nn::Dropout(0.5));
        },
        squared_error);
  };
  const auto source = Data().source();
  PipelineOptions options = options_for(comm.size(), schedule, chunks);
  options.training.seed = seed;
  torch::manual_seed(static_cast<std::uint64_t>(comm.rank()) + 10);  // must not matter
  const torch::Tensor expected = torch::rand({4});
  torch::manual_seed(static_cast<std::uint64_t>(comm.rank()) + 10);
  Pipeline pipeline(comm, make_stage, *source, options);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) losses.push_back(pipeline.train_step().loss);
  losses.push_back(pipeline.evaluate(*source, kBatch).loss);
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected)) << "the program's random numbers changed";
  return losses;
}

TEST(TorchStageTest, DropoutAndInitialValuesDependOnLayerSeedAndStepAlone) {
  std::vector<double> alone;
  const auto comm = world().split(world().rank(), 0);  // every rank by itself
  alone = train_dropout(*comm, "looped-bfs", 3, 1);
  EXPECT_EQ(alone, train_dropout(*comm, "looped-bfs", 3, 1));
  EXPECT_NE(alone, train_dropout(*comm, "looped-bfs", 3, 2));
  EXPECT_NE(alone[0], alone[1]);
  if (world().size() < 3) return;
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    on_ranks(3, [&](Communicator& three) {
      EXPECT_EQ(alone, train_dropout(three, schedule, 1, 1)) << schedule;
    });
  }
}

TEST(TorchStageTest, RandomNumbersAreAFunctionOfPrefixSeedStepAndFirstSample) {
  ComputeContext compute({}, 1);
  const TensorSpec spec{DType::kF32, Shape{1, 64}};
  std::vector<float> ones(64, 1.0F);
  const Tensor input{ones.data(), spec};
  const auto mask = [&](const char* prefix, std::uint64_t seed, std::uint64_t step,
                        std::int64_t first_sample) {
    const auto stage = torch_stage(prefix, nn::Dropout(0.5));
    prepare(*stage, {.compute = &compute, .input_sizes = {{spec}}});
    std::vector<float> values(64);
    const Tensor output{values.data(), spec};
    StageContext ctx{.compute = compute, .step = step, .seed = seed, .first_sample = first_sample};
    stage->forward(ctx, {&input, 1}, {&output, 1});
    return values;
  };
  const std::vector<float> one = mask("a", 1, 1, 0);
  EXPECT_EQ(one, mask("a", 1, 1, 0));
  EXPECT_NE(one, mask("b", 1, 1, 0));
  EXPECT_NE(one, mask("a", 2, 1, 0));
  EXPECT_NE(one, mask("a", 1, 2, 0));
  EXPECT_NE(one, mask("a", 1, 1, 4));
}

// Carries its input past the layer: two outputs, and two inputs for the next stage.
struct ForkImpl : nn::Module {
  ForkImpl() { register_module("linear", linear); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    return {torch::tanh(linear(x)), x};
  }
  nn::Linear linear{kPixels, kPixels};
};
TORCH_MODULE(Fork);
struct JoinImpl : nn::Module {
  JoinImpl() { register_module("linear", linear); }
  torch::Tensor forward(const torch::Tensor& h, const torch::Tensor& x) {
    return linear(h + x * h);
  }
  nn::Linear linear{kPixels, 3};
};
TORCH_MODULE(Join);

TEST(TorchStageTest, SeveralTensorsPerEdgeHaveTheBitsOfPlainLibTorch) {
  Data data;
  const auto make = [] {
    torch::manual_seed(3);
    Fork fork;
    return std::pair(fork, Join());
  };
  auto [fork, join] = make();
  std::vector<double> losses;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    double sum = 0;
    for (int i = 0; i < kMicroBatches; ++i) {
      const std::int64_t first = step * kBatch + i * kMicroBatchSize;
      const auto [h, x] = fork->forward(data.input(first));
      const torch::Tensor loss = squared_error(join->forward(h, x), data.target(first));
      sum += loss.item<double>();
      (loss * (1.0 / (kBatch * 3))).backward();
    }
    losses.push_back(sum / (kBatch * 3));
    const torch::NoGradGuard no_grad;
    for (const auto& parameters : {fork->parameters(), join->parameters()}) {
      for (const torch::Tensor& parameter : parameters) {
        parameter.sub_(parameter.grad() * kRate);
        parameter.grad().zero_();
      }
    }
  }
  const auto source = data.source();
  for (const int ranks : {1, 2}) {
    if (ranks > world().size()) continue;
    on_ranks(ranks, [&](Communicator& comm) {
      const StageFactory make_stage = [&](int stage, int) {
        auto [own_fork, own_join] = make();
        // Join as a function of all tensors.
        return stage == 0 ? torch_stage("fork", own_fork)
                          : torch_stage("join", own_join,
                                        [](const TorchTensors& y, const TorchTensors& targets) {
                                          return squared_error(y[0], targets[0]);
                                        });
      };
      Pipeline pipeline(comm, make_stage, *source,
                        options_for(ranks, ranks == 1 ? "looped-bfs" : "zb-h1", 3 - ranks));
      for (const double loss : losses) EXPECT_EQ(pipeline.train_step().loss, loss) << ranks;
    });
  }
}

TEST(TorchStageTest, TorchScriptFileTrainsAsTheModuleThatItIs) {
  const std::filesystem::path file = std::filesystem::temp_directory_path() /
                                     ("sluice_torch_stage_" + std::to_string(::getpid()) + ".pt");
  torch::manual_seed(5);
  const nn::Linear linear(kPixels, 3);
  {
    torch::jit::Module script("linear");
    script.register_parameter("weight", linear->weight.detach().clone().requires_grad_(), false);
    script.register_parameter("bias", linear->bias.detach().clone().requires_grad_(), false);
    script.define("def forward(self, x):\n    return torch.linear(x, self.weight, self.bias)\n");
    script.save(file.string());
  }
  const auto comm = world().split(world().rank(), 0);
  const auto source = Data().source();
  const auto train = [&](const StageFactory& make_stage) {
    Pipeline pipeline(*comm, make_stage, *source, options_for(1, "zb-h1"));
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) losses.push_back(pipeline.train_step().loss);
    EXPECT_EQ(pipeline.parameters().size(), 2U);
    EXPECT_EQ(pipeline.parameters()[0].parameter->name, "net.weight");
    return losses;
  };
  EXPECT_EQ(train([&](int, int) {
              return torch_stage("net", torch::jit::load(file.string()), squared_error);
            }),
            train([&](int, int) { return torch_stage("net", linear, squared_error); }));
  std::filesystem::remove(file);
}

// Half of the targets count, by a function of the one tensor or of all.
TEST(TorchStageTest, AWeightTakesOneTensorOrAll) {
  const auto comm = world().split(world().rank(), 0);
  const auto source = Data().source();
  const nn::Linear linear(kPixels, 3);
  const auto count = [&](const TorchLoss& loss) {
    Pipeline pipeline(
        *comm, [&](int, int) { return torch_stage("net", linear, loss); }, *source,
        options_for(1, "1f1b"));
    return pipeline.evaluate(*source, kBatch);
  };
  const EvaluationReport all = count(squared_error);
  const auto half = [](const torch::Tensor& target) {
    return static_cast<double>(target.numel()) / 2;
  };
  for (const TorchLoss& loss :
       {TorchLoss(squared_error, half),
        TorchLoss(squared_error, [&](const TorchTensors& targets) { return half(targets[0]); })}) {
    const EvaluationReport some = count(loss);
    EXPECT_EQ(some.targets, all.targets / 2);
    EXPECT_EQ(some.loss, 2 * all.loss);
  }
}

TEST(TorchStageTest, FrozenNormAndFrozenParametersStayAsTheyCame) {
  const auto comm = world().split(world().rank(), 0);
  const auto source = Data().source();
  nn::Linear first(kPixels, 8), last(8, 3);
  nn::BatchNorm1d norm(8), frozen(8);
  first->weight.requires_grad_(false);
  frozen->eval();
  const nn::Sequential net(first, norm, frozen, last);
  const torch::Tensor weight = first->weight.clone(), mean = frozen->running_mean.clone();
  const StageFactory make_stage = [&](int, int) { return torch_stage("net", net, squared_error); };
  Pipeline pipeline(*comm, make_stage, *source, options_for(1, "1f1b"));
  for (int step = 0; step < kSteps; ++step) {
    (void)pipeline.train_step();
    (void)pipeline.evaluate(*source, kBatch);
  }
  EXPECT_TRUE(torch::equal(first->weight, weight));
  EXPECT_TRUE(torch::equal(frozen->running_mean, mean));
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), kSteps * kMicroBatches);
  EXPECT_EQ(pipeline.parameters().size(), 8U);  // of four modules
}

TEST(TorchStageTest, SavesHaveRunningStatisticsAndGoOnWithTheBits) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("sluice_torch_save_" + std::to_string(::getpid()));
  const auto comm = world().split(world().rank(), 0);
  const auto source = Data().source();
  nn::Sequential net = nullptr;
  const StageFactory make_stage = [&](int, int) {
    net = nn::Sequential(nn::Linear(kPixels, 8), nn::BatchNorm1d(8), nn::Linear(8, 3));
    return torch_stage("net", net, squared_error);
  };
  const auto buffers = [&] {
    std::vector<std::vector<float>> values;
    for (const torch::Tensor& buffer : net->buffers()) values.push_back(values_of(buffer));
    return values;
  };
  std::vector<double> losses;
  std::vector<std::vector<float>> expected;
  {
    Pipeline pipeline(*comm, make_stage, *source, options_for(1, "1f1b"));
    (void)pipeline.train_step();
    save_checkpoint(pipeline, {.directory = folder});
    losses = {pipeline.evaluate(*source, kBatch).loss, pipeline.train_step().loss,
              pipeline.evaluate(*source, kBatch).loss};
    expected = buffers();
  }
  Pipeline pipeline(*comm, make_stage, *source, options_for(1, "1f1b"));  // other initial values
  EXPECT_NE(pipeline.evaluate(*source, kBatch).loss, losses[0]);
  (void)load_checkpoint(pipeline, folder);
  EXPECT_EQ(pipeline.evaluate(*source, kBatch).loss, losses[0]);
  EXPECT_EQ(pipeline.train_step().loss, losses[1]);
  EXPECT_EQ(pipeline.evaluate(*source, kBatch).loss, losses[2]);
  EXPECT_EQ(buffers(), expected);
  EXPECT_EQ(expected.back(), std::vector<float>{2 * kMicroBatches});  // num_batches_tracked
  std::filesystem::remove_all(folder);
}

// With a batch of the caller, and a micro-batch of a size that comes first in infer().
TEST(TorchStageTest, InfersInEvaluationModeBetweenSteps) {
  const auto comm = world().split(world().rank(), 0);
  Data data;
  nn::Sequential net(nn::Linear(kPixels, 8), nn::BatchNorm1d(8), nn::Dropout(0.5),
                     nn::Linear(8, 3));
  const StageFactory make_stage = [&](int, int) { return torch_stage("net", net, squared_error); };
  Pipeline pipeline(
      *comm, make_stage,
      BatchSpec{.inputs = {{DType::kF32, {kPixels}}}, .targets = {{DType::kF32, {3}}}},
      options_for(1, "1f1b"));
  const auto inputs = [&](std::int64_t samples) {
    return view(
        std::span<const float>(data.inputs).first(static_cast<std::size_t>(samples * kPixels)),
        Shape{samples, kPixels});
  };
  const Tensor targets =
      view(std::span<const float>(data.targets).first(kBatch * 3), Shape{kBatch, 3});
  (void)pipeline.train_step({.inputs = {inputs(kBatch)}, .targets = {targets}});
  const std::vector<Tensor> asked = {inputs(6)};
  const std::span<const float> answer = pipeline.infer({.inputs = asked})[0].floats();
  const torch::NoGradGuard no_grad;
  net->eval();
  const TorchTensors expected = {
      net->forward(data.input(0)),
      net->forward(torch::from_blob(&data.inputs[4 * kPixels], {2, kPixels}))};
  EXPECT_EQ(values_of(torch::cat(expected)), std::vector<float>(answer.begin(), answer.end()));
  (void)pipeline.train_step({.inputs = {inputs(kBatch)}, .targets = {targets}});
  EXPECT_EQ(net->buffers().back().item<std::int64_t>(), 2 * kMicroBatches);
}

// The network's first layer, so its statistics depend on data alone.
TEST(TorchStageTest, ReplicasTakeTheMeanOfTheirRunningStatistics) {
  if (world().size() < 2) return;
  Data data;
  nn::BatchNorm1d plain[2] = {nn::BatchNorm1d(kPixels), nn::BatchNorm1d(kPixels)};
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      (void)plain[i / 2]->forward(data.input(step * kBatch + i * kMicroBatchSize));
    }
    const torch::Tensor mean = (plain[0]->running_mean + plain[1]->running_mean) / 2;
    for (nn::BatchNorm1d& norm : plain) norm->running_mean.copy_(mean);
  }
  on_ranks(2, [&](Communicator& comm) {
    torch::manual_seed(4);
    const nn::BatchNorm1d norm(kPixels);
    const nn::Sequential net(norm, nn::Linear(kPixels, 3));
    const StageFactory make_stage = [&](int, int) {
      return torch_stage("net", net, squared_error);
    };
    PipelineOptions options = options_for(1, "1f1b");
    options.shape.replicas = 2;
    options.shape.micro_batches = kMicroBatches / 2;
    options.checks.replicas_every = 1;
    const auto source = data.source();
    Pipeline pipeline(comm, make_stage, *source, options);
    for (int step = 0; step < kSteps; ++step) (void)pipeline.train_step();
    EXPECT_TRUE(torch::allclose(norm->running_mean, plain[0]->running_mean, 1e-5, 1e-7));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), kSteps * kMicroBatches / 2);
  });
}

// What the error of a pipeline of these stages says; every rank of `comm` must see one.
Error error_of(Communicator& comm, const StageFactory& make_stage) {
  const auto source = Data().source();
  try {
    Pipeline pipeline(comm, make_stage, *source, options_for(comm.size(), "gpipe"));
    for (int step = 0; step < kSteps; ++step) (void)pipeline.train_step();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error on rank " << comm.rank();
  return {ErrorCode::kInternal, "none"};
}

TEST(TorchStageTest, EveryRankSeesWhatDoesNotFit) {
  const auto comm = world().split(0, world().rank());
  const int last = comm->size() - 1;
  const auto passes = [](int stage) {
    return torch_stage("pass" + std::to_string(stage),
                       nn::Functional(+[](const torch::Tensor& x) { return x * 2; }),
                       squared_error);
  };
  const Error shape = error_of(*comm, [&](int stage, int) {
    return stage == last ? torch_stage("head", nn::Linear(35, 3), squared_error) : passes(stage);
  });
  EXPECT_EQ(shape.code(), ErrorCode::kUsage);
  EXPECT_THAT(shape.what(), HasSubstr("'head'"));
  EXPECT_THAT(shape.what(), HasSubstr("f32 [4, 36]"));
  EXPECT_THAT(shape.what(), HasSubstr("4x36 and 35x3"));

  const Error type = error_of(*comm, [&](int stage, int) {
    return stage == last
               ? torch_stage("head", nn::Functional(+[](const torch::Tensor& x) { return x > 0; }),
                             squared_error)
               : passes(stage);
  });
  EXPECT_EQ(type.code(), ErrorCode::kUsage);
  EXPECT_THAT(type.what(), HasSubstr("output 0 is of type Bool"));

  const Error index = error_of(*comm, [&](int stage, int) {
    if (stage != last) return passes(stage);
    const nn::Embedding table(2, 3);
    return torch_stage("table",
                       nn::Sequential(nn::Functional(+[](const torch::Tensor& x) {
                                        return x.select(1, 0).sign().to(torch::kInt64) * 9;
                                      }),
                                      table),
                       squared_error);
  });
  EXPECT_EQ(index.code(), ErrorCode::kData);
  EXPECT_THAT(index.what(), HasSubstr("'table'"));
  EXPECT_THAT(index.what(), HasSubstr("index out of range"));

  const Error in_place = error_of(*comm, [&](int stage, int) {
    return stage == 0
               ? torch_stage("head", nn::Sequential(nn::ReLU(nn::ReLUOptions(true))), squared_error)
               : passes(stage);
  });
  EXPECT_EQ(in_place.code(), ErrorCode::kUsage);
  EXPECT_THAT(in_place.what(), HasSubstr("in-place"));
}

TEST(TorchStageTest, DescribesShapesAndMemoryWithoutChangingTheModule) {
  nn::Sequential net = residual_network(0, 6);
  const auto stage = torch_stage("net", net, squared_error);
  const std::map<std::string, std::vector<float>> before = [&] {
    std::map<std::string, std::vector<float>> values;
    for (const auto& item : net->named_buffers()) values[item.key()] = values_of(item.value());
    return values;
  }();
  ComputeContext compute({}, 1);
  const std::vector<TensorSpec> inputs = {{DType::kF32, Shape{4, kPixels}}};
  const StageDescription description = stage->describe(inputs, compute);
  ASSERT_EQ(description.outputs.size(), 1U);
  EXPECT_EQ(to_string(description.outputs[0]), "f32 [4, 3]");
  EXPECT_TRUE(description.own_memory);
  // At least the outputs of four convolutions and four norms are kept.
  EXPECT_GE(description.state_bytes_until_weight, std::size_t{8 * 4 * 4 * kPixels * 4});
  EXPECT_TRUE(net->is_training());
  for (const auto& item : net->named_buffers())
    EXPECT_EQ(before.at(item.key()), values_of(item.value()));
}

TEST(TorchStageTest, RefusesAModuleThatAnotherStageHasTaken) {
  const auto comm = world().split(world().rank(), 0);
  const auto source = Data().source();
  const nn::Linear linear(kPixels, 3);
  const StageFactory make_stage = [&](int, int) {
    return torch_stage("net", linear, squared_error);
  };
  Pipeline first(*comm, make_stage, *source, options_for(1, "1f1b"));
  (void)first.train_step();
  Pipeline second(*comm, make_stage, *source, options_for(1, "1f1b"));
  (void)second.train_step();
  try {
    (void)first.train_step();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("net.weight has other memory"));
  }
}

TEST(TorchStageTest, RefusesParametersThatAreNotF32) {
  try {
    nn::Linear linear(2, 2);
    linear->to(torch::kFloat64);
    (void)torch_stage("wide", linear);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("'wide'"));
    EXPECT_THAT(error.what(), HasSubstr("wide.weight is of type Double"));
  }
}

}  // namespace
}  // namespace sluice::testing
