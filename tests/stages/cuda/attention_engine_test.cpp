// Which code computes attention on a GPU, and what it says of that.
#include <gmock/gmock.h>

#include <sluice/operators.hpp>
#include <sluice/transformer.hpp>

#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr AttentionShape kShape = {
    .samples = 2, .sequence = 128, .heads = 4, .kv_heads = 2, .head_dim = 64};

using CudaAttentionEngineTest = GpuTest;

TEST_F(CudaAttentionEngineTest, KeepsTheLogarithmOfEachRowsSum) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    EXPECT_EQ(attention_state_bytes(DeviceKind::kCuda, kShape, dtype), 2U * 4 * 128 * 4);
  }
}

TEST_F(CudaAttentionEngineTest, IsOwnWithAWindowThatHidesPositions) {
  AttentionShape sliding = kShape;
  sliding.window = 127;
  EXPECT_EQ(attention_engine(gpu(), sliding, DType::kF32, false), "own kernels (sliding window)");
  EXPECT_EQ(attention_engine(gpu(), sliding, DType::kBf16, false),
            "own kernels on tensor cores (sliding window)");
  AttentionShape whole = kShape;
  whole.window = 128;
  EXPECT_EQ(attention_engine(gpu(), whole, DType::kBf16, false),
            attention_engine(gpu(), kShape, DType::kBf16, false));
}

TEST_F(CudaAttentionEngineTest, IsNamedForEachKindOfABlock) {
  TransformerConfig config{.kind = TransformerKind::kLlama, .layers = 4, .heads = 4, .width = 256};
  config.window = 64;
  config.full_layers = {1, 2};
  const TensorSpec tokens{DType::kI32, {1, 128}};
  const auto description = Transformer(config).stage_of({{0, 6}}, 0)->describe({&tokens, 1}, gpu());
  AttentionShape whole = kShape;
  whole.samples = 1;
  whole.kv_heads = 4;
  EXPECT_EQ(description.note, "attention: own kernels (sliding window); attention: " +
                                  attention_engine(gpu(), whole, DType::kF32, false));
}

#if SLUICE_WITH_CUDNN
TEST_F(CudaAttentionEngineTest, IsCudnnInBf16WithoutDropout) {
  EXPECT_EQ(attention_engine(gpu(), kShape, DType::kBf16, false), "cuDNN");
}

TEST_F(CudaAttentionEngineTest, SaysWhyOwnKernelsRun) {
  EXPECT_EQ(attention_engine(gpu(), kShape, DType::kF32, false),
            "own kernels (f32; cuDNN takes bf16)");
  EXPECT_EQ(attention_engine(gpu(), kShape, DType::kBf16, true),
            "own kernels on tensor cores (dropout; cuDNN's random numbers would be its own)");
  AttentionShape odd = kShape;
  odd.head_dim = 20;
  const std::string engine = attention_engine(gpu(), odd, DType::kBf16, false);
  EXPECT_THAT(engine, StartsWith("own kernels (cuDNN: "));
  EXPECT_THAT(engine, HasSubstr("multiple of 8"));
}
#else
TEST_F(CudaAttentionEngineTest, SaysWhyOwnKernelsRun) {
  EXPECT_EQ(attention_engine(gpu(), kShape, DType::kBf16, false),
            "own kernels on tensor cores (built without cuDNN)");
}
#endif

TEST_F(CudaAttentionEngineTest, SaysWhatRunsOnTensorCores) {
  gpu().set_tf32(true);
  EXPECT_THAT(attention_engine(gpu(), kShape, DType::kF32, false),
              StartsWith("own kernels on tensor cores ("));
  AttentionShape odd = kShape;
  odd.head_dim = 63;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    EXPECT_THAT(attention_engine(gpu(), odd, dtype, false), StartsWith("own kernels ("));
  }
}

}  // namespace
}  // namespace sluice
