// A small network of LibTorch in three layers, each a stage of its own; it learns to tell which
// half of a row of 16 numbers has the larger sum.
//   mpirun -n 3 torch_stage     (-n 1: three stages on one rank, the same bits)
#include <cstdio>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/torch.hpp>
using namespace sluice;

// Makes a module on the rank that runs the stage. It is a function, so that initial values depend
// on the seed and the layer's name alone.
std::unique_ptr<Stage> make_stage(int stage, int stages) {
  if (stages != 3) throw Error(ErrorCode::kUsage, "torch_stage runs on one or three ranks");
  const auto loss = [](const torch::Tensor& y, const torch::Tensor& target) {
    return torch::binary_cross_entropy_with_logits(y, target, {}, {}, torch::Reduction::Sum);
  };
  if (stage == 0) {
    return torch_stage("first", [] {
      return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::BatchNorm1d(32),
                                   torch::nn::ReLU());
    });
  }
  if (stage == 1) {
    return torch_stage("second", [] {
      return torch::nn::Sequential(torch::nn::Linear(32, 32), torch::nn::ReLU(),
                                   torch::nn::Dropout(0.1));
    });
  }
  return torch_stage(
      "head", [] { return torch::nn::Linear(32, 1); }, loss);
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    const int rows = 512;
    std::vector<float> inputs, targets;
    for (std::uint64_t row = 0; row < rows; ++row) {
      float difference = 0;
      for (std::uint64_t i = 0; i < 16; ++i) {
        inputs.push_back(to_unit(philox({.seed = 1}, row, i)[0]) - 0.5F);
        difference += i < 8 ? inputs.back() : -inputs.back();
      }
      targets.push_back(difference > 0 ? 1.0F : 0.0F);
    }
    const auto data = make_array_source(inputs, 16, targets, 1, 64);

    PipelineOptions options;
    options.shape = {.pipeline = world.size(), .micro_batches = 4, .micro_batch_size = 16};
    options.order.schedule = world.size() == 1 ? "looped-bfs" : "zb-h1";
    options.order.chunks = world.size() == 1 ? 3 : 1;
    options.training.learning_rate = {.peak = 1e-2};
    options.expert.evaluations = {rows};
    Pipeline pipeline(world, make_stage, *data, options);
    for (int epoch = 1; epoch <= 5; ++epoch) {
      for (int step = 0; step < rows / 64; ++step) (void)pipeline.train_step();
      const double loss = pipeline.evaluate(*data, rows).loss;
      if (world.rank() == 0) std::printf("epoch %d  loss %.17g\n", epoch, loss);
    }
  });
}
