// A model of layers in f32, in bf16 and recomputed: its losses, the planned bytes that one rank
// keeps of a micro-batch, and steps in turns.
//   mpirun -n RANKS precision_benchmark NETWORK      NETWORK: convolutions, attention
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "tests/benchmarks/benchmark_report.hpp"

namespace {

using namespace sluice;
using namespace sluice::nn;

constexpr std::int64_t kSamples = 32, kMicroBatch = 8;
const TensorSpec kImage{DType::kF32, {3, 32, 32}};

LayerSpec block(std::int64_t in, std::int64_t out, std::int64_t stride) {
  std::vector<LayerSpec> shortcut;
  if (in != out) shortcut = {conv2d(in, out, 1, {.stride = stride}), batch_norm2d(out)};
  return residual({conv2d(in, out, 3, {.stride = stride, .padding = 1}), batch_norm2d(out), relu(),
                   conv2d(out, out, 3, {.padding = 1}), batch_norm2d(out)},
                  shortcut);
}

std::vector<LayerSpec> layers_of(const std::string& network) {
  if (network == "convolutions") {
    return {conv2d(3, 32, 3, {.padding = 1}),
            batch_norm2d(32),
            relu(),
            block(32, 32, 1),
            relu(),
            block(32, 32, 1),
            relu(),
            block(32, 64, 2),
            relu(),
            block(64, 64, 1),
            relu(),
            block(64, 128, 2),
            relu(),
            block(128, 128, 1),
            relu(),
            global_avg_pool2d(),
            linear(128, 10)};
  }
  if (network != "attention") {
    throw Error(ErrorCode::kUsage, "network '" + network + "'; legal: convolutions, attention");
  }
  std::vector<LayerSpec> layers = {unflatten({48, 64}), linear(64, 192)};
  for (int i = 0; i < 6; ++i) {
    layers.push_back(residual({layer_norm(192), attention(192, 3)}));
    layers.push_back(residual({layer_norm(192), linear(192, 768), gelu(), linear(768, 192)}));
  }
  for (const LayerSpec& each : {layer_norm(192), flatten(), linear(48 * 192, 10)}) {
    layers.push_back(each);
  }
  return layers;
}

double kept_mebibytes(const Sequential& model) {
  ComputeContext compute({}, 1);
  const TensorSpec input{DType::kF32, {kMicroBatch, 3, 32, 32}};
  const StageDescription whole = model(0, 1)->describe({&input, 1}, compute);
  return static_cast<double>(whole.state_bytes_until_input + whole.state_bytes_until_weight) /
         (1 << 20);
}

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    if (argc != 2) throw Error(ErrorCode::kUsage, "precision_benchmark NETWORK");
    constexpr DType kBf16 = DType::kBf16;
    const std::vector<std::pair<const char*, ModelOptions>> modes = {
        {"f32", {}},
        {"bf16, bf16 stream", {.precision = kBf16, .stream_precision = kBf16}},
        {"the same, recomputed",
         {.precision = kBf16, .stream_precision = kBf16, .recompute = true}}};
    std::vector<float> x(kSamples * 3 * 32 * 32);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = to_unit(philox({.seed = 5}, 0, i)[0]) - 0.5F +
             0.2F * static_cast<float>(i / 3072 % 10 * (i % 7));
    }
    std::vector<std::int32_t> y(kSamples);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 10);
    Batch batch;
    if (world.rank() == 0) {
      batch = {.inputs = {view(x, {kSamples, 3, 32, 32})}, .targets = {view(y, {kSamples})}};
    }
    PipelineOptions options;
    options.shape = {.pipeline = world.size(), .micro_batches = 4, .micro_batch_size = kMicroBatch};
    std::vector<Sequential> models;
    std::vector<std::unique_ptr<Pipeline>> pipelines;
    for (const auto& [name, how] : modes) {
      models.push_back(
          Sequential(layers_of(argv[1]), cross_entropy_loss(), how).with_input(kImage));
      const BatchSpec spec{
          .inputs = {kImage}, .targets = {{DType::kI32, {}}}, .feed = Feed::kRank0};
      pipelines.push_back(std::make_unique<Pipeline>(world, models.back(), spec, options));
    }
    std::vector<std::vector<double>> seconds(modes.size());
    std::vector<double> losses(modes.size());
    for (int step = 0; step < 15; ++step) {
      for (std::size_t m = 0; m < modes.size(); ++m) {
        const StepReport report = pipelines[m]->train_step(batch);
        if (step > 0) seconds[m].push_back(report.seconds);
        losses[m] = report.loss;
      }
    }
    for (std::size_t m = 0; m < modes.size() && world.rank() == 0; ++m) {
      std::printf("%-22s kept %6.2f MiB  loss %.9f  %6.1f ms a step\n", modes[m].first,
                  kept_mebibytes(models[m]), losses[m], 1e3 * benchmarks::median(seconds[m]));
    }
  });
}
