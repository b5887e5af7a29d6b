// Kernels as the operators have them, compiled by the emulation, through <sluice/cuda.hpp>.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <sluice/cuda.hpp>

#include "stages/cuda_kernels/device_tools.hpp"
#include "tests/emulated_cuda/modules.hpp"
#include "tests/emulated_cuda/on_device.hpp"

namespace sluice::cuda {
namespace {

using emulated::OnDevice;

__global__ void add_kernel(const float4* a, const float4* b, float4* sum, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float4 x = __ldg(a + i), y = __ldg(b + i);
  sum[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

TEST(EmulatedKernelTest, RunsEveryThreadOfAGridThatIsLargerThanTheWork) {
  std::vector<float> a(4 * 1001), b(4 * 1001);
  std::iota(a.begin(), a.end(), 0.0F);
  std::iota(b.begin(), b.end(), 0.5F);
  const OnDevice<float> left(a), right(b), sum(a.size());
  launch("add", add_kernel, {.grid = dim3(8), .block = dim3(128)}, nullptr,
         reinterpret_cast<const float4*>(left.get()), reinterpret_cast<const float4*>(right.get()),
         reinterpret_cast<float4*>(sum.get()), 1001);
  const std::vector<float> result = sum.values();
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_EQ(result[i], a[i] + b[i]) << i;
}

// Each thread writes its own place and reads another's: wrong without the barriers.
template <bool kWithBarrier>
__global__ void reverse_kernel(float* values, int rounds) {
  __shared__ float exchange[96];
  auto* dynamic = shared_memory<float>();
  const int count = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  float* mine = values + static_cast<int>(blockIdx.x) * count;
  for (int round = 0; round < rounds; ++round) {
    exchange[me] = mine[me];
    if (kWithBarrier) __syncthreads();
    dynamic[me] = exchange[count - 1 - me];
    if (kWithBarrier) __syncthreads();
  }
  mine[me] = dynamic[me];
}

std::vector<float> reversed_blocks(std::vector<float> values, bool with_barrier) {
  const OnDevice<float> memory(values);
  launch("reverse", with_barrier ? reverse_kernel<true> : reverse_kernel<false>,
         {.grid = dim3(3), .block = dim3(96), .shared_bytes = 96 * sizeof(float)}, nullptr,
         memory.get(), 2);
  return memory.values();
}

TEST(EmulatedKernelTest, BarriersOrderSharedMemory) {
  std::vector<float> values(3 * 96), expected;
  std::iota(values.begin(), values.end(), 0.0F);
  for (int block = 0; block < 3; ++block) {
    for (int i = 95; i >= 0; --i) expected.push_back(static_cast<float>(96 * block + i));
  }
  EXPECT_EQ(reversed_blocks(values, true), expected);
  EXPECT_NE(reversed_blocks(values, false), expected);
}

template <int kThreads>
__global__ void reduce_kernel(const float* values, float* sums, float* maxima) {
  const auto i = blockIdx.x * blockDim.x + threadIdx.x;
  const float sum = block_sum<kThreads>(values[i]);
  const float maximum = block_max<kThreads>(values[i]);
  sums[i] = sum;
  maxima[i] = maximum;
}

TEST(EmulatedKernelTest, ABlockReducesInTheOrderOfCub) {
  constexpr int kThreads = 160, kBlocks = 2;
  std::vector<float> values(kThreads * kBlocks);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i)) * 1000.0F;
  }
  const OnDevice<float> input(values), sums(values.size()), maxima(values.size());
  launch("reduce", reduce_kernel<kThreads>, {.grid = dim3(kBlocks), .block = dim3(kThreads)},
         nullptr, input.get(), sums.get(), maxima.get());
  for (std::size_t block = 0; block < kBlocks; ++block) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(block * kThreads);
    float expected = 0.0F;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      std::vector<float> level(begin + 32 * warp, begin + 32 * (warp + 1));
      while (level.size() > 1) {
        for (std::size_t i = 0; i < level.size() / 2; ++i)
          level[i] = level[2 * i] + level[2 * i + 1];
        level.resize(level.size() / 2);
      }
      expected = warp == 0 ? level[0] : expected + level[0];
    }
    for (std::size_t i = block * kThreads; i < (block + 1) * kThreads; ++i) {
      ASSERT_EQ(sums.values()[i], expected);
      ASSERT_EQ(maxima.values()[i], *std::max_element(begin, begin + kThreads));
    }
  }
}

