// Matmuls on a GPU against the CPU's: the layer's operators in every type, with and without bias
// and activation, and their cache of plans.
#include "stages/cuda/matmul.hpp"

#include <fmt/core.h>
#include <gmock/gmock.h>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/cuda/cuda_backend.hpp"
#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

struct Size {
  std::int64_t rows, in, out;
};
// One element; nothing even; rows and columns past a tile; multiples of 8, where GELU is fused;
// larger than a tile in every direction.
constexpr Size kSizes[] = {{1, 1, 1}, {7, 5, 3}, {33, 65, 17}, {40, 24, 56}, {130, 96, 264}};

std::string text(const Size& size, DType dtype) {
  return fmt::format("[{}, {}] x [{}, {}] {}", size.rows, size.in, size.in, size.out,
                     name_of(dtype));
}

// Weights of layers that keep the size of what goes through them.
double deviation(std::int64_t in) { return 1 / std::sqrt(static_cast<double>(in)); }

Tensor none() { return {}; }

class CudaLinearTest : public GpuTest {
 protected:
  // f(dtype, size, operands' seed)
  template <typename Body>
  void for_each_case(const Body& body) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const Size& size : kSizes) {
        SCOPED_TRACE(text(size, dtype));
        body(dtype, size);
      }
    }
  }
  void expect_near(const OnGpu& actual, const Operand& expected, DType dtype,
                   const std::string& what) {
    EXPECT_LE(relative_error(actual.values(gpu()), expected.values()), gpu_tolerance(dtype))
        << what;
  }
};

TEST_F(CudaLinearTest, ForwardIsTheCpus) {
  for_each_case([this](DType dtype, const Size& size) {
    const Operand x = random_operand(dtype, {size.rows, size.in}, 1),
                  weight = random_operand(dtype, {size.out, size.in}, 2, deviation(size.in)),
                  bias = random_operand(DType::kF32, {size.out}, 3);
    const OnGpu gpu_x(x), gpu_weight(weight), gpu_bias(bias);
    for (const DType result : {DType::kF32, dtype}) {
      for (const bool with_bias : {false, true}) {
        const Operand y(result, {size.rows, size.out});
        const OnGpu gpu_y(y);
        linear_forward(cpu(), x.tensor, weight.tensor, with_bias ? bias.tensor : none(), y.tensor);
        linear_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(),
                       with_bias ? gpu_bias.tensor() : none(), gpu_y.tensor());
        expect_near(gpu_y, y, result, with_bias ? "with bias" : "without bias");
        if (!with_bias || result == DType::kF32) continue;
        // A bias that is rounded already is the same to the bit.
        const Operand rounded(result, {size.out}, bias.values());
        const OnGpu gpu_rounded(rounded);
        const Values before = gpu_y.values(gpu());
        linear_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(), gpu_rounded.tensor(),
                       gpu_y.tensor());
        EXPECT_EQ(gpu_y.values(gpu()), before);
      }
    }
  });
}

// What is added to lies elsewhere than the result, and keeps its values.
TEST_F(CudaLinearTest, ResidualForwardIsTheCpus) {
  for_each_case([this](DType dtype, const Size& size) {
    const Operand x = random_operand(dtype, {size.rows, size.in}, 1),
                  weight = random_operand(dtype, {size.out, size.in}, 2, deviation(size.in)),
                  bias = random_operand(DType::kF32, {size.out}, 3);
    const OnGpu gpu_x(x), gpu_weight(weight), gpu_bias(bias);
    for (const DType stream : {DType::kF32, dtype}) {
      const Operand residual = random_operand(stream, {size.rows, size.out}, 4);
      const OnGpu gpu_residual(residual);
      for (const bool with_bias : {false, true}) {
        const Operand y(stream, {size.rows, size.out});
        const OnGpu gpu_y(y);
        linear_residual_forward(cpu(), x.tensor, weight.tensor, with_bias ? bias.tensor : none(),
                                residual.tensor, y.tensor);
        linear_residual_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(),
                                with_bias ? gpu_bias.tensor() : none(), gpu_residual.tensor(),
                                gpu_y.tensor());
        expect_near(gpu_y, y, stream, with_bias ? "with bias" : "without bias");
        EXPECT_EQ(gpu_residual.values(gpu()), residual.values());
      }
    }
  });
}

