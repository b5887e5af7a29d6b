// Training steps of a convolutional network of layers, for network_turns.py, which runs PyTorch in
// turns with it. Reads lines from standard input; each asks for one turn, and the answer is the
// seconds of a step, as the mean over the turn. Ends with the input.
//   network_benchmark NETWORK BATCH STEPS      NETWORK: clothes, wide, rows
#include <charconv>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

namespace {

using namespace sluice;
using namespace sluice::nn;

struct Network {
  TensorSpec sample;
  std::vector<LayerSpec> layers;
};

// As network_turns.py has them.
Network network(const std::string& name) {
  const ConvolutionOptions same{.padding = 1};
  if (name == "clothes") {
    return {{DType::kF32, {1, 28, 28}},
            {conv2d(1, 16, 3, same), batch_norm2d(16), relu(), max_pool2d(2),
             conv2d(16, 32, 3, same), batch_norm2d(32), relu(), max_pool2d(2), flatten(),
             linear(1568, 128), relu(), linear(128, 10)}};
  }
  if (name == "wide") {
    return {{DType::kF32, {3, 32, 32}},
            {conv2d(3, 64, 3, same), batch_norm2d(64), relu(),
             residual({conv2d(64, 64, 3, same), batch_norm2d(64), relu(), conv2d(64, 64, 3, same),
                       batch_norm2d(64)}),
             relu(), max_pool2d(2), conv2d(64, 128, 3, same), batch_norm2d(128), relu(),
             global_avg_pool2d(), linear(128, 10)}};
  }
  if (name == "rows") {
    return {{DType::kF32, {512}},
            {linear(512, 1024), relu(), linear(1024, 1024), relu(), linear(1024, 10)}};
  }
  throw Error(ErrorCode::kUsage, "network '" + name + "'; legal: clothes, wide, rows");
}

int number(const char* text) {
  int value = 0;
  const std::string_view all = text;
  const auto result = std::from_chars(all.data(), all.data() + all.size(), value);
  if (result.ec != std::errc() || result.ptr != all.data() + all.size() || value < 1) {
    throw Error(ErrorCode::kUsage, "'" + std::string(text) + "' is no number above 0");
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  return sluice::run_main(argc, argv, [&](World& world) {
    if (argc != 4) throw Error(ErrorCode::kUsage, "network_benchmark NETWORK BATCH STEPS");
    const Network net = network(argv[1]);
    const int samples = number(argv[2]), steps = number(argv[3]);
    PipelineOptions options{.shape = {.micro_batch_size = samples}};
    options.training.optimizer = OptimizerConfig::sgd(0.9F);
    options.training.learning_rate = {.peak = 0.01};
    Pipeline pipeline(world, Sequential(net.layers, cross_entropy_loss()),
                      {.inputs = {net.sample}, .targets = {{DType::kI32, {}}}}, options);
    std::vector<std::int64_t> dims = {samples};
    for (int d = 0; d < net.sample.shape.rank(); ++d) dims.push_back(net.sample.shape[d]);
    const Shape shape{std::span<const std::int64_t>(dims)};
    std::vector<float> x(static_cast<std::size_t>(shape.elements()));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 1009) / 1009;
    std::vector<std::int32_t> y;
    for (int i = 0; i < samples; ++i) y.push_back(i % 10);
    const Batch batch{.inputs = {view(x, shape)}, .targets = {view(y, {samples})}};
    std::string line;
    while (std::getline(std::cin, line)) {
      const auto begin = std::chrono::steady_clock::now();
      for (int step = 0; step < steps; ++step) (void)pipeline.train_step(batch);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      std::cout << taken.count() / steps << std::endl;
    }
  });
}
