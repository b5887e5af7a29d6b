// A model of your own in two stages: stage 0 computes h = a x, stage 1 y = h + b
// and the loss (y - target)^2. It learns y = 3 x + 1.   mpirun -n 2 custom_stage
#include <cmath>
#include <cstdio>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;
using Tensors = std::span<const Tensor>;
using Specs = std::span<const TensorSpec>;
struct OneNumber : Stage {  // what both stages share: one parameter, outputs shaped like inputs
  ParameterSet set;
  Parameter& p;
  explicit OneNumber(const char* name) : p(set.add(name, Shape{1}, Init::constant(0))) {}
  StageDescription describe(Specs in, ComputeContext&) const override { return {{in[0]}}; }
  void prepare(const StageSetup& s) override { set.allocate(s.compute->memory(), s.seed); }
  ParameterSet* parameters() override { return &set; }
};
struct Scale : OneNumber {
  Scale() : OneNumber("a") {}
  void forward(StageContext&, Tensors x, Tensors h) override {
    for (int i = 0; i < x[0].elements(); ++i) h[0].at(i) = p.value.at(0) * x[0].at(i);
  }
  void backward(StageContext& ctx, Tensors dh, Tensors) override {
    for (int i = 0; i < dh[0].elements(); ++i) p.grad.at(0) += dh[0].at(i) * ctx.inputs[0].at(i);
  }
};
struct Shift : OneNumber, LossStage {
  Shift() : OneNumber("b") {}
  void forward(StageContext&, Tensors h, Tensors y) override {
    for (int i = 0; i < h[0].elements(); ++i) y[0].at(i) = h[0].at(i) + p.value.at(0);
  }
  void loss(StageContext& ctx, Tensors y, Tensors t, double* sum) override {
    *sum = 0;
    for (int i = 0; i < y[0].elements(); ++i) {  // leaves its gradient in y
      *sum += std::pow(y[0].at(i) -= t[0].at(i), 2.0);
      y[0].at(i) *= float(2 * ctx.loss_scale);
    }
  }
  double target_weight(Tensors t) const override { return double(t[0].elements()); }
  void backward(StageContext&, Tensors dy, Tensors dh) override {
    for (int i = 0; i < dy[0].elements(); ++i) p.grad.at(0) += (dh[0].at(i) = dy[0].at(i));
  }
};
int main(int argc, char** argv) {
  return run_main(argc, argv, [](Communicator& world) {
    const auto data = make_array_source({-1, 0, 1, 2}, 1, {-2, 1, 4, 7}, 1, 4);
    PipelineOptions options{.shape = {.pipeline = 2, .micro_batches = 4}};
    options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
    options.training.learning_rate = {.peak = 0.2};
    const StageFactory make_stage = [](int stage, int) -> std::unique_ptr<Stage> {
      return stage == 0 ? std::unique_ptr<Stage>(new Scale) : std::unique_ptr<Stage>(new Shift);
    };
    Pipeline pipeline(world, options, make_stage, *data);
    for (int step = 0; step < 100; ++step) pipeline.train_step();
    const Parameter& mine = *pipeline.parameters()[0].parameter;
    std::printf("%s = %.4f\n", mine.name.c_str(), mine.value.at(0));
  });
}