TEST_F(CudaLinearTest, BackwardInputIsTheCpus) {
  for_each_case([this](DType dtype, const Size& size) {
    const Operand dy = random_operand(dtype, {size.rows, size.out}, 4),
                  weight = random_operand(dtype, {size.out, size.in}, 5, deviation(size.out));
    const Operand dx(dtype, {size.rows, size.in});
    const OnGpu gpu_dy(dy), gpu_weight(weight), gpu_dx(dx);
    linear_backward_input(cpu(), dy.tensor, weight.tensor, dx.tensor);
    linear_backward_input(gpu(), gpu_dy.tensor(), gpu_weight.tensor(), gpu_dx.tensor());
    expect_near(gpu_dx, dx, dtype, "dx");
  });
}

TEST_F(CudaLinearTest, BackwardWeightAddsInF32OverMicroBatches) {
  for_each_case([this](DType dtype, const Size& size) {
    const Operand dweight = random_operand(DType::kF32, {size.out, size.in}, 6),
                  dbias = random_operand(DType::kF32, {size.out}, 7);
    const OnGpu gpu_dweight(dweight), gpu_dbias(dbias);
    for (unsigned micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const Operand x = random_operand(dtype, {size.rows, size.in}, 8 + micro_batch),
                    dy = random_operand(dtype, {size.rows, size.out}, 18 + micro_batch);
      const OnGpu gpu_x(x), gpu_dy(dy);
      linear_backward_weight(cpu(), x.tensor, dy.tensor, dweight.tensor, dbias.tensor);
      linear_backward_weight(gpu(), gpu_x.tensor(), gpu_dy.tensor(), gpu_dweight.tensor(),
                             gpu_dbias.tensor());
      gpu().stream().synchronize();  // the operands go
    }
    // Operands are exact in either type and sums are f32 in both.
    expect_near(gpu_dweight, dweight, DType::kF32, "dweight");
    expect_near(gpu_dbias, dbias, DType::kF32, "dbias");
  });
}

// What is there is not read: it is NaN.
TEST_F(CudaLinearTest, BackwardWeightOverwritesWithTheBitsOfAddingToZeros) {
  for_each_case([this](DType dtype, const Size& size) {
    const Operand x = random_operand(dtype, {size.rows, size.in}, 8),
                  dy = random_operand(dtype, {size.rows, size.out}, 18);
    const auto zeros = [](const Shape& shape) {
      return Operand(DType::kF32, shape, Values(index_of(shape.elements()), 0));
    };
    const OnGpu gpu_x(x), gpu_dy(dy), added(zeros({size.out, size.in})), bias(zeros({size.out}));
    const OnGpu over(Operand(DType::kF32, {size.out, size.in}));
    const OnGpu over_bias(Operand(DType::kF32, {size.out}));
    linear_backward_weight(gpu(), gpu_x.tensor(), gpu_dy.tensor(), added.tensor(), bias.tensor());
    linear_backward_weight(gpu(), gpu_x.tensor(), gpu_dy.tensor(), over.tensor(),
                           over_bias.tensor(), Write::kOverwrite);
    EXPECT_EQ(over.values(gpu()), added.values(gpu()));
    EXPECT_EQ(over_bias.values(gpu()), bias.values(gpu()));
  });
}

TEST_F(CudaLinearTest, BackwardWeightLeavesAbsentBiasAlone) {
  const Operand x = random_operand(DType::kF32, {6, 4}, 30),
                dy = random_operand(DType::kF32, {6, 8}, 31),
                dweight = random_operand(DType::kF32, {8, 4}, 32);
  const OnGpu gpu_x(x), gpu_dy(dy), gpu_dweight(dweight);
  linear_backward_weight(cpu(), x.tensor, dy.tensor, dweight.tensor, none());
  linear_backward_weight(gpu(), gpu_x.tensor(), gpu_dy.tensor(), gpu_dweight.tensor(), none());
  expect_near(gpu_dweight, dweight, DType::kF32, "dweight");
}

TEST_F(CudaLinearTest, ActivationForwardIsTheCpusWithinRounding) {
  for_each_case([this](DType dtype, const Size& size) {
    for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
      const std::int64_t halves = activation == Activation::kSwiglu ? 2 : 1;
      const std::int64_t raised_width = halves * size.out;
      const Operand x = random_operand(dtype, {size.rows, size.in}, 40),
                    weight = random_operand(dtype, {raised_width, size.in}, 41, deviation(size.in)),
                    bias = random_operand(DType::kF32, {raised_width}, 42);
      const OnGpu gpu_x(x), gpu_weight(weight), gpu_bias(bias);
      for (const bool with_bias : {false, true}) {
        const Operand raised(dtype, {size.rows, raised_width}), y(dtype, {size.rows, size.out});
        const OnGpu gpu_raised(raised), gpu_y(y);
        linear_activation_forward(cpu(), activation, x.tensor, weight.tensor,
                                  with_bias ? bias.tensor : none(), raised.tensor, y.tensor);
        linear_activation_forward(gpu(), activation, gpu_x.tensor(), gpu_weight.tensor(),
                                  with_bias ? gpu_bias.tensor() : none(), gpu_raised.tensor(),
                                  gpu_y.tensor());
        expect_near(gpu_raised, raised, dtype, "raised");
        expect_near(gpu_y, y, dtype, "y");
      }
    }
  });
}

