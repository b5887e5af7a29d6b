// Losses, optimizer updates, sums of squares and roundings of many on a GPU against the CPU's.
#include "stages/compute/call_arguments.hpp"
#include "stages/compute/internal_operators.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

class CudaSumTest : public GpuCompareTest {
 protected:
  // What call(ctx, tensors, sum) leaves in *sum on the CPU and the GPU; operands are compared too.
  using SumCall = std::function<void(ComputeContext&, const Tensors&, double*)>;
  void compare_sums(std::initializer_list<const Operand*> operands, double tolerance,
                    double sum_tolerance, const SumCall& call) {
    const HostBuffer memory(kGpu, sizeof(double));
    auto* sum = reinterpret_cast<double*>(memory.data());
    double last = 0, cpus = 0;
    compare_shifted(operands, tolerance, [&](ComputeContext& ctx, const Tensors& at) {
      if (ctx.device() != kGpu) {
        call(ctx, at, &cpus);
        return;
      }
      *sum = -1;
      call(ctx, at, sum);
      ctx.stream().synchronize();
      last = *sum;
    });
    EXPECT_LE(std::abs(last - cpus), sum_tolerance * std::abs(cpus)) << last << ", CPU " << cpus;
  }
};

using CudaLossTest = CudaSumTest;
using CudaUpdateTest = CudaSumTest;

TEST_F(CudaLossTest, CrossEntropyIsTheCpus) {
  for (const DType dtype : kOperandTypes) {
    for (const std::int64_t width : {2, 37, 256, 5003, 8192, 16400, 16401}) {
      for (const bool gradient : {false, true}) {
        SCOPED_TRACE(
            fmt::format("vocabulary {}, gradient {}, {}", width, gradient, name_of(dtype)));
        const Operand targets(DType::kI32, {7},
                              {0, 1, -1, static_cast<double>(width - 1), 0, -100, 1});
        const Operand logits = random_operand(dtype, {7, width}, 1, 4);
        const double close = dtype == DType::kF32 ? 2e-6 : 4e-3;
        compare_sums({&logits, &targets}, gradient ? close : kExact, 1e-6,
                     [&](ComputeContext& ctx, const Tensors& at, double* sum) {
                       softmax_cross_entropy(ctx, at[0], at[1], 0.25, gradient, sum);
                     });
      }
    }
  }
}

TEST_F(CudaLossTest, CrossEntropySurvivesLargeLogitsAndShowsNan) {
  const Operand targets(DType::kI32, {2}, {0, 1});
  const Operand large(DType::kF32, {2, 3}, {1e4, -1e4, 0, 3e38, 3e38, -3e38});
  compare_sums({&large, &targets}, 1e-6, 1e-6,
               [&](ComputeContext& ctx, const Tensors& at, double* sum) {
                 softmax_cross_entropy(ctx, at[0], at[1], 1, true, sum);
               });
  const OnGpu gpu_targets(targets);
  const HostBuffer memory(kGpu, sizeof(double));
  auto* sum = reinterpret_cast<double*>(memory.data());
  const double infinity = std::numeric_limits<double>::infinity();
  // In the target's column, in another, and what becomes NaN.
  for (const Values& row : {Values{1, std::nan(""), 2}, {1, 2, std::nan("")}, {1, 2, infinity}}) {
    const OnGpu broken(Operand(DType::kF32, {2, 3}, {1, 2, 3, row[0], row[1], row[2]}));
    softmax_cross_entropy(gpu(), broken.tensor(), gpu_targets.tensor(), 1, true, sum);
    gpu().stream().synchronize();
    EXPECT_TRUE(std::isnan(*sum));
    EXPECT_TRUE(std::isnan(broken.values(gpu())[5]));
  }
}

