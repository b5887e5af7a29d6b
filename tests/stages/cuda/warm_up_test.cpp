// A transformer's stage has run every kernel when prepare() returns. Needs the emulated CUDA, which
// records every launched kernel.
#include <set>
#include <string>

#include <sluice/transformer.hpp>

#include "tests/emulated_cuda/modules.hpp"
#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

TransformerConfig model(TransformerKind kind) {
  TransformerConfig config;
  config.kind = kind;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.width = 24;
  config.context = 13;
  config.vocabulary = 19;
  config.mlp_width = 40;
  return config;
}

// A micro-batch forward and backward, whole or split.
void run(ComputeContext& gpu, Stage& stage, const TensorSpec& input, bool first,
         bool split_backward) {
  const TensorSpec output = stage.describe({&input, 1}, gpu).outputs.at(0);
  const OnGpu in{Operand(input)}, out{Operand(output)}, din{Operand(input)};
  fill_zero_async(in.data(), in.tensor().spec.bytes(), gpu.stream());
  StageContext ctx{.compute = gpu};
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
      const auto stage = make_transformer_stage(model(kind), {{0, 1, 2, 3, 4}}, s);
      const TensorSpec input = s == 0 ? TensorSpec{DType::kI32, Shape{2, 13}}
                                      : TensorSpec{DType::kF32, Shape{2, 13, 24}};
      StageSetup setup{.compute = &gpu};
      setup.split_backward = GetParam();
      setup.input_sizes = {{input}};
      stage->prepare(setup);
      const std::set<std::string> before = emulated::launched_kernels();
      run(gpu, *stage, input, s == 0, GetParam());
      EXPECT_EQ(emulated::launched_kernels(), before) << "stage " << s;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backward, WarmUpTest, ::testing::Bool());

}  // namespace
}  // namespace sluice