TEST_F(CudaLinearTest, ActivationBackwardIsTheCpusWithinRounding) {
  for_each_case([this](DType dtype, const Size& size) {
    for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
      const std::int64_t halves = activation == Activation::kSwiglu ? 2 : 1;
      const Operand dy = random_operand(dtype, {size.rows, size.out}, 50),
                    weight = random_operand(dtype, {size.out, size.in}, 51, deviation(size.out)),
                    raised = random_operand(dtype, {size.rows, halves * size.in}, 52);
      const Operand draised(dtype, {size.rows, halves * size.in});
      const OnGpu gpu_dy(dy), gpu_weight(weight), gpu_raised(raised), gpu_draised(draised);
      linear_activation_backward_input(cpu(), activation, dy.tensor, weight.tensor, raised.tensor,
                                       draised.tensor);
      linear_activation_backward_input(gpu(), activation, gpu_dy.tensor(), gpu_weight.tensor(),
                                       gpu_raised.tensor(), gpu_draised.tensor());
      expect_near(gpu_draised, draised, dtype, "draised");
      EXPECT_EQ(gpu_raised.values(gpu()), raised.values()) << "raised is only read";
    }
  });
}

TEST_F(CudaLinearTest, WithoutRowsNothingIsWritten) {
  const Operand x(DType::kF32, {0, 4}), weight = random_operand(DType::kF32, {8, 4}, 60),
                                        y(DType::kF32, {0, 8}),
                                        dweight = random_operand(DType::kF32, {8, 4}, 61);
  const OnGpu gpu_x(x), gpu_weight(weight), gpu_y(y), gpu_dweight(dweight);
  linear_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(), none(), gpu_y.tensor());
  linear_backward_weight(gpu(), gpu_x.tensor(), gpu_y.tensor(), gpu_dweight.tensor(), none());
  EXPECT_EQ(gpu_dweight.values(gpu()), dweight.values());
  linear_backward_weight(gpu(), gpu_x.tensor(), gpu_y.tensor(), gpu_dweight.tensor(), none(),
                         Write::kOverwrite);
  EXPECT_EQ(gpu_dweight.values(gpu()), Values(32, 0));
  static_cast<void>(gpu_y.fetch(gpu()));
}

TEST_F(CudaLinearTest, WithoutInputsTheResultIsTheCpus) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Operand x(dtype, {6, 0}), weight(dtype, {8, 0}), down(dtype, {0, 8}),
        bias = random_operand(DType::kF32, {8}, 70), dy = random_operand(dtype, {6, 8}, 71),
        dweight(DType::kF32, {8, 0});
    const OnGpu gpu_x(x), gpu_weight(weight), gpu_down(down), gpu_bias(bias), gpu_dy(dy),
        gpu_dweight(dweight);
    for (const bool biased : {false, true}) {
      const Tensor given = biased ? bias.tensor : none();
      const Tensor gpu_given = biased ? gpu_bias.tensor() : none();
      const Operand y(dtype, {6, 8}), sum(dtype, {6, 8}), raised(dtype, {6, 8}),
          active(dtype, {6, 8});
      const OnGpu gpu_y(y), gpu_sum(sum), gpu_raised(raised), gpu_active(active);
      linear_forward(cpu(), x.tensor, weight.tensor, given, y.tensor);
      linear_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(), gpu_given, gpu_y.tensor());
      EXPECT_EQ(gpu_y.values(gpu()), y.values());
      linear_residual_forward(cpu(), x.tensor, weight.tensor, given, dy.tensor, sum.tensor);
      linear_residual_forward(gpu(), gpu_x.tensor(), gpu_weight.tensor(), gpu_given,
                              gpu_dy.tensor(), gpu_sum.tensor());
      EXPECT_EQ(gpu_sum.values(gpu()), sum.values());
      linear_activation_forward(cpu(), Activation::kGelu, x.tensor, weight.tensor, given,
                                raised.tensor, active.tensor);
      linear_activation_forward(gpu(), Activation::kGelu, gpu_x.tensor(), gpu_weight.tensor(),
                                gpu_given, gpu_raised.tensor(), gpu_active.tensor());
      EXPECT_EQ(gpu_raised.values(gpu()), raised.values());
      expect_near(gpu_active, active, dtype, "GELU of the bias");
    }
    const Operand dx(dtype, {6, 8}), dbias(DType::kF32, {8});
    const OnGpu gpu_dx(dx), gpu_dbias(dbias);
    linear_backward_input(gpu(), gpu_x.tensor(), gpu_down.tensor(), gpu_dx.tensor());
    EXPECT_EQ(gpu_dx.values(gpu()), Values(48, 0));
    linear_activation_backward_input(gpu(), Activation::kGelu, gpu_x.tensor(), gpu_down.tensor(),
                                     gpu_dy.tensor(), gpu_dx.tensor());
    EXPECT_EQ(gpu_dx.values(gpu()), Values(48, 0));
    linear_backward_weight(cpu(), x.tensor, dy.tensor, dweight.tensor, dbias.tensor,
                           Write::kOverwrite);
    linear_backward_weight(gpu(), gpu_x.tensor(), gpu_dy.tensor(), gpu_dweight.tensor(),
                           gpu_dbias.tensor(), Write::kOverwrite);
    expect_near(gpu_dbias, dbias, DType::kF32, "the bias's gradient");
  }
}

