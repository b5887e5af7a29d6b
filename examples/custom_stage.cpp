// A model of your own in two stages: stage 0 computes h = a x, stage 1 y = h + b
// and the loss (y - target)^2. It learns y = 3 x + 1.   mpirun -n 2 custom_stage
#include <cmath>
#include <cstdio>

#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;
using Tensors = std::span<const Tensor>;
// SplitBackward: schedules may part the gradients of inputs and of weights.
struct OneNumber : Stage, SplitBackward, LossStage {
  ParameterSet set;
  Parameter& p;
  const bool scales;  // stage 0
  explicit OneNumber(bool first)
      : p(set.add(first ? "a" : "b", Shape{1}, Init::constant(0))), scales(first) {}
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    return {.outputs = {in[0]}};
  }
  ParameterSet* parameters() override { return &set; }
  void forward(StageContext&, Tensors x, Tensors y) override {
    const float v = p.value.at(0);
    for (int i = 0; i < y[0].elements(); ++i) y[0].at(i) = scales ? v * x[0].at(i) : x[0].at(i) + v;
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    backward_input(ctx, dy, dx), backward_weight(ctx, dy);
  }
  void backward_input(StageContext&, Tensors dy, Tensors dx) override {
    const float slope = scales ? p.value.at(0) : 1;  // stage 0 gets no dx
    for (int i = 0; !dx.empty() && i < dx[0].elements(); ++i) dx[0].at(i) = slope * dy[0].at(i);
  }
  void backward_weight(StageContext& ctx, Tensors dy) override {
    for (int i = 0; i < dy[0].elements(); ++i)
      p.grad.at(0) += dy[0].at(i) * (scales ? ctx.inputs[0].at(i) : 1);
  }
  void loss(StageContext& ctx, Tensors y, Tensors target, double* sum) override {
    *sum = 0;
    for (int i = 0; i < y[0].elements(); ++i) {  // leaves its gradient in y
      *sum += std::pow(y[0].at(i) -= target[0].at(i), 2.0);
      y[0].at(i) *= float(2 * ctx.loss_scale);
    }
  }
  double target_weight(Tensors target) const override { return double(target[0].elements()); }
};
int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    PipelineOptions options{.shape = {.pipeline = 2, .micro_batches = 4}};
    options.training.optimizer = OptimizerConfig::sgd();
    options.training.learning_rate = {.peak = 0.2};
    const auto make_stage = [](int s, int) { return std::make_unique<OneNumber>(s == 0); };
    const BatchSpec numbers{.inputs = {{DType::kF32, {1}}}, .targets = {{DType::kF32, {1}}}};
    Pipeline pipeline(world, make_stage, numbers, options);
    const std::vector<float> x = {-1, 0, 1, 2}, y = {-2, 1, 4, 7};
    const Batch batch{.inputs = {view(x, {4, 1})}, .targets = {view(y, {4, 1})}};
    for (int step = 0; step < 100; ++step) pipeline.train_step(batch);
    const Parameter& mine = *pipeline.parameters()[0].parameter;
    std::printf("%s = %.4f\n", mine.name.c_str(), mine.value.at(0));
  });
}
