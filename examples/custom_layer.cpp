// A layer of one's own in a model of shipped ones: each column times a trained gain.
// It splits its backward in two, so every schedule runs it.   mpirun -n 2 custom_layer
#include <cmath>
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

class Gain : public nn::Layer {
 public:
  explicit Gain(std::int64_t width) : width_(width) {}
  TensorSpec output(const TensorSpec& input) const override {
    if (input.shape.rank() == 2 && input.shape[1] == width_) return input;
    throw Error(ErrorCode::kUsage, "the input is " + to_string(input) + ", not rows of " +
                                       std::to_string(width_) + " numbers");
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    gain_ = &set.add(name + "gain", {width_}, Init::constant(1));
  }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = call.x.at(i) * gain(i);
  }
  void backward_input(nn::LayerCall&, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i) * gain(i);
  }
  void backward_weight(nn::LayerCall& call, const Tensor& dy) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i)
      gain_->grad.at(i % width_) += dy.at(i) * call.x.at(i);
  }

 private:
  float gain(std::int64_t i) const { return gain_->value.at(i % width_); }
  std::int64_t width_;
  Parameter* gain_ = nullptr;
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    const Sequential model(
        {nn::linear(2, 16), nn::tanh(), nn::cut(), nn::layer<Gain>("gain", 16), nn::linear(16, 1)},
        nn::mse_loss());
    PipelineOptions options{.shape = {.micro_batches = 4, .micro_batch_size = 16},
                            .order = {.schedule = "zb-h1"}};
    options.training.learning_rate = {.peak = 0.01};
    Pipeline pipeline(world, model,
                      {.inputs = {{DType::kF32, {2}}}, .targets = {{DType::kF32, {1}}}}, options);
    std::vector<float> x, y;  // the product of two numbers on a grid
    for (int i = 0; i < 64; ++i) {
      const int row = i / 8;
      x.insert(x.end(), {float(i % 8) / 4 - 1, float(row) / 4 - 1});
      y.push_back(x[x.size() - 2] * x.back());
    }
    const Batch batch{.inputs = {view(x, {64, 2})}, .targets = {view(y, {64, 1})}};
    for (int step = 1; step <= 500; ++step) {
      const double loss = pipeline.train_step(batch).loss;
      if (step % 100 == 0 && world.rank() == 0) std::printf("step %d  loss %.6f\n", step, loss);
    }
  });
}