__global__ void warp_kernel(float* sums, int* shifted, unsigned* bits) {
  const int me = static_cast<int>(threadIdx.x);
  sums[me] = warp_sum(static_cast<float>(me));
  shifted[me] = __shfl_up_sync(0xFFFFFFFFU, me, 1, 16);
  bits[me] = __ballot_sync(0xFFFFFFFFU, me % 3 == 0 ? 1 : 0);
}

TEST(EmulatedKernelTest, LanesOfAWarpExchange) {
  const OnDevice<float> sums(64);
  const OnDevice<int> shifted(64);
  const OnDevice<unsigned> bits(64);
  launch("warp", warp_kernel, {.grid = dim3(1), .block = dim3(64)}, nullptr, sums.get(),
         shifted.get(), bits.get());
  for (int i = 0; i < 64; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(sums.values()[at], i < 32 ? 496.0F : 496.0F + 32 * 32);
    EXPECT_EQ(shifted.values()[at], i % 16 == 0 ? i : i - 1);
    unsigned expected = 0;
    for (int l = 0; l < 32; ++l) expected |= ((i / 32 * 32 + l) % 3 == 0 ? 1U : 0U) << l;
    EXPECT_EQ(bits.values()[at], expected);
  }
}

__global__ void warp_order_kernel(const float* values, float* sums, float* shuffled) {
  const int me = static_cast<int>(threadIdx.x);
  sums[me] = warp_sum(values[me]);
  float sum = values[me];
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFU, sum, distance);
  }
  shuffled[me] = sum;
}

TEST(EmulatedKernelTest, AWarpReducesInTheOrderOfItsShuffles) {
  std::vector<float> values(64);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i)) * 1000.0F;
  }
  const OnDevice<float> input(values), sums(64), shuffled(64);
  launch("warp order", warp_order_kernel, {.grid = dim3(1), .block = dim3(64)}, nullptr,
         input.get(), sums.get(), shuffled.get());
  EXPECT_EQ(sums.values(), shuffled.values());
  EXPECT_NE(sums.values()[0], sums.values()[32]);
}

__global__ void last_block_kernel(const float* values, float* seen, unsigned* ticket,
                                  float* result) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  seen[i] = values[i];
  if (!last_block(ticket, gridDim.x)) return;
  float sum = 0;
  for (unsigned from = 0; from < gridDim.x * blockDim.x; ++from) sum += seen[from];
  result[threadIdx.x] += sum;
}

TEST(EmulatedKernelTest, OneBlockIsTheLastAndLeavesTheTicketForTheNextLaunch) {
  std::vector<float> values(5 * 64);
  std::iota(values.begin(), values.end(), 1.0F);
  const OnDevice<float> input(values), seen(values.size()), result(std::vector<float>(64));
  const OnDevice<unsigned> ticket(std::vector<unsigned>{0});
  const float sum = std::accumulate(values.begin(), values.end(), 0.0F);
  for (const float times : {1.0F, 2.0F, 3.0F}) {
    launch("last", last_block_kernel, {.grid = dim3(5), .block = dim3(64)}, nullptr, input.get(),
           seen.get(), ticket.get(), result.get());
    EXPECT_EQ(result.values(), std::vector<float>(64, times * sum));
    EXPECT_EQ(ticket.values()[0], 0U);
  }
}

