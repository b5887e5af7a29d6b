// 16 samples of 5 numbers pass four stages in four micro-batches, two of the stages only hand them
// on: GPipe's picture, as planned and as it ran.   mpirun -n 4 micro_batching
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/simulate.hpp>
using namespace sluice;

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    const Sequential model = Sequential({nn::linear(5, 10), nn::linear(10, 5)}, nn::mse_loss())
                                 .with_input({DType::kF32, {5}});
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = 4},
                            .order = {.schedule = "gpipe"},
                            .checks = {.trace = true}};
    Pipeline pipeline(world, model,
                      {.inputs = {{DType::kF32, {5}}}, .targets = {{DType::kF32, {5}}}}, options);
    std::vector<float> x(16 * 5), y(16 * 5, 1);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(i) / 80;
    const Batch batch{.inputs = {view(x, {16, 5})}, .targets = {view(y, {16, 5})}};
    double loss = 0;
    for (int step = 0; step < 20; ++step) loss = pipeline.train_step(batch).loss;
    const StepTimeline last = step_timeline(pipeline);
    const auto outputs = pipeline.infer(batch, {.to = 0});
    if (world.rank() != 0) return;
    std::printf("outputs %s, loss %.6f\n\nas a grid\n%s\nplanned, from the mean times\n%s\n",
                to_string(outputs[0].spec).c_str(), loss, draw_grid(last.schedule).c_str(),
                draw_timeline(last.schedule, last.planned).c_str());
    std::printf("measured\n%s", draw_timeline(last.schedule, last.measured).c_str());
  });
}