TEST_F(CudaLossTest, OfNoRowsIsZero) {
  const HostBuffer memory(kGpu, sizeof(double));
  auto* sum = reinterpret_cast<double*>(memory.data());
  *sum = -1;
  const OnGpu logits(Operand(DType::kF32, {0, 5})), targets(Operand(DType::kI32, {0}));
  softmax_cross_entropy(gpu(), logits.tensor(), targets.tensor(), 1, true, sum);
  gpu().stream().synchronize();
  EXPECT_EQ(*sum, 0);
}

TEST_F(CudaLossTest, SquaredErrorIsTheCpus) {
  for (const std::int64_t size : {1, 5, 16384, 40000}) {
    for (const bool gradient : {false, true}) {
      const Operand outputs = random_operand(DType::kF32, {size}, 2),
                    targets = random_operand(DType::kF32, {size}, 3);
      compare_sums({&outputs, &targets}, kExact, 1e-12,
                   [&](ComputeContext& ctx, const Tensors& at, double* sum) {
                     mean_squared_error(ctx, at[0], at[1], 0.5, gradient, sum);
                   });
    }
  }
}

// Vectors of unequal sizes, none of some, more than one launch takes; most start at odd addresses.
TEST_F(CudaUpdateTest, SumsOfSquaresOfManyVectorsAreTheCpus) {
  const Operand values = random_operand(DType::kF32, {70000}, 11);
  const OnGpu on_gpu(values);
  const auto cut = [](const Tensor& tensor) {
    std::vector<std::span<const float>> vectors;
    for (std::size_t first = 0, i = 0; i < 1100; ++i) {
      const std::size_t count = i % 500 == 3 ? kSumBlock * (i / 500 + 1) + i / 500 : i % 5;
      vectors.push_back(tensor.floats().subspan(first, count));
      first += count / 3;
    }
    return vectors;
  };
  std::size_t count = 0;
  for (const std::span<const float> vector : cut(values.tensor)) {
    count += static_cast<std::size_t>(sum_blocks(std::ssize(vector)));
  }
  std::vector<double> cpus(count);
  sums_of_squares(cpu(), cut(values.tensor), cpus.data());
  const HostBuffer memory(kGpu, count * sizeof(double));
  auto* gpus = reinterpret_cast<double*>(memory.data());
  std::fill_n(gpus, count, -1.0);
  sums_of_squares(gpu(), cut(on_gpu.tensor()), gpus);
  gpu().stream().synchronize();
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_NEAR(gpus[i], cpus[i], 1e-12 * cpus[i]) << i;
  }
}

TEST_F(CudaUpdateTest, SumOfSquaresDoesNotDependOnWhereTheVectorStarts) {
  const Operand values = random_operand(DType::kF32, {40003}, 12);
  const HostBuffer memory(kGpu, 6 * sizeof(double));
  auto* sums = reinterpret_cast<double*>(memory.data());
  const OnGpu aligned(values), shifted(values, sizeof(float));
  const std::vector<std::span<const float>> vectors = {aligned.tensor().floats(),
                                                       shifted.tensor().floats()};
  sums_of_squares(gpu(), vectors, sums);
  gpu().stream().synchronize();
  for (int block = 0; block < 3; ++block) EXPECT_EQ(sums[block], sums[3 + block]);
}

// Runs of odd sizes that follow each other in vectors of `total` elements, more than one launch
// takes; every third does not decay.
std::vector<UpdateRun> runs_of(const Tensors& vectors, std::int64_t total) {
  std::vector<UpdateRun> runs;
  std::int64_t first = 0, count = 1;
  while (first < total) {
    count = std::min(count, total - first);
    UpdateRun run = {.value = vectors[0].as<float>() + first,
                     .grad = vectors[1].as<float>() + first,
                     .first = vectors.size() > 2 ? vectors[2].as<float>() + first : nullptr,
                     .second = vectors.size() > 3 ? vectors[3].as<float>() + first : nullptr,
                     .count = count,
                     .decay = runs.size() % 3 != 0};
    runs.push_back(run);
    first += count;
    const auto number = static_cast<std::int64_t>(runs.size());
    count = number % 100 == 9 ? 5000 : number % 4 * 8 + number % 2;
  }
  return runs;
}

