// A training loop of one's own: batches that the program has, a held-out part, a learning rate that
// halves, early stopping, the best values, and answers in the end.   mpirun -n 2 own_loop
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;
using Tensors = std::span<const Tensor>;

struct Dense : Stage,
               SplitBackward,
               LossStage {  // y = w x + b, then ReLU unless it is the last stage
  ParameterSet set;
  Parameter &w, &b;
  bool last;
  Dense(int stage, int in, int out, bool is_last)
      : w(set.add(std::to_string(stage) + ".w", {out, in}, Init::uniform(1 / std::sqrt(in)))),
        b(set.add(std::to_string(stage) + ".b", {out}, Init::constant(0))),
        last(is_last) {}
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    const TensorSpec y{DType::kF32, {in[0].shape[0], b.shape[0]}};
    return {.outputs = {y}, .state_bytes_until_weight = last ? 0 : y.bytes()};
  }
  ParameterSet* parameters() override { return &set; }
  void forward(StageContext& ctx, Tensors x, Tensors y) override {
    linear_forward(ctx.compute, x[0], w.value, b.value, y[0]);
    if (last) return;
    pointwise_forward(ctx.compute, Pointwise::kRelu, y[0], y[0]);
    std::copy_n(y[0].floats().begin(), y[0].elements(), inner(ctx, y).floats().begin());
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    backward_input(ctx, dy, dx), backward_weight(ctx, dy);
  }
  // With respect to w x + b. What is kept: ReLU's outputs, then their gradients.
  Tensor inner(StageContext& ctx, Tensors dy) {
    return last ? dy[0] : Tensor{ctx.state.until_weight.data(), dy[0].spec};
  }
  void backward_input(StageContext& ctx, Tensors dy, Tensors dx) override {
    const Tensor y = inner(ctx, dy);
    if (!last) pointwise_backward(ctx.compute, Pointwise::kRelu, y, dy[0], y);  // in place
    if (!dx.empty()) linear_backward_input(ctx.compute, y, w.value, dx[0]);
  }
  void backward_weight(StageContext& ctx, Tensors dy) override {
    linear_backward_weight(ctx.compute, ctx.inputs[0], inner(ctx, dy), w.grad, b.grad);
  }
  void loss(StageContext& ctx, Tensors y, Tensors target, double* sum) override {
    mean_squared_error(ctx.compute, y[0], target[0], ctx.loss_scale, ctx.phase == Phase::kTrain,
                       sum);
  }
  double target_weight(Tensors target) const override { return double(target[0].elements()); }
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    constexpr std::size_t kSamples = 200;
    constexpr int kTrained = 150, kBatch = 20;
    std::vector<float> x(kSamples), y(kSamples);  // a sine; every rank has it, two of them use it
    for (std::size_t i = 0; i < kSamples; ++i) {
      x[i] = float(i * 61 % kSamples) / kSamples * 6 - 3;
      y[i] = std::sin(x[i]);
    }
    const auto part = [&](int first, int count) {
      const auto cut = [&](const std::vector<float>& all) {
        return view(std::span(all).subspan(std::size_t(first), std::size_t(count)), {count, 1});
      };
      return Batch{.inputs = {cut(x)}, .targets = {cut(y)}};
    };
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = kBatch / 4}};
    const BatchSpec numbers{.inputs = {{DType::kF32, {1}}}, .targets = {{DType::kF32, {1}}}};
    const StageFactory make_stage = [](int stage, int stages) {
      const bool last = stage + 1 == stages;
      return std::make_unique<Dense>(stage, stage == 0 ? 1 : 32, last ? 1 : 32, last);
    };
    Pipeline pipeline(world, make_stage, numbers, options);

    double best = std::numeric_limits<double>::infinity(), rate = 0.02;
    std::map<std::string, HostTensor> best_values;
    int worse = 0, epoch = 0;
    for (; epoch < 200 && worse < 10; ++epoch) {
      pipeline.set_learning_rate(rate);
      for (int first = 0; first < kTrained; first += kBatch) {  // the last batch has 10 samples
        pipeline.train_step(part(first, std::min(kBatch, kTrained - first)));
      }
      const double loss = pipeline.evaluate(part(kTrained, int(kSamples) - kTrained)).loss;
      worse = loss < best ? 0 : worse + 1;
      if (worse == 0) best = loss, best_values = pipeline.state();
      if (worse % 5 == 4) rate /= 2;
    }
    pipeline.set_state(best_values);
    const auto answers = pipeline.infer(part(kTrained, 3), {.to = 0});
    if (world.rank() != 0) return;
    std::printf("stopped after %d epochs, held-out loss %.6f\n", epoch, best);
    for (std::size_t i = 0; i < 3; ++i) {
      std::printf("sin(%.2f) = %.2f\n", x[kTrained + i], answers[0].floats()[i]);
    }
  });
}
