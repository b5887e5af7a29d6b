// Sluice's own attention kernels on a GPU against the CPU's attention.
#include "stages/cuda_kernels/flash_attention.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

class CudaAttentionTest : public GpuCompareTest {
 protected:
  void check(const AttentionShape& shape, const Dropout& dropout = {}) {
    for (const DType dtype : kOperandTypes) {
      SCOPED_TRACE(
          fmt::format("{} samples, sequence {}, heads {} and {}, head_dim {}, window {}, {}",
                      shape.samples, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim,
                      shape.window, name_of(dtype)));
      const Shape packed = {shape.rows(), shape.packed_width()};
      const Shape width = {shape.rows(), std::int64_t{shape.heads} * shape.head_dim};
      const Operand qkv = random_operand(dtype, packed, 1, 1.5),
                    dout = random_operand(dtype, width, 2);
      const Operand out(dtype, width), dqkv(dtype, packed);
      const Operand kept = state(DeviceKind::kCpu, shape, dtype);
      const OnGpu gpu_kept(state(DeviceKind::kCuda, shape, dtype));
      compare_shifted({&qkv, &dout, &out, &dqkv}, gpu_tolerance(dtype),
                      [&](ComputeContext& ctx, const Tensors& at) {
                        if (ctx.device() == kGpu) {
                          auto* state = static_cast<std::byte*>(gpu_kept.data());
                          cuda::flash_attention_forward(ctx, shape, at[0], dropout, at[2], state);
                          cuda::flash_attention_backward(ctx, shape, at[0], at[2], at[1], dropout,
                                                         state, at[3]);
                          return;
                        }
                        auto* state = kept.tensor.as<std::byte>();
                        attention_forward(ctx, shape, at[0], dropout, at[2], state);
                        attention_backward(ctx, shape, at[0], at[2], at[1], dropout, state, at[3]);
                      });
      EXPECT_TRUE(gpu_kept.fetch(gpu()).end_untouched());
    }
  }

 private:
  static Operand state(DeviceKind device, const AttentionShape& shape, DType dtype) {
    const std::size_t bytes = attention_state_bytes(device, shape, dtype);
    return Operand(DType::kU8, {static_cast<std::int64_t>(bytes)});
  }
};

TEST_F(CudaAttentionTest, IsTheCpus) {
  check({.samples = 2, .sequence = 9, .heads = 2, .kv_heads = 2, .head_dim = 5});
  check({.samples = 2, .sequence = 64, .heads = 2, .kv_heads = 2, .head_dim = 16});
  check({.samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 8});
}

TEST_F(CudaAttentionTest, IsTheCpusAcrossTiles) {
  check({.samples = 2, .sequence = 75, .heads = 3, .kv_heads = 3, .head_dim = 8});
}

TEST_F(CudaAttentionTest, IsTheCpusForLargeHeads) {
  check({.samples = 1, .sequence = 35, .heads = 1, .kv_heads = 1, .head_dim = 80});
  check({.samples = 1, .sequence = 34, .heads = 2, .kv_heads = 1, .head_dim = 129});
  check({.samples = 1, .sequence = 33, .heads = 1, .kv_heads = 1, .head_dim = 256});
  check({.samples = 1, .sequence = 33, .heads = 1, .kv_heads = 1, .head_dim = 66});
}

TEST_F(CudaAttentionTest, SharesKeysBetweenGroupsOfQueries) {
  check({.samples = 1, .sequence = 10, .heads = 4, .kv_heads = 2, .head_dim = 6});
  check({.samples = 2, .sequence = 45, .heads = 6, .kv_heads = 2, .head_dim = 8});
}

TEST_F(CudaAttentionTest, DropsWhatTheCpuDrops) {
  const Dropout dropout = {0.25F, {3, random_site(1, 2), 5}, 4321};
  check({.samples = 2, .sequence = 13, .heads = 2, .kv_heads = 1, .head_dim = 4}, dropout);
  check({.samples = 2, .sequence = 40, .heads = 2, .kv_heads = 2, .head_dim = 8}, dropout);
  AttentionShape shard = {.samples = 2, .sequence = 13, .heads = 2, .kv_heads = 1, .head_dim = 4};
  shard.first_head = 3;
  shard.all_heads = 7;
  check(shard, dropout);
  shard.sequence = 40;
  shard.head_dim = 8;
  check(shard, dropout);
}

// Windows of one position, within a tile, of whole tiles, over several, and of all positions.
TEST_F(CudaAttentionTest, SeesTheCpusWindow) {
  const Dropout dropout = {0.25F, {3, random_site(1, 2), 5}, 4321};
  for (const int window : {1, 5, 32, 33, 70, 75, 200}) {
    check(
        {.samples = 1, .sequence = 75, .heads = 4, .kv_heads = 2, .head_dim = 8, .window = window});
  }
  check({.samples = 2, .sequence = 40, .heads = 2, .kv_heads = 1, .head_dim = 8, .window = 7},
        dropout);
}

TEST_F(CudaAttentionTest, RefusesHeadsItCannotHold) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 257};
  const OnGpu qkv(Operand(DType::kF32, {1, 3 * 257})), out(Operand(DType::kF32, {1, 257}));
  try {
    cuda::flash_attention_forward(gpu(), shape, qkv.tensor(), {}, out.tensor(), nullptr);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_STREQ(error.what(), "attention on a GPU takes heads of at most 256 dimensions, not 257");
  }
}

}  // namespace
}  // namespace sluice
