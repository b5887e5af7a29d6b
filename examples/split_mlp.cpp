// A small MLP, 10-50-20-1 with ReLU, split after the first ReLU, learns to answer one.
//   mpirun -n 2 split_mlp [micro-batches]     (-n 1: the same bits on one rank)
// 100 samples of 10 uniform inputs, mean squared error, SGD at 0.01, batches of 10, 100 epochs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <sluice/data.hpp>
#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

namespace {

using namespace sluice;
using Tensors = std::span<const Tensor>;

constexpr int kWidths[] = {10, 50, 20, 1};
constexpr int kLayers = 3;

// Layers [first, last) of the model. Keeps, per slot, every layer's output; gradients pass through
// one scratch row per layer.
class Mlp : public Stage, public LossStage {
 public:
  Mlp(int first, int last) : first_(first), last_(last) {
    for (int layer = first; layer < last; ++layer) {
      const int in = kWidths[layer], out = kWidths[layer + 1];
      const std::string name = "layers." + std::to_string(layer);
      const Init init = Init::uniform(1 / std::sqrt(double(in)));
      weights_.push_back(&set_.add(name + ".weight", Shape{out, in}, init));
      biases_.push_back(&set_.add(name + ".bias", Shape{out}, init, false));
    }
  }
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {{{DType::kF32, Shape{inputs[0].shape[0], kWidths[last_]}}}};
  }
  ParameterSet* parameters() override { return &set_; }

  void prepare(const StageSetup& setup) override {
    set_.allocate(setup.compute->memory(), setup.seed);
    rows_ = setup.input_sizes[0][0].shape[0];
    for (int layer = first_; layer < last_; ++layer) {
      outputs_.emplace_back(std::size_t(setup.slots * rows_ * kWidths[layer + 1]));
      gradients_.emplace_back(std::size_t(rows_ * kWidths[layer + 1]));
    }
  }

  void forward(StageContext& ctx, Tensors inputs, Tensors outputs) override {
    Tensor x = inputs[0];
    for (int layer = first_; layer < last_; ++layer) {
      const Tensor y = layer + 1 == last_ ? outputs[0] : kept(ctx, layer);
      const std::size_t i = std::size_t(layer - first_);
      linear_forward(ctx.compute, x, weights_[i]->value, biases_[i]->value, y);
      if (layer + 1 < kLayers) relu_forward(ctx.compute, y, y);
      x = y;
    }
    // outputs are gone after this call, and ReLU's gradient asks for its result.
    std::copy_n(outputs[0].floats().begin(), x.elements(), kept(ctx, last_ - 1).as<float>());
  }

  void backward(StageContext& ctx, Tensors grad_outputs, Tensors grad_inputs) override {
    for (int layer = last_ - 1; layer >= first_; --layer) {
      const std::size_t i = std::size_t(layer - first_);
      const Tensor dy = shaped(gradients_[i].data(), ctx.samples, layer + 1);
      if (layer + 1 == last_) {
        std::copy_n(grad_outputs[0].as<float>(), dy.elements(), dy.as<float>());
      }
      if (layer + 1 < kLayers) relu_backward(ctx.compute, kept(ctx, layer), dy, dy);
      const Tensor x = layer == first_ ? ctx.inputs[0] : kept(ctx, layer - 1);
      if (layer > first_) {
        const Tensor dx = shaped(gradients_[i - 1].data(), ctx.samples, layer);
        linear_backward_input(ctx.compute, dy, weights_[i]->value, dx);
      } else if (!grad_inputs.empty()) {
        linear_backward_input(ctx.compute, dy, weights_[i]->value, grad_inputs[0]);
      }
      linear_backward_weight(ctx.compute, x, dy, weights_[i]->grad, biases_[i]->grad);
    }
  }

  void loss(StageContext& ctx, Tensors outputs, Tensors targets, double* sum) override {
    mean_squared_error(ctx.compute, outputs[0], targets[0], ctx.loss_scale,
                       ctx.phase == Phase::kTrain, sum);
  }
  double target_weight(Tensors targets) const override { return double(targets[0].elements()); }

 private:
  // Activations between layers: width `layer` of the model, for `samples` rows.
  static Tensor shaped(float* data, std::int64_t samples, int layer) {
    return {data, {DType::kF32, Shape{samples, kWidths[layer]}}};
  }
  Tensor kept(const StageContext& ctx, int layer) {
    float* slot = outputs_[std::size_t(layer - first_)].data() +
                  std::size_t(ctx.slot) * std::size_t(rows_ * kWidths[layer + 1]);
    return shaped(slot, ctx.samples, layer + 1);
  }

  int first_, last_;
  std::int64_t rows_ = 0;
  ParameterSet set_;
  std::vector<Parameter*> weights_, biases_;
  std::vector<std::vector<float>> outputs_, gradients_;  // [layer]
};

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](Communicator& world) {
    std::vector<float> inputs(100 * 10);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = to_unit(philox({.seed = 1, .site = hash_name("inputs")}, 0, i)[0]);
    }
    const auto data = make_array_source(inputs, 10, std::vector<float>(100, 1), 1, 10);

    PipelineOptions options;
    options.shape.micro_batches = argc > 1 ? std::atoi(argv[1]) : 5;
    options.shape.micro_batch_size =
        (10 + options.shape.micro_batches - 1) / std::max(options.shape.micro_batches, 1);
    options.shape.batch_size = 10;
    options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
    options.training.learning_rate = {.peak = 0.01};
    const StageFactory make_stage = [](int stage, int stages) -> std::unique_ptr<Stage> {
      if (stages == 1) return std::make_unique<Mlp>(0, kLayers);
      if (stages == 2) return std::make_unique<Mlp>(stage, stage == 0 ? 1 : kLayers);
      throw Error(ErrorCode::kUsage,
                  "split_mlp runs on one or two ranks, not " + std::to_string(stages));
    };
    Pipeline pipeline(world, options, make_stage, *data);
    for (int epoch = 1; epoch <= 100; ++epoch) {
      double loss = 0;
      for (int batch = 0; batch < 10; ++batch) loss += pipeline.train_step().loss / 10;
      if (epoch % 20 == 0 && world.rank() == 0) std::printf("epoch %3d  loss %.17g\n", epoch, loss);
    }
  });
}