TEST_F(CudaUpdateTest, AdamWUpdatesAllRunsAsTheCpuDoes) {
  const std::int64_t size = 60001;
  const Operand value = random_operand(DType::kF32, {size}, 4),
                grad = random_operand(DType::kF32, {size}, 5),
                first = random_operand(DType::kF32, {size}, 6),
                second(DType::kF32, {size}, Values(index_of(size), 0.3));
  const AdamWStep step = {.learning_rate = 0.01F,
                          .weight_decay = 0.1F,
                          .correction1 = 0.19F,
                          .correction2 = 0.0975F,
                          .grad_scale = 0.5F};
  ASSERT_GT(runs_of({value.tensor, grad.tensor, first.tensor, second.tensor}, size).size(), 512U);
  compare_shifted(
      {&value, &grad, &first, &second}, 1e-6,
      [&](ComputeContext& ctx, const Tensors& at) { adamw(ctx, step, runs_of(at, size)); });
}

// The moments to the bit: their arithmetic is sums and products alone. Odd places in odd
// parameters.
TEST_F(CudaUpdateTest, AdamWRoundsMomentsAsTheCpuDoesToTheBit) {
  const std::int64_t size = 40001;
  const Operand value = random_operand(DType::kF32, {size}, 4),
                grad = random_operand(DType::kF32, {size}, 5),
                first = random_operand(DType::kBf16, {size}, 6),
                second(DType::kBf16, {size}, Values(index_of(size), 0.3));
  const AdamWStep step = {.learning_rate = 0.01F,
                          .weight_decay = 0.1F,
                          .correction1 = 0.19F,
                          .correction2 = 0.0975F,
                          .moments = DType::kBf16,
                          .seed = 77,
                          .step = 3};
  const auto update = [&](ComputeContext& ctx, const Tensors& at) {
    const Tensors f32 = {at[0], at[1]};
    std::vector<UpdateRun> runs = runs_of(f32, size);
    for (UpdateRun& run : runs) {
      const std::int64_t place = run.value - at[0].as<float>();
      run.first = at[2].as<Bf16>() + place;
      run.second = at[3].as<Bf16>() + place;
      run.site = static_cast<std::uint64_t>(place % 5);
      run.element = static_cast<std::uint64_t>(place % 3 == 0 ? place : 0);
    }
    adamw(ctx, step, runs);
  };
  compare_shifted({&value, &grad, &first, &second}, 1e-6, update);
  const OnGpu gpu_value(value), gpu_grad(grad), gpu_first(first), gpu_second(second);
  update(gpu(), {gpu_value.tensor(), gpu_grad.tensor(), gpu_first.tensor(), gpu_second.tensor()});
  ComputeContext cpu({}, 1);
  update(cpu, {value.tensor, grad.tensor, first.tensor, second.tensor});
  EXPECT_EQ(gpu_first.values(gpu()), first.values());
  EXPECT_EQ(gpu_second.values(gpu()), second.values());
}

