// A transformer with one part of one's own: an MLP whose activation is the square of ReLU (So et
// al., "Primer", 2021). Attention, norms, embedding and head are Sluice's, with their names in
// saves, and each block's activations are recomputed.   mpirun -n 2 own_mlp FILE (any text)
#include <algorithm>
#include <cstdio>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/transformer.hpp>
using namespace sluice;

class SquaredRelu : public nn::Layer {
 public:
  TensorSpec output(const TensorSpec& input) const override { return input; }
  nn::LayerPromises promises() const override { return {.recomputes = true}; }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = raised(call, i) * raised(call, i);
  }
  void backward_input(nn::LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = 2 * raised(call, i) * dy.at(i);
  }

 private:
  static float raised(const nn::LayerCall& call, std::int64_t i) {
    return std::max(call.x.at(i), 0.0F);
  }
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    if (argc != 2) throw Error(ErrorCode::kUsage, "usage: own_mlp FILE (any text)");
    nn::check_gradients(nn::layer<SquaredRelu>("squared_relu"), {DType::kF32, {2, 3, 4}});
    const TransformerConfig config{.layers = 2, .heads = 2, .width = 32, .context = 32};
    std::vector<nn::LayerSpec> layers = nn::transformer_layers(config);
    for (int block = 1; block <= config.layers; ++block) {  // 0 is the embedding
      nn::LayerSpec mlp =
          nn::residual({nn::layer_norm(32), nn::linear(32, 128),
                        nn::layer<SquaredRelu>("squared_relu"), nn::linear(128, 32)});
      mlp.name = "own_mlp.";  // "blocks.0.own_mlp.1.weight"
      std::vector<nn::LayerSpec>& parts = layers[static_cast<std::size_t>(block)].parts;
      parts = {nn::recompute(parts[0]), nn::recompute(mlp)};  // attention, MLP
    }
    const Sequential model = Sequential(layers, nn::transformer_loss(config))
                                 .with_input({DType::kI32, {config.context}});
    const auto data = make_token_source(std::make_shared<TokenFile>(argv[1]), 32, 256, /*seed=*/1);
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = 2}};
    options.training.learning_rate = {.peak = 3e-3};
    Pipeline pipeline(world, model, *data, options);
    for (int step = 1; step <= 20; ++step) {
      const double loss = pipeline.train_step().loss;
      if (step % 5 == 0 && world.rank() == 0) std::printf("step %d  loss %.6f\n", step, loss);
    }
  });
}
