// What cuDNN's attention computes on a GPU, against the CPU's operator. Cases skip, saying so,
// where no GPU answers and where the library at hand is known to be wrong for a shape.
#include "stages/cuda/attention_cudnn.hpp"

#include <fmt/core.h>

#include "stages/cuda/cuda_backend.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

const AttentionShape kShapes[] = {
    {.samples = 2, .sequence = 128, .heads = 3, .kv_heads = 3, .head_dim = 64},
    {.samples = 1, .sequence = 256, .heads = 4, .kv_heads = 2, .head_dim = 128},
    {.samples = 3, .sequence = 2, .heads = 2, .kv_heads = 2, .head_dim = 64},
    {.samples = 2, .sequence = 77, .heads = 4, .kv_heads = 4, .head_dim = 64},
    {.samples = 2, .sequence = 129, .heads = 6, .kv_heads = 2, .head_dim = 64},
    {.samples = 1, .sequence = 200, .heads = 2, .kv_heads = 2, .head_dim = 128},
    {.samples = 2, .sequence = 331, .heads = 4, .kv_heads = 1, .head_dim = 128}};

std::string shape_name(const testing::TestParamInfo<std::size_t>& info) {
  const AttentionShape& shape = kShapes[info.param];
  return fmt::format("{}x{}_heads{}over{}_of{}", shape.samples, shape.sequence, shape.heads,
                     shape.kv_heads, shape.head_dim);
}

class CudnnAttentionTest : public GpuCompareTest, public testing::WithParamInterface<std::size_t> {
 protected:
  void SetUp() override {
    GpuCompareTest::SetUp();
    if (IsSkipped()) return;
    const std::string& refusal = cudnn().refusal(kShapes[GetParam()]);
    if (refusal.empty()) return;
    constexpr int kAmpere = 80;
    constexpr std::size_t kFirstThatTakesAll = 91501;  // as known_fault() in attention_cudnn.cpp
    if (cudnnGetVersion() < kFirstThatTakesAll ||
        cuda::backend_of(gpu()).compute_capability() < kAmpere) {
      GTEST_SKIP() << "cuDNN " << cudnnGetVersion() << ": " << refusal;
    }
    FAIL() << refusal;
  }
  [[nodiscard]] cuda::CudnnAttention& cudnn() { return *cuda::backend_of(gpu()).cudnn_attention(); }
};

TEST_P(CudnnAttentionTest, IsTheCpus) {
  const AttentionShape& shape = kShapes[GetParam()];
  const DType dtype = DType::kBf16;
  const Shape packed = {shape.rows(), shape.packed_width()};
  const Shape width = {shape.rows(), std::int64_t{shape.heads} * shape.head_dim};
  const Operand qkv = random_operand(dtype, packed, 1, 1.5), dout = random_operand(dtype, width, 2);
  const Operand out(dtype, width), dqkv(dtype, packed);
  const auto state = [&](DeviceKind device) {
    const std::size_t bytes = attention_state_bytes(device, shape, dtype);
    return Operand(DType::kU8, {static_cast<std::int64_t>(bytes)});
  };
  const Operand kept = state(DeviceKind::kCpu);
  const OnGpu gpu_kept(state(DeviceKind::kCuda));
  compare({&qkv, &dout, &out, &dqkv}, gpu_tolerance(dtype),
          [&](ComputeContext& ctx, const Tensors& at) {
            if (ctx.device() == kGpu) {
              auto* logarithms = static_cast<std::byte*>(gpu_kept.data());
              cudnn().forward(ctx, shape, at[0], at[2], logarithms);
              cudnn().backward(ctx, shape, at[0], at[2], at[1], logarithms, at[3]);
              return;
            }
            attention_forward(ctx, shape, at[0], {}, at[2], kept.tensor.as<std::byte>());
            attention_backward(ctx, shape, at[0], at[2], at[1], {}, kept.tensor.as<std::byte>(),
                               at[3]);
          });
  EXPECT_TRUE(gpu_kept.fetch(gpu()).end_untouched());
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudnnAttentionTest,
                         testing::Range(std::size_t{0}, std::size(kShapes)), shape_name);

}  // namespace
}  // namespace sluice