TEST_F(CudaUpdateTest, AdamWWritesRoundedCopiesOfSomeRuns) {
  const std::int64_t size = 20011;
  const Operand value = random_operand(DType::kF32, {size}, 4),
                grad = random_operand(DType::kF32, {size}, 5);
  for (const DType moments : {DType::kF32, DType::kBf16}) {
    const Operand first = random_operand(moments, {size}, 6),
                  second(moments, {size}, Values(index_of(size), 0.3));
    const OnGpu values(value), grads(grad), firsts(first), seconds(second);
    const Operand none(DType::kBf16, {size}, Values(index_of(size), 7));
    const OnGpu copies(none);
    std::vector<UpdateRun> runs = runs_of({values.tensor(), grads.tensor()}, size);
    std::vector<bool> copied(index_of(size));
    for (std::size_t i = 0; i < runs.size(); ++i) {
      UpdateRun& run = runs[i];
      const std::int64_t place = run.value - values.tensor().as<float>();
      const auto bytes = index_of(place) * size_of(moments);
      run.first = firsts.tensor().as<std::byte>() + bytes;
      run.second = seconds.tensor().as<std::byte>() + bytes;
      if (i % 2 == 0) continue;
      run.bf16_copy = copies.tensor().as<Bf16>() + place;
      for (std::int64_t k = 0; k < run.count; ++k) copied[index_of(place + k)] = true;
    }
    adamw(gpu(), {.learning_rate = 0.01F, .moments = moments}, runs);
    const Values now = values.values(gpu()), rounded = copies.values(gpu());
    for (std::size_t i = 0; i < now.size(); ++i) {
      const double wanted = to_float(to_bf16(static_cast<float>(now[i])));
      ASSERT_EQ(rounded[i], copied[i] ? wanted : 7) << i;
    }
  }
}

TEST_F(CudaUpdateTest, AdamUpdatesAllRunsAsTheCpuDoes) {
  const std::int64_t size = 5001;
  const Operand value = random_operand(DType::kF32, {size}, 4),
                grad = random_operand(DType::kF32, {size}, 5),
                first = random_operand(DType::kF32, {size}, 6),
                second(DType::kF32, {size}, Values(index_of(size), 0.3));
  const AdamWStep step = {.learning_rate = 0.01F,
                          .weight_decay = 0.1F,
                          .correction1 = 0.19F,
                          .correction2 = 0.0975F,
                          .coupled = true};
  compare_shifted(
      {&value, &grad, &first, &second}, 1e-6,
      [&](ComputeContext& ctx, const Tensors& at) { adamw(ctx, step, runs_of(at, size)); });
}

TEST_F(CudaUpdateTest, SgdUpdatesAllRunsAsTheCpuDoesToTheBit) {
  const std::int64_t size = 20011;
  const Operand value = random_operand(DType::kF32, {size}, 7),
                grad = random_operand(DType::kF32, {size}, 8),
                velocity = random_operand(DType::kF32, {size}, 9);
  compare_shifted({&value, &grad, &velocity}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
    sgd(ctx, {0.01F, 0.9F, 0.1F, 2}, runs_of(at, size));
  });
  compare_shifted({&value, &grad, &velocity}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
    sgd(ctx, {0.01F, 0.9F, 0.1F, 2, /*nesterov=*/true}, runs_of(at, size));
  });
  compare_shifted({&value, &grad}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
    sgd(ctx, {0.5F, 0, 0.1F, 1}, runs_of(at, size));
  });
}

// Pieces of every alignment, none of some, of more than a block's share, and more of them than one
// launch takes; what lies between them stays.
TEST_F(CudaUpdateTest, ConvertAllConvertsEveryPieceAsTheCpuDoesToTheBit) {
  const std::int64_t size = 70001;
  const Operand from = random_operand(DType::kF32, {size}, 13),
                to = random_operand(DType::kBf16, {size}, 14);
  compare_shifted({&from, &to}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
    std::vector<Conversion> pieces;
    std::int64_t first = 0;
    for (std::int64_t i = 0; first < size; ++i) {
      const std::int64_t wanted = i == 2 ? 20003 : i % 4 * 16 + (i % 8 == 7 ? 3 : 0);
      const std::int64_t count = std::min(wanted, size - first);
      pieces.push_back({{at[0].as<float>() + first, {DType::kF32, Shape{count}}},
                        {at[1].as<Bf16>() + first, {DType::kBf16, Shape{count}}}});
      first += count + (i % 3 == 0 ? 8 : 0);
    }
    ASSERT_GT(pieces.size(), 1000U);
    convert_all(ctx, pieces);
  });
}

}  // namespace
}  // namespace sluice
