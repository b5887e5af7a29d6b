// A gradient through two devices: y = 2x on the first, 3y + 5 on the second, so that the gradient
// of the outputs' sum is 6 for every x.   mpirun -n 2 gradient_across_devices [devices] Devices as
// for `sluice train --device`: "cuda,cpu" puts the first stage on a GPU. (-n 1: one.)
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

// x is a parameter, since gradients of parameters are kept. It does not look at its input.
struct Variable : nn::Layer {
  Parameter* x = nullptr;
  TensorSpec output(const TensorSpec& input) const override { return input; }
  bool runs_on_gpu() const override { return true; }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    x = &set.add(name + "x", {5, 1}, Init::constant(1));
  }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    copy_async(y.data, x->value.data, y.spec.bytes(), call.compute().stream());
  }
  void backward_input(nn::LayerCall&, const Tensor&, const Tensor&) override {}
  void backward_weight(nn::LayerCall& call, const Tensor& dy) override {
    add(call.compute(), {dy.data, {DType::kF32, {5, 1}}}, x->grad);
  }
};

// The sum of the outputs, whose targets are not used.
struct Sum : nn::Loss {
  TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  double weight(const TensorSpec&, const Tensor&) const override { return 1; }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor&, double* sum) override {
    *sum = 0;
    for (float& y : outputs.floats()) *sum += y, y = float(ctx.loss_scale);
  }
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    PipelineOptions options;
    if (argc > 1) options.devices.choices = parse_devices(argv[1]);
    const Sequential model(
        {nn::layer<Variable>("variable"), nn::linear(1, 1), nn::cut(), nn::linear(1, 1)},
        nn::loss<Sum>("sum"));
    const TensorSpec five{DType::kF32, {5, 1}};
    Pipeline pipeline(world, model, {.inputs = {five}, .targets = {five}}, options);
    auto values = pipeline.state();
    const auto set = [&](const char* name, float value) { values[name].tensor().at(0) = value; };
    set("1.weight", 2), set("1.bias", 0), set("2.weight", 3), set("2.bias", 5);
    pipeline.set_state(values);

    const std::vector<float> unused(5);
    const Batch batch{.inputs = {view(unused, {1, 5, 1})}, .targets = {view(unused, {1, 5, 1})}};
    const double sum = pipeline.forward_backward(batch).loss;
    for (const Pipeline::Owned& each : pipeline.parameters()) {
      if (each.parameter->name != "0.x") continue;
      std::vector<float> gradient(5);
      copy_async(gradient.data(), each.parameter->grad.data, 20, pipeline.compute().stream());
      pipeline.compute().stream().synchronize();
      std::printf("the sum is %g; its gradient:", sum);
      for (const float value : gradient) std::printf(" %g", value);
      std::printf("\n");
    }
  });
}
