// Stages that several ranks share: each is a perceptron of two layers, y = x + B tanh(A x + a) + b,
// of which every rank has some rows of A and a and the same columns of B. So each rank computes
// some of the hidden numbers and what they add to y; the ranks add up these parts.
//   mpirun -n 2 tensor_stage         all ranks share both stages
//   mpirun -n 8 tensor_stage 2 2 2   ranks that share a stage, replicas, ranks of a pipeline
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;
using Tensors = std::span<const Tensor>;

constexpr std::int64_t kWidth = 2, kHidden = 15;  // which two ranks divide into 8 and 7

class Perceptron : public Stage, public LossStage {
 public:
  explicit Perceptron(const StagePlace& place) : first_(place.stage == 0) {
    const std::string name = place.stage == 0 ? "first." : "second.";
    const Slice rows = place.slice(0, kHidden), columns = place.slice(1, kHidden);
    // Shapes are those of the whole, and so are the initial values, whatever the slices.
    const auto add = [&](const char* part, Shape shape, double bound, const Slice& slice) {
      return &set_.add(name + part, shape, Init::uniform(bound), true, false, slice);
    };
    up_ = add("A", {kHidden, kWidth}, 1.0, rows);
    up_bias_ = add("a", {kHidden}, 1.0, rows);
    down_ = add("B", {kWidth, kHidden}, 0.25, columns);
    down_bias_ = add("b", {kWidth}, 0.25, {});  // all ranks have it, with equal gradients
  }
  ParameterSet* parameters() override { return &set_; }
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    StageDescription made{
        .outputs = {in[0]},
        .state_bytes_until_weight = std::size_t(in[0].shape[0] * hidden()) * sizeof(float)};
    // One sum in each action, of a double for each number of y, or of x.
    const PlannedCollective sum{.axis = CollectiveAxis::kTensor,
                                .kind = CollectiveKind::kSum,
                                .bytes = std::size_t(in[0].shape.elements()) * sizeof(double),
                                .type = DType::kF64};
    made.collectives.forward = {sum};
    if (!first_) made.collectives.backward_input = {sum};
    return made;
  }

  void forward(StageContext& ctx, Tensors in, Tensors out) override {
    const Tensor &x = in[0], &y = out[0];
    float* h = kept(ctx);
    std::vector<double> parts(std::size_t(y.elements()));  // of y
    for (std::int64_t s = 0; s < ctx.samples; ++s, h += hidden()) {
      for (std::int64_t r = 0; r < hidden(); ++r) {
        double sum = up_bias_->value.at(r);
        for (std::int64_t i = 0; i < kWidth; ++i) sum += up(r, i) * x.at(s * kWidth + i);
        h[r] = float(std::tanh(sum));
        for (std::int64_t i = 0; i < kWidth; ++i)
          parts[std::size_t(s * kWidth + i)] += down(i, r) * h[r];
      }
    }
    ctx.tensor->sum(parts);
    for (std::int64_t i = 0; i < y.elements(); ++i) {
      y.at(i) = float(x.at(i) + parts[std::size_t(i)] + down_bias_->value.at(i % kWidth));
    }
  }
  void backward(StageContext& ctx, Tensors grad_out, Tensors grad_in) override {
    const Tensor &x = ctx.inputs[0], &dy = grad_out[0];
    const float* h = kept(ctx);
    std::vector<double> parts(std::size_t(dy.elements()));  // of the gradient of x
    for (std::int64_t s = 0; s < ctx.samples; ++s, h += hidden()) {
      const std::int64_t at = s * kWidth;
      for (std::int64_t r = 0; r < hidden(); ++r) {
        double dh = 0;
        for (std::int64_t i = 0; i < kWidth; ++i) {
          dh += down(i, r) * dy.at(at + i);
          down_->grad.at(i * hidden() + r) += dy.at(at + i) * h[r];
        }
        dh *= 1 - double(h[r]) * h[r];
        up_bias_->grad.at(r) += float(dh);
        for (std::int64_t i = 0; i < kWidth; ++i) {
          up_->grad.at(r * kWidth + i) += float(dh * x.at(at + i));
          parts[std::size_t(at + i)] += up(r, i) * dh;
        }
      }
      for (std::int64_t i = 0; i < kWidth; ++i) down_bias_->grad.at(i) += dy.at(at + i);
    }
    if (first_) return;  // no gradient of the data
    ctx.tensor->sum(parts);
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      grad_in[0].at(i) = float(dy.at(i) + parts[std::size_t(i)]);
    }
  }
  void loss(StageContext& ctx, Tensors y, Tensors target, double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      *sum += std::pow(y[0].at(i) -= target[0].at(i), 2.0);
      y[0].at(i) *= float(2 * ctx.loss_scale);
    }
  }
  double target_weight(Tensors target) const override { return double(target[0].elements()); }

 private:
  std::int64_t hidden() const { return up_bias_->shape[0]; }  // of this rank
  double up(std::int64_t r, std::int64_t i) const { return up_->value.at(r * kWidth + i); }
  double down(std::int64_t i, std::int64_t r) const { return down_->value.at(i * hidden() + r); }
  static float* kept(const StageContext& ctx) {
    return reinterpret_cast<float*>(ctx.state.until_weight.data());
  }

  const bool first_;
  ParameterSet set_;
  Parameter *up_, *up_bias_, *down_, *down_bias_;
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    const auto number = [&](int i, int other) { return argc > i ? std::atoi(argv[i]) : other; };
    const int tensor = number(1, world.size()), replicas = number(2, 1), depth = number(3, 1);
    PipelineOptions options{.shape = {.pipeline = depth, .replicas = replicas, .tensor = tensor}};
    options.shape.micro_batches = 4;
    options.shape.micro_batch_size = 16 / replicas;
    if (depth == 1) options.order = {.schedule = "interleaved", .chunks = 2};  // both stages
    options.training.optimizer = OptimizerConfig::sgd(0.9F);
    options.training.learning_rate = {.peak = 0.05};
    const auto make_stage = [](const StagePlace& place) -> std::unique_ptr<Stage> {
      return std::make_unique<Perceptron>(place);
    };
    const TensorSpec pair{DType::kF32, {kWidth}};
    const BatchSpec batches{.inputs = {pair}, .targets = {pair}, .feed = Feed::kRank0};
    Pipeline pipeline(world, make_stage, batches, options);
    std::vector<float> x, y;  // a point of a square, and where it is after a turn that bends it
    for (int i = 0; i < 64; ++i) {
      const float u = float(i % 8) / 4 - 1, v = float(i - i % 8) / 32 - 1;
      x.insert(x.end(), {u, v});
      y.insert(y.end(), {-v + u * u, u * v});
    }
    Batch batch;  // rank 0 passes all of it
    if (world.rank() == 0) batch = {.inputs = {view(x, {64, 2})}, .targets = {view(y, {64, 2})}};
    for (int step = 1; step <= 200; ++step) {
      const double loss = pipeline.train_step(batch).loss;
      if (step % 40 == 0 && world.rank() == 0) std::printf("step %3d  loss %.9f\n", step, loss);
    }
  });
}
