// A small MLP in two stages learns to answer one; first naive, with whole batches, so that one rank
// waits for the other, then pipelined, with five micro-batches.   mpirun -n 2 two_stage_mlp
#include <cstdio>
#include <random>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/simulate.hpp>
using namespace sluice;

void train(World& world, const PipelineOptions& options) {
  const Sequential model({nn::linear(10, 50), nn::relu(), nn::cut(), nn::linear(50, 20), nn::relu(),
                          nn::linear(20, 1)},
                         nn::mse_loss());
  Pipeline pipeline(world, model,
                    {.inputs = {{DType::kF32, {10}}}, .targets = {{DType::kF32, {1}}}}, options);
  std::mt19937 random(1);
  std::vector<float> x(100 * 10), y(10, 1);  // 100 samples; all targets are one
  for (float& value : x) value = std::uniform_real_distribution<float>()(random);
  for (int epoch = 1; epoch <= 100; ++epoch) {
    double loss = 0;
    for (std::size_t first = 0; first < x.size(); first += 100) {
      const Batch batch{{view(std::span(x).subspan(first, 100), {10, 10})}, {view(y, {10, 1})}};
      loss += pipeline.train_step(batch).loss / 10;
    }
    if (epoch % 20 == 0 && world.rank() == 0) std::printf("epoch %3d  loss %.9f\n", epoch, loss);
  }
  const StepTimeline last = step_timeline(pipeline);
  if (world.rank() == 0) std::printf("%s\n", draw_timeline(last.schedule, last.measured).c_str());
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    PipelineOptions options{.order = {.schedule = "gpipe"}, .checks = {.trace = true}};
    options.training.optimizer = {.kind = OptimizerConfig::Kind::kSgd};
    options.training.learning_rate = {.peak = 0.01};
    for (const int micro_batches : {1, 5}) {
      options.shape = {.micro_batches = micro_batches, .micro_batch_size = 10 / micro_batches};
      train(world, options);
    }
  });
}
