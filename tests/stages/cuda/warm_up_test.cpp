// A stage has run every kernel when prepare() returns, and only its gradients have changed. Needs
// the emulated CUDA, which records every launched kernel, and whose memory is the host's.
#include <memory>
#include <set>
#include <string>

#include <sluice/layers.hpp>
#include <sluice/transformer.hpp>

#include "tests/emulated_cuda/modules.hpp"
#include "tests/stages/cuda/gpu_tools.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice {
namespace {

// A micro-batch forward and backward, whole or split.
void run(ComputeContext& gpu, Stage& stage, const TensorSpec& input,
         const StageContext::State& state, bool first, bool split_backward) {
  const TensorSpec output = stage.describe({&input, 1}, gpu).outputs.at(0);
  const OnGpu in{Operand(input)}, out{Operand(output)}, din{Operand(input)};
  fill_zero_async(in.data(), in.tensor().spec.bytes(), gpu.stream());
  StageContext ctx{.compute = gpu, .state = state};
  ctx.samples = input.shape[0];
  ctx.inputs = {&in.tensor(), 1};
  stage.begin_step(gpu);
  stage.forward(ctx, ctx.inputs, {&out.tensor(), 1});
  if (auto* const loss = dynamic_cast<LossStage*>(&stage)) {
    const OnGpu targets(Operand(TensorSpec{DType::kI32, Shape{input.shape[0], input.shape[1]}}));
    fill_zero_async(targets.data(), targets.tensor().spec.bytes(), gpu.stream());
    const HostBuffer sum(kGpu, sizeof(double));
    loss->loss(ctx, {&out.tensor(), 1}, {&targets.tensor(), 1},
               reinterpret_cast<double*>(sum.data()));
    gpu.stream().synchronize();
  }
  const std::span<const Tensor> wanted =
      first ? std::span<const Tensor>{} : std::span<const Tensor>{&din.tensor(), 1};
  if (split_backward) {
    auto& split = dynamic_cast<SplitBackward&>(stage);
    split.backward_input(ctx, {&out.tensor(), 1}, wanted);
    split.backward_weight(ctx, {&out.tensor(), 1});
  } else {
    stage.backward(ctx, {&out.tensor(), 1}, wanted);
  }
  gpu.stream().synchronize();
}

class WarmUpTest : public ::testing::TestWithParam<bool> {};

TEST_P(WarmUpTest, RunsEveryKernelThatAStepOfASingleLayerLaunches) {
  for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
    for (int s = 0; s < 4; ++s) {
      emulated::forget_launches();
      ComputeContext gpu(kGpu, 1);
      const auto stage = Transformer(testing::odd_model(kind)).stage_of({{0, 1, 2, 3, 4}}, s);
      const TensorSpec input = s == 0 ? TensorSpec{DType::kI32, Shape{2, 13}}
                                      : TensorSpec{DType::kF32, Shape{2, 13, 24}};
      const testing::StateSlot slot(kGpu, stage->describe({&input, 1}, gpu));
      StageSetup setup{.compute = &gpu, .state = slot.state()};
      setup.split_backward = GetParam();
      setup.input_sizes = {{input}};
      testing::prepare(*stage, setup);
      const std::set<std::string> before = emulated::launched_kernels();
      run(gpu, *stage, input, slot.state(), s == 0, GetParam());
      EXPECT_EQ(emulated::launched_kernels(), before) << "stage " << s;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backward, WarmUpTest, ::testing::Bool());

// A program's own, with a buffer that it overwrites, and a sum over replicas.
class Overwriting : public nn::Layer {
 public:
  TensorSpec output(const TensorSpec& input) const override { return input; }
  bool runs_on_gpu() const override { return true; }
  nn::LayerNeeds needs(const TensorSpec&, ComputeContext&) const override {
    nn::LayerNeeds needs;
    needs.collectives.forward = {
        {.axis = CollectiveAxis::kReplica, .bytes = sizeof(double), .type = DType::kF64}};
    return needs;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    buffer_ = &set.add_buffer(name + "buffer", {1}, Init::constant(5));
  }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    double one = 1;
    call.stage.collective->sum({&one, 1});
    fill_zero_async(buffer_->value.data, sizeof(float), call.compute().stream());
    copy_async(y.data, call.x.data, y.spec.bytes(), call.compute().stream());
  }
  void backward_input(nn::LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    copy_async(dx.data, dy.data, dx.spec.bytes(), call.compute().stream());
  }

 private:
  Parameter* buffer_ = nullptr;
};

TEST(WarmUpBuffersTest, LeavesBuffersOfLayersAsTheyAre) {
  ComputeContext gpu(kGpu, 1);
  const std::unique_ptr<Stage> stage =
      Sequential({nn::layer<Overwriting>("overwriting"), nn::linear(4, 4)})(0, 1);
  const TensorSpec input{DType::kF32, Shape{2, 4}};
  const testing::StateSlot slot(kGpu, stage->describe({&input, 1}, gpu));
  StageSetup setup{.compute = &gpu, .state = slot.state()};
  setup.input_sizes = {{input}};
  testing::prepare(*stage, setup);
  const auto buffer = [&stage] {
    float value = 0;
    copy_now(kGpu, &value, stage->parameters()->flat_buffers().data(), sizeof(value));
    return value;
  };
  EXPECT_EQ(buffer(), 5);
  const TensorSpec smaller{DType::kF32, Shape{1, 4}};
  stage->prepare_size(gpu, {&smaller, 1});
  EXPECT_EQ(buffer(), 5);
}

}  // namespace
}  // namespace sluice
