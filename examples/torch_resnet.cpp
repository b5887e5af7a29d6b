// A residual network of LibTorch in two stages learns in which direction stripes run.
//   mpirun -n 2 torch_resnet     (-n 1: both stages on one rank, the same bits)
#include <cmath>
#include <cstdio>

#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/torch.hpp>
using namespace sluice;

struct BlockImpl : torch::nn::Module {
  torch::nn::Conv2d first, second;
  torch::nn::BatchNorm2d first_norm, second_norm;
  explicit BlockImpl(int channels)
      : first(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        second(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        first_norm(channels),
        second_norm(channels) {
    register_module("first", first);
    register_module("first_norm", first_norm);
    register_module("second", second);
    register_module("second_norm", second_norm);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::relu(first_norm(first(x)));
    return torch::relu(x + second_norm(second(y)));
  }
};
TORCH_MODULE(Block);

// Makes a module on the rank that runs the stage: values then depend on seed and name alone.
std::unique_ptr<Stage> make_stage(int stage, int stages) {
  if (stages != 2) throw Error(ErrorCode::kUsage, "torch_resnet has two stages, for 1 or 2 ranks");
  if (stage == 0) {
    return torch_stage("body", [] {
      return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)),
                                   torch::nn::ReLU(), Block(8));
    });
  }
  const auto loss = [](const torch::Tensor& scores, const torch::Tensor& classes) {
    return torch::cross_entropy_loss(scores, classes, {}, torch::Reduction::Sum);
  };
  return torch_stage(
      "head",
      [] {
        return torch::nn::Sequential(Block(8), torch::nn::AdaptiveAvgPool2d(1),
                                     torch::nn::Flatten(), torch::nn::Linear(8, 4));
      },
      loss);
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    constexpr int kSamples = 128, kSide = 12, kPixels = kSide * kSide;
    std::vector<float> x;
    std::vector<std::int64_t> y;
    for (int i = 0; i < kSamples; ++i) {
      y.push_back(i % 4);  // stripes at 0, 45, 90 or 135 degrees
      const double angle = double(y.back()) * 0.785398, phase = i * 0.7;
      for (int p = 0; p < kPixels; ++p) {
        const double along = (p % kSide) * std::cos(angle) + double(p / kSide) * std::sin(angle);
        x.push_back(float(std::sin(1.3 * along + phase)));
      }
    }
    const Batch batch{.inputs = {view(x, {kSamples, 1, kSide, kSide})},
                      .targets = {view(y, {kSamples})}};
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = kSamples / 4}};
    if (world.size() == 1) options.order = {.schedule = "looped-bfs", .chunks = 2};
    options.training.learning_rate = {.peak = 1e-2};
    Pipeline pipeline(
        world, make_stage,
        {.inputs = {{DType::kF32, {1, kSide, kSide}}}, .targets = {{DType::kI64, {}}}}, options);
    for (int step = 1; step <= 30; ++step) {
      const double loss = pipeline.train_step(batch).loss;
      if (step % 10 == 0 && world.rank() == 0) std::printf("step %d  loss %.17g\n", step, loss);
    }
  });
}
