// Convolution, batch normalization and ReLU, twice: half of it on each of two devices.
//   mpirun -n 2 conv_two_devices [devices]     (-n 1: one device, the same bits)
// Layers of images run on CPUs alone: "cuda,cpu" is refused, and the message names the layer.
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    const auto half = [](std::int64_t in, std::int64_t out) {
      return nn::group({nn::conv2d(in, out, 3, {.padding = 1}), nn::batch_norm2d(out), nn::relu()});
    };
    const TensorSpec image{DType::kF32, {3, 32, 32}}, features{DType::kF32, {32, 32, 32}};
    const Sequential model({half(3, 16), nn::cut(), half(16, 32)}, nn::mse_loss());
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = 2}};
    if (argc > 1) options.devices.choices = parse_devices(argv[1]);
    Pipeline pipeline(world, model, {.inputs = {image}, .targets = {features}}, options);
    std::vector<float> x(8 * 3 * 32 * 32), y(8 * 32 * 32 * 32, 0.5F);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(i % 1009) / 1009;
    const Batch batch{.inputs = {view(x, {8, 3, 32, 32})}, .targets = {view(y, {8, 32, 32, 32})}};
    for (int step = 1; step <= 10; ++step) {
      const double loss = pipeline.train_step(batch).loss;
      if (step % 5 == 0 && world.rank() == 0) std::printf("step %2d  loss %.9f\n", step, loss);
    }
    const auto outputs = pipeline.infer(batch, {.to = 0});
    if (world.rank() == 0) std::printf("outputs %s\n", to_string(outputs[0].spec).c_str());
  });
}
