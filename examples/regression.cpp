// One device, no pipeline: a network learns the sum of ten numbers from noisy examples.
//   regression     (mpirun -n 2 regression: two devices, parted at cut(), the same bits)
#include <cstdio>
#include <numeric>
#include <random>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(1000 * 10), y(1000);
    for (float& value : x) value = normal(random);
    for (std::size_t i = 0; i < y.size(); ++i) {
      y[i] = std::accumulate(&x[10 * i], &x[10 * i + 10], 0.1F * normal(random));
    }
    const auto data =
        make_array_dataset({host_copy(view(x, {1000, 10}))}, {host_copy(view(y, {1000, 1}))});
    PipelineOptions options{.shape = {.micro_batch_size = 50}};
    options.training.learning_rate = {.peak = 0.01};
    const Sequential model({nn::linear(10, 50), nn::relu(), nn::cut(), nn::linear(50, 1)},
                           nn::mse_loss());
    Pipeline pipeline(world, model, data->spec(), options);
    DataLoader loader = pipeline.loader(data, {.batch_size = 50, .shuffle = true});
    for (int epoch = 1; epoch <= 100; ++epoch) {
      double loss = 0;
      while (const auto* batch = loader.next()) loss += pipeline.train_step(*batch).loss / 20;
      if (epoch % 20 == 0 && world.rank() == 0) std::printf("epoch %3d  loss %.4f\n", epoch, loss);
    }
  });
}