MatmulSpec square(std::int64_t n, DType dtype) {
  return {.m = n,
          .n = n,
          .k = n,
          .a = {.row = n},
          .b = {.row = n},
          .c = {.row = n},
          .operands = dtype,
          .result = dtype};
}

class CudaMatmulsTest : public GpuTest {
 protected:
  cuda::Matmuls& matmuls() { return cuda::backend_of(gpu()).matmuls(); }
};

TEST_F(CudaMatmulsTest, MakesOnePlanPerSpecification) {
  const OnGpu a(random_operand(DType::kF32, {8, 8}, 1)), c(Operand(DType::kF32, {8, 8}));
  const cuda::FusedMatmulSpec spec = {square(8, DType::kF32)};
  for (int i = 0; i < 3; ++i) matmuls().run(spec, {.a = a.data(), .b = a.data(), .c = c.data()});
  EXPECT_EQ(matmuls().size(), 1U);
  EXPECT_TRUE(matmuls().supports(spec));
  EXPECT_EQ(matmuls().size(), 1U);
  cuda::FusedMatmulSpec transposed = spec;
  transposed.matmul.b = {.row = 1, .column = 8};
  EXPECT_TRUE(matmuls().supports(transposed));
  EXPECT_EQ(matmuls().size(), 2U);
}

TEST_F(CudaMatmulsTest, RunsBatchesAndStridesAndAccumulates) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Operand a = random_operand(dtype, {3, 5, 20}, 2),
                  b = random_operand(dtype, {3, 9, 11}, 3),
                  c = random_operand(DType::kF32, {3, 5, 10}, 4);
    const OnGpu gpu_a(a), gpu_b(b), gpu_c(c);
    const MatmulSpec spec = {.batches = 3,
                             .m = 5,
                             .n = 9,
                             .k = 7,
                             .a = {20, 1, 100},
                             .b = {1, 11, 99},
                             .c = {10, 1, 50},
                             .operands = dtype,
                             .accumulate = true};
    const std::size_t column = 2 * size_of(dtype);  // the matmul reads a from its third column on
    matmuls_of(cpu()).run(spec, a.tensor.as<std::byte>() + column, b.tensor.data, nullptr,
                          c.tensor.data);
    matmuls().run(
        {spec},
        {.a = gpu_a.tensor().as<std::byte>() + column, .b = gpu_b.data(), .c = gpu_c.data()});
    EXPECT_LE(relative_error(gpu_c.values(gpu()), c.values()), 1e-5) << to_string(spec);
  }
}

TEST_F(CudaMatmulsTest, RunsEveryTransposition) {
  constexpr std::int64_t kM = 24, kN = 40, kK = 72;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        const Operand a = random_operand(dtype, {kM * kK}, 5),
                      b = random_operand(dtype, {kK * kN}, 6), c(dtype, {kM, kN});
        const OnGpu gpu_a(a), gpu_b(b), gpu_c(c);
        MatmulSpec spec;
        spec.m = kM;
        spec.n = kN;
        spec.k = kK;
        spec.operands = spec.result = dtype;
        spec.c = {.row = kN};
        spec.a = a_transposed ? MatmulLayout{.row = 1, .column = kM} : MatmulLayout{.row = kK};
        spec.b = b_transposed ? MatmulLayout{.row = 1, .column = kK} : MatmulLayout{.row = kN};
        matmuls_of(cpu()).run(spec, a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
        matmuls().run({spec}, {.a = gpu_a.data(), .b = gpu_b.data(), .c = gpu_c.data()});
        EXPECT_LE(relative_error(gpu_c.values(gpu()), c.values()), gpu_tolerance(dtype))
            << to_string(spec);
      }
    }
  }
}

