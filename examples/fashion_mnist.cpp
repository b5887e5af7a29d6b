// A convolutional network tells ten kinds of clothes apart: two stages, times two replicas.
//   mpirun -n 4 fashion_mnist [epochs] [training images] [folder of the data set]
// The data set is Debian's package dataset-fashion-mnist: 60,000 images of 28 x 28 to train on
// and 10,000 to test. Rank 0 writes accuracy.svg and confusion.svg.   (-n 1 and -n 2: one replica.)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "figures.hpp"
using namespace sluice;

constexpr int kSide = 28, kPixels = kSide * kSide;
const std::vector<std::string> kClasses = {"T-shirt", "trousers", "pullover", "dress", "coat",
                                           "sandal",  "shirt",    "sneaker",  "bag",   "boot"};

// Bytes in memory; a worker makes numbers of them when a batch needs them.
struct Clothes : Dataset {
  HostTensor images, classes;
  std::int64_t count;
  bool training;
  Clothes(const std::filesystem::path& folder, const std::string& part, std::int64_t most)
      : images(read_idx(folder / (part + "-images-idx3-ubyte.gz"))),
        classes(read_idx(folder / (part + "-labels-idx1-ubyte.gz"))),
        count(std::min(most, images.spec.shape[0])),
        training(part == "train") {
    if (images.spec.shape != Shape{images.spec.shape[0], kSide, kSide} ||
        classes.spec.shape != Shape{images.spec.shape[0]}) {
      throw Error(ErrorCode::kData, folder.string() + ": not 28 x 28 images, each with a class");
    }
  }
  std::int64_t size() const override { return count; }
  BatchSpec spec() const override {
    return {.inputs = {{DType::kF32, {1, kSide, kSide}}}, .targets = {{DType::kI32, {}}}};
  }
  int class_of(std::int64_t item) const { return int(classes.bytes[std::size_t(item)]); }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    if (!targets.empty()) targets[0].as<std::int32_t>()[0] = class_of(item.index);
    if (inputs.empty()) return;
    // In training, half of the images are mirrored.
    const bool mirror = training && (philox(item.random, std::uint64_t(item.index), 0)[0] & 1) != 0;
    const std::byte* const from = images.bytes.data() + item.index * kPixels;
    for (int i = 0; i < kPixels; ++i) {
      const int column = i % kSide, first = i - column;  // of the row
      const std::byte pixel = from[first + (mirror ? kSide - 1 - column : column)];
      inputs[0].at(i) = (float(pixel) / 255 - 0.286F) / 0.353F;
    }
  }
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    const int epochs = argc > 1 ? std::stoi(argv[1]) : 6;
    const std::int64_t images = argc > 2 ? std::stoll(argv[2]) : 60'000;
    const std::filesystem::path folder = argc > 3 ? argv[3] : "/usr/share/datasets/fashion-mnist";
    const auto train = std::make_shared<Clothes>(folder, "train", images);
    const auto test = std::make_shared<Clothes>(folder, "t10k", images);

    const Sequential model =
        Sequential({nn::conv2d(1, 16, 3, {.padding = 1}), nn::batch_norm2d(16), nn::relu(),
                    nn::max_pool2d(2), nn::conv2d(16, 32, 3, {.padding = 1}), nn::batch_norm2d(32),
                    nn::relu(), nn::max_pool2d(2), nn::flatten(), nn::dropout(0.2),
                    nn::linear(32 * 7 * 7, 128), nn::relu(), nn::linear(128, 10)},
                   nn::cross_entropy_loss())
            .with_input({DType::kF32, {1, kSide, kSide}});
    const int replicas = world.size() >= 4 ? 2 : 1;
    PipelineOptions options{
        .shape = {.replicas = replicas, .micro_batches = 4 / replicas, .micro_batch_size = 32}};
    const std::int64_t steps = images / 128 * epochs;
    options.training.learning_rate = {
        .peak = 2e-3, .final_share = 0.02, .warmup = 50, .steps = std::uint64_t(steps)};
    Pipeline pipeline(world, model, train->spec(), options);
    DataLoader batches = pipeline.loader(
        train, {.batch_size = 128, .shuffle = true, .workers = 1, .drop_last = true});
    DataLoader tests = pipeline.loader(test, {.batch_size = 1000});

    const auto begin = std::chrono::steady_clock::now();
    std::vector<double> accuracy;
    std::vector<std::vector<int>> counts;
    for (int epoch = 1; epoch <= epochs; ++epoch) {
      double loss = 0;
      while (const LoadedBatch* batch = batches.next()) {
        loss += pipeline.train_step(*batch).loss / double(batches.batches());
      }
      counts.assign(10, std::vector<int>(10));
      std::int64_t right = 0, item = 0;
      while (const LoadedBatch* batch = tests.next()) {
        const auto scores = pipeline.infer(*batch, {.to = 0});
        if (scores.empty()) continue;  // rank 0 has them
        for (std::int64_t i = 0; i < scores[0].shape()[0]; ++i, ++item) {
          const float* const row = scores[0].as<float>() + 10 * i;
          const auto answer = std::max_element(row, row + 10) - row;
          ++counts[std::size_t(test->class_of(item))][std::size_t(answer)];
          right += answer == test->class_of(item) ? 1 : 0;
        }
      }
      if (world.rank() != 0) continue;
      accuracy.push_back(double(right) / double(test->size()));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      std::printf("epoch %d  loss %.4f  accuracy %.2f %%  %.0f s\n", epoch, loss,
                  100 * accuracy.back(), seconds.count());
      std::fflush(stdout);
    }
    if (world.rank() != 0) return;
    figures::curve("accuracy.svg", "right answers on the test images", accuracy);
    figures::confusion("confusion.svg", kClasses, counts);
  });
}
