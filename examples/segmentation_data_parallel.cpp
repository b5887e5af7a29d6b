// Images whose pixels have classes, over replicas: each computes on its share, and the gradients
// are summed. They are those of one replica with the whole batch, unless a layer looks at other
// samples, as batch_norm2d() does.   mpirun -n 2 segmentation_data_parallel     (-n 4: two stages)
// A number as an argument is that of the steps in the end, 16.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

constexpr int kSamples = 16, kSide = 224, kPixels = kSide * kSide;

// A bright disc on a dark ground, with noise: class 1 within the disc.
struct Discs : Dataset {
  std::int64_t size() const override { return kSamples; }
  BatchSpec spec() const override {
    return {.inputs = {{DType::kF32, {1, kSide, kSide}}},
            .targets = {{DType::kI32, {kSide, kSide}}}};
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    const RandomKey key{.seed = 7};
    const int centre = 60 + int(item.index) * 7, radius = 30 + int(item.index) * 2;
    for (int i = 0; i < kPixels; ++i) {
      const int x = i % kSide - centre, y = i / kSide - kSide / 2;
      const bool inside = x * x + y * y < radius * radius;
      const float noise = to_unit(philox(key, std::uint64_t(item.index), std::uint64_t(i))[0]);
      if (!inputs.empty()) inputs[0].at(i) = (inside ? 1.0F : 0.5F) * noise;
      if (!targets.empty()) targets[0].as<std::int32_t>()[i] = inside ? 1 : 0;
    }
  }
};

// Gradients of the mean over the batch by name, on every rank that has the parameter; and the loss
// after `steps` steps.
struct Trained {
  std::map<std::string, std::vector<float>> gradients;
  double loss = 0;
};

Trained train(World& ranks, const nn::LayerSpec& norm, int micro_batch_size, int steps) {
  const Sequential model({nn::conv2d(1, 8, 3, {.padding = 1}), norm, nn::relu(),
                          nn::conv2d(8, 8, 3, {.padding = 1}), nn::relu(), nn::conv2d(8, 2, 1)},
                         nn::cross_entropy_loss({.axis = 1}));
  const int replicas = std::min(ranks.size(), 2);
  PipelineOptions options{.shape = {.replicas = replicas,
                                    .micro_batches = kSamples / replicas / micro_batch_size,
                                    .micro_batch_size = micro_batch_size}};
  options.training.learning_rate = {.peak = 0.01};
  const auto data = std::make_shared<Discs>();
  Pipeline pipeline(ranks, model.with_input(data->spec().inputs[0]), data->spec(), options);
  DataLoader loader = pipeline.loader(data, {.batch_size = kSamples});
  Trained result;
  result.loss = pipeline.forward_backward(*loader.next()).loss;
  for (const Pipeline::Owned& each : pipeline.parameters()) {
    const auto gradient = each.parameter->grad.floats();
    result.gradients[each.parameter->name] = {gradient.begin(), gradient.end()};
  }
  pipeline.optimizer_step();
  for (int step = 1; step < steps;) {
    const LoadedBatch* const batch = loader.next();
    if (batch == nullptr) continue;  // the end of an epoch
    result.loss = pipeline.train_step(*batch).loss;
    ++step;
  }
  return result;
}

// max |a - b| / max |b| over all gradients that this rank has of both.
double difference(const Trained& a, const Trained& b) {
  double off = 0, largest = 0;
  for (const auto& [name, values] : a.gradients) {
    const std::vector<float>& others = b.gradients.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      off = std::max(off, std::abs(double(values[i]) - double(others[i])));
      largest = std::max(largest, std::abs(double(others[i])));
    }
  }
  return off / largest;
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    const int steps = argc > 1 ? std::stoi(argv[1]) : 16;
    const auto alone = world.split(world.rank(), 0);  // a communicator of this rank only
    const auto compare = [&](const char* words, const nn::LayerSpec& norm, int mine, int whole) {
      const Trained replicas = train(world, norm, mine, 1);
      if (world.rank() != 0) return;
      const Trained one = train(*alone, norm, whole, 1);
      std::printf("%-50s %.1e\n", words, difference(replicas, one));
    };
    const int replicas = std::min(world.size(), 2), share = kSamples / replicas;
    if (world.rank() == 0) std::printf("gradients of %d replicas against one\n", replicas);
    compare("group_norm, micro-batches of 2", nn::group_norm(2, 8), 2, 2);
    // The trap: a replica takes the statistics of its own samples.
    compare("batch_norm2d, each share as one micro-batch", nn::batch_norm2d(8), share, kSamples);
    // Out of it: statistics of micro-batches, which are the same in both, or of all replicas.
    compare("batch_norm2d, micro-batches of 2", nn::batch_norm2d(8), 2, 2);
    compare("batch_norm2d over replicas, each share as above",
            nn::batch_norm2d(8, {.statistics = nn::BatchStatistics::kReplicas}), share, kSamples);
    const double loss = train(world, nn::group_norm(2, 8), 2, steps).loss;
    if (world.rank() == 0) std::printf("loss after %d steps %.4f\n", steps, loss);
  });
}