TEST_F(CudaMatmulsTest, RepeatsItsBitsAtAnyPlaceInMemory) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Operand a = random_operand(dtype, {64, 64}, 7), c(dtype, {64, 64});
    const cuda::FusedMatmulSpec spec = {square(64, dtype)};
    std::vector<Values> results;
    for (const std::size_t offset : {0U, 0U, 16U, 48U, 256U}) {
      const OnGpu gpu_a(a, offset), gpu_c(c, offset);
      matmuls().run(spec, {.a = gpu_a.data(), .b = gpu_a.data(), .c = gpu_c.data()});
      results.push_back(gpu_c.values(gpu()));
    }
    EXPECT_EQ(matmuls().size(), dtype == DType::kF32 ? 1U : 2U);
    EXPECT_THAT(results, testing::Each(results.front()));
  }
}

TEST_F(CudaMatmulsTest, TakesOperandsThatAreNotAligned) {
  const Operand a = random_operand(DType::kBf16, {64, 64}, 8), c(DType::kBf16, {64, 64});
  const cuda::FusedMatmulSpec spec = {square(64, DType::kBf16)};
  const OnGpu aligned_a(a), aligned_c(c), odd_a(a, 2), odd_c(c, 6);
  matmuls().run(spec, {.a = aligned_a.data(), .b = aligned_a.data(), .c = aligned_c.data()});
  matmuls().run(spec, {.a = odd_a.data(), .b = odd_a.data(), .c = odd_c.data()});
  EXPECT_EQ(matmuls().size(), 2U) << "a plan of its own";
  EXPECT_LE(relative_error(odd_c.values(gpu()), aligned_c.values(gpu())), 1e-2);
}

TEST_F(CudaMatmulsTest, RoundsToTf32OnlyOnRequest) {
  const Operand a = random_operand(DType::kF32, {96, 96}, 9), c(DType::kF32, {96, 96});
  const OnGpu gpu_a(a), gpu_c(c);
  const cuda::FusedMatmulSpec spec = {square(96, DType::kF32)};
  matmuls_of(cpu()).run(spec.matmul, a.tensor.data, a.tensor.data, nullptr, c.tensor.data);
  EXPECT_FALSE(cuda::backend_of(gpu()).tf32());
  matmuls().run(spec, {.a = gpu_a.data(), .b = gpu_a.data(), .c = gpu_c.data()});
  EXPECT_LE(relative_error(gpu_c.values(gpu()), c.values()), 1e-5);
  cuda::backend_of(gpu()).set_tf32(true);
  matmuls().run(spec, {.a = gpu_a.data(), .b = gpu_a.data(), .c = gpu_c.data()});
  EXPECT_EQ(matmuls().size(), 2U);
  EXPECT_LE(relative_error(gpu_c.values(gpu()), c.values()), 2e-3);
}

TEST_F(CudaMatmulsTest, RefusesWhatTheLibraryLacksByNamingTheMatmul) {
  cuda::FusedMatmulSpec spec = {square(8, DType::kF32)};
  spec.matmul.batches = 2;
  spec.matmul.bias = true;
  try {
    static_cast<void>(matmuls().supports(spec));
    FAIL() << "batches with a bias";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), testing::HasSubstr("2 x f32 [8, 8] x [8, 8]"));
    EXPECT_THAT(error.what(), testing::HasSubstr("needs a single matmul"));
  }
}

TEST_F(CudaMatmulsTest, GivesStagesOfOthersStreamHandleAndWorkspace) {
  cuda::Context& context = cuda::backend_of(gpu());
  EXPECT_EQ(context.device(), kGpu);
  EXPECT_EQ(context.stream().native(), gpu().stream().native());
  EXPECT_NE(context.cublas(), nullptr);
  EXPECT_EQ(gpu().native_blas(), context.cublas());
  EXPECT_EQ(cpu().native_blas(), nullptr);
  EXPECT_NE(context.workspace(), nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(context.workspace()) % 256, 0U);
  EXPECT_GE(context.compute_capability(), 80);
  EXPECT_THAT(cuda::libraries(), testing::HasSubstr("cuBLASLt "));
}

}  // namespace
}  // namespace sluice