// Even and odd lanes of one warp wait at the same time; the even ones meet once more.
__global__ void interleaved_kernel(int* values) {
  const int me = static_cast<int>(threadIdx.x);
  const unsigned mask = me % 2 == 0 ? 0x55555555U : 0xAAAAAAAAU;
  int value = __shfl_xor_sync(mask, me, 30);
  if (me % 2 == 0) value = __shfl_xor_sync(mask, value, 2);
  values[me] = value;
}

TEST(EmulatedKernelTest, LanesOfDifferentMasksMeetApart) {
  const OnDevice<int> values(64);
  launch("interleaved", interleaved_kernel, {.grid = dim3(1), .block = dim3(64)}, nullptr,
         values.get());
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(values.values()[static_cast<std::size_t>(i)], i % 2 == 0 ? i ^ 30 ^ 2 : i ^ 30);
  }
}

__global__ void early_exit_kernel(float* values) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  values[threadIdx.x] = 0.0F;
}

__global__ void divided_kernel(float* values) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  values[threadIdx.x] = 0.0F;
}

__global__ void ended_lane_kernel(float* values) {
  if (threadIdx.x == 7) return;
  values[threadIdx.x] = warp_sum(1.0F);
}

void run_alone(void (*kernel)(float*)) {
  const OnDevice<float> values(64);
  launch("lonely", kernel, {.grid = dim3(1), .block = dim3(64)}, nullptr, values.get());
  cudaDeviceSynchronize();
}

TEST(EmulatedKernelDeathTest, NamesThreadsThatMissABarrier) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(run_alone(early_exit_kernel),
               "kernel 'lonely', block \\(0, 0, 0\\): thread 0 waits for the block at "
               "kernels_test.cu:[0-9]+, but thread 40 has ended");
  EXPECT_DEATH(run_alone(divided_kernel),
               "kernel 'lonely'.*no thread can go on; thread 0 waits "
               "for its block at .*; thread 1 waits for its warp at");
  EXPECT_DEATH(run_alone(ended_lane_kernel),
               "thread 0 waits for its warp at .*, but thread 7, "
               "which the mask names, has ended");
}

__global__ void overrun_kernel(float* values) { values[blockDim.x] = 1.0F; }

TEST(EmulatedKernelDeathTest, AnAccessBeyondAnAllocationDies) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(run_alone(overrun_kernel),
               "device code touched freed emulated device memory or "
               "the end of an allocation");
}

TEST(EmulatedKernelTest, ADeviceWithoutCodeRefusesThemAndNoOtherDoes) {
  const auto run = [] {
    launch("mark", module_mark, {.grid = dim3(1), .block = dim3(1)}, nullptr);
  };
  const auto attributes = [] {
    cudaFuncAttributes ignored = {};
    return cudaFuncGetAttributes(&ignored, reinterpret_cast<const void*>(&module_mark));
  };
  emulated::set_kernel_status(1, cudaErrorNoKernelImageForDevice);
  run();
  EXPECT_EQ(attributes(), cudaSuccess);
  emulated::set_kernel_status(0, cudaErrorNoKernelImageForDevice);
  EXPECT_THROW(run(), Error);
  EXPECT_EQ(attributes(), cudaErrorNoKernelImageForDevice);
  emulated::set_kernel_status(0, cudaSuccess);
  emulated::set_kernel_status(1, cudaSuccess);
  run();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(EmulatedKernelTest, ARefusedLaunchNamesTheKernelAndItsShape) {
  try {
    launch("too wide", overrun_kernel, {.grid = dim3(2), .block = dim3(2048)}, nullptr, nullptr);
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_STREQ(error.what(),
                 "launching too wide on a grid of (2, 1, 1) blocks of (2048, 1, 1) threads with 0 "
                 "bytes of shared memory: invalid configuration argument");
  }
}

}  // namespace
}  // namespace sluice::cuda
