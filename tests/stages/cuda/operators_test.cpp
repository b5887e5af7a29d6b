// Element-wise operators, norms and rotary positions on a GPU against the CPU's.
#include "stages/cuda_context/context.hpp"
#include "stages/cuda_kernels/kernels.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

// One element; less than a pack; packs and a rest; more than a block.
constexpr std::int64_t kSizes[] = {1, 7, 64, 131, 9001};

// Where both compute the same formula in f32 and round once.
double element_tolerance(DType dtype) { return dtype == DType::kBf16 ? 1e-3 : 1e-6; }

class CudaElementTest : public GpuCompareTest {
 protected:
  // body(dtype, size)
  template <typename Body>
  void for_each_case(const Body& body) {
    for (const DType dtype : kOperandTypes) {
      for (const std::int64_t size : kSizes) {
        SCOPED_TRACE(fmt::format("{} {}", name_of(dtype), size));
        body(dtype, size);
      }
    }
  }
  void check_pointwise(double tolerance_scale, Pointwise function) {
    for_each_case([&](DType dtype, std::int64_t size) {
      const double tolerance = tolerance_scale * element_tolerance(dtype);
      const Operand x = random_operand(dtype, {size}, 1, 3), y(dtype, {size});
      const Operand dy = random_operand(dtype, {size}, 2), dx(dtype, {size});
      compare_shifted({&x, &y}, tolerance, [&](ComputeContext& ctx, const Tensors& at) {
        pointwise_forward(ctx, function, at[0], at[1]);
      });
      compare_shifted({&x, &dy, &dx}, tolerance, [&](ComputeContext& ctx, const Tensors& at) {
        pointwise_backward(ctx, function, at[0], at[1], at[2]);
      });
      compare({&x, &dy}, tolerance, [&](ComputeContext& ctx, const Tensors& at) {
        pointwise_backward(ctx, function, at[0], at[1], at[1]);  // in place
      });
    });
  }
};

TEST_F(CudaElementTest, EachFunctionIsTheCpus) {
  for (int i = 0; i < static_cast<int>(Pointwise::kCount); ++i) {
    SCOPED_TRACE(i);
    const auto function = static_cast<Pointwise>(i);
    check_pointwise(function == Pointwise::kRelu ? kExact : 1, function);
  }
}

TEST_F(CudaElementTest, GeluKeepsItsLimitsAndNan) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  for (const DType dtype : kOperandTypes) {
    const OnGpu x(Operand(dtype, {5}, {200, -200, 0, nan, infinity})), y(Operand(dtype, {5}));
    pointwise_forward(gpu(), Pointwise::kGeluTanh, x.tensor(), y.tensor());
    const Values values = y.values(gpu());
    EXPECT_EQ(values[0], 200);
    EXPECT_NEAR(values[1], 0, 1e-30);
    EXPECT_EQ(values[2], 0);
    EXPECT_TRUE(std::isnan(values[3]));
    EXPECT_FALSE(std::isfinite(values[4]));
  }
}

TEST_F(CudaElementTest, SwigluIsTheCpus) {
  for (const DType dtype : kOperandTypes) {
    for (const std::int64_t hidden : {1, 37, 96, 2056}) {
      SCOPED_TRACE(hidden);
      const std::int64_t rows = 5;
      const Operand x = random_operand(dtype, {rows, 2 * hidden}, 3, 2), y(dtype, {rows, hidden});
      const Operand dy = random_operand(dtype, {rows, hidden}, 4), dx(dtype, {rows, 2 * hidden});
      compare_shifted(
          {&x, &y}, element_tolerance(dtype),
          [](ComputeContext& ctx, const Tensors& at) { swiglu_forward(ctx, at[0], at[1]); });
      compare_shifted({&x, &dy, &dx}, element_tolerance(dtype),
                      [](ComputeContext& ctx, const Tensors& at) {
                        swiglu_backward(ctx, at[0], at[1], at[2]);
                      });
    }
  }
}

// More than a grid has: blocks take several rows each.
TEST_F(CudaElementTest, SwigluOfManyRowsIsTheCpus) {
  const std::int64_t rows = 70001;
  const Operand x = random_operand(DType::kF32, {rows, 2}, 3, 2), y(DType::kF32, {rows, 1});
  compare({&x, &y}, element_tolerance(DType::kF32),
          [](ComputeContext& ctx, const Tensors& at) { swiglu_forward(ctx, at[0], at[1]); });
}

TEST_F(CudaElementTest, AddAndConvertAreTheCpusToTheBit) {
  for_each_case([&](DType dtype, std::int64_t size) {
    const Operand x = random_operand(dtype, {size}, 5), y = random_operand(DType::kF32, {size}, 6);
    const Operand narrow(DType::kBf16, {size}), wide(DType::kF32, {size});
    const Operand same = random_operand(dtype, {size}, 7);
    compare_shifted({&x, &y, &narrow, &wide, &same}, kExact,
                    [](ComputeContext& ctx, const Tensors& at) {
                      add(ctx, at[0], at[1]);
                      convert(ctx, at[1], at[2]);
                      convert(ctx, at[2], at[3]);
                      add(ctx, at[0], at[4]);
                    });
  });
}

TEST_F(CudaElementTest, RoundsToBf16AsTheCpuDoes) {
  const double infinity = std::numeric_limits<double>::infinity();
  // Ties to even either way, the largest numbers, a denormal.
  const Values values = {1.00390625, 1.01171875, 3.3961775e38, 3.4028235e38,
                         -infinity,  1e-40,      -0.0,         0.1};
  const OnGpu x(Operand(DType::kF32, {8}, values)), y(Operand(DType::kBf16, {8}));
  convert(gpu(), x.tensor(), y.tensor());
  const Operand result = y.fetch(gpu());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(result.tensor.as<Bf16>()[i].bits, to_bf16(static_cast<float>(values[i])).bits) << i;
  }
}

TEST_F(CudaElementTest, NanStaysNanInBf16) {  // any: a GPU's is 0x7FFF
  const OnGpu x(Operand(DType::kF32, {8}, Values(8, std::nan("")))), y(Operand(DType::kBf16, {8}));
  convert(gpu(), x.tensor(), y.tensor());
  const Operand result = y.fetch(gpu());
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(std::isnan(to_float(result.tensor.as<Bf16>()[i]))) << i;
  }
}

TEST_F(CudaElementTest, DropoutDropsWhatTheCpuDrops) {
  for_each_case([&](DType dtype, std::int64_t size) {
    for (const std::uint64_t first :
         {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{4003}, (std::uint64_t{1} << 34) + 2}) {
      SCOPED_TRACE(first);
      const Dropout mask = {0.3F, {7, random_site(2, 1), 11}, first};
      const Operand x = random_operand(dtype, {size}, 7), y(dtype, {size});
      compare_shifted({&x, &y}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
        dropout(ctx, at[0], mask, at[1]);
      });
      compare({&x}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
        dropout(ctx, at[0], mask, at[0]);  // in place
      });
    }
  });
}

// Rounded, and added to a residual, both of f32 with operands of bf16 and of f32.
TEST_F(CudaElementTest, DropoutBetweenTypesIsTheCpusToTheBit) {
  for_each_case([&](DType dtype, std::int64_t size) {
    for (const std::uint64_t first : {std::uint64_t{4}, std::uint64_t{4003}}) {
      const Dropout mask = {0.3F, {7, random_site(2, 1), 11}, first};
      const Operand wide = random_operand(DType::kF32, {size}, 8), rounded(dtype, {size});
      compare_shifted({&wide, &rounded}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
        dropout(ctx, at[0], mask, at[1]);
      });
      for (const DType stream : {DType::kF32, dtype}) {
        const Operand x = random_operand(dtype, {size}, 7), sum(stream, {size}),
                      residual = random_operand(stream, {size}, 9);
        compare_shifted({&x, &residual, &sum}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
          dropout_residual(ctx, at[0], mask, at[1], at[2]);
        });
        compare({&x, &residual}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
          dropout_residual(ctx, at[0], mask, at[1], at[1]);  // in place
        });
      }
    }
  });
}

TEST_F(CudaElementTest, DropoutOfProbabilityZeroIsTheIdentity) {
  const Operand x = random_operand(DType::kBf16, {77}, 8), y(DType::kBf16, {77});
  compare({&x, &y}, kExact,
          [](ComputeContext& ctx, const Tensors& at) { dropout(ctx, at[0], {}, at[1]); });
}

TEST_F(CudaElementTest, RotaryIsTheCpusToTheBit) {
  for (const DType dtype : kOperandTypes) {
    for (const int head_dim : {2, 6, 16, 64}) {
      SCOPED_TRACE(head_dim);
      const AttentionShape shape = {
          .samples = 2, .sequence = 5, .heads = 2, .kv_heads = 1, .head_dim = head_dim};
      const Operand qkv = random_operand(dtype, {shape.rows(), shape.packed_width()}, 9);
      for (const bool backward : {false, true}) {
        compare_shifted({&qkv}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
          rotary(ctx, shape, {100}, at[0], backward);
        });
      }
    }
  }
}

TEST_F(CudaElementTest, ScaledRotaryIsTheCpusToTheBit) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 70, .heads = 2, .kv_heads = 1, .head_dim = 16};
  const RotaryPositions positions = {
      .base = 100,
      .scaling = {.kind = RotaryScaling::Kind::kLlama3, .factor = 8, .original_context = 32}};
  const Operand qkv = random_operand(DType::kF32, {shape.rows(), shape.packed_width()}, 9);
  compare_shifted({&qkv}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
    rotary(ctx, shape, positions, at[0], false);
  });
}

// One row and many (more than a slice of the sums over rows); odd heads, packs, wide ones.
TEST_F(CudaElementTest, QueryKeyNormIsTheCpus) {
  for (const DType dtype : kOperandTypes) {
    for (const int head_dim : {1, 6, 7, 64, 136}) {
      for (const std::int64_t sequence : {1, 67}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(dtype), head_dim, sequence));
        const AttentionShape shape = {
            .samples = 2, .sequence = sequence, .heads = 4, .kv_heads = 2, .head_dim = head_dim};
        const Shape packed = {shape.rows(), shape.packed_width()};
        const Operand qkv = random_operand(dtype, packed, 1),
                      dqkv = random_operand(dtype, packed, 2);
        const Operand query = random_operand(DType::kF32, {head_dim}, 3);
        const Operand key = random_operand(DType::kF32, {head_dim}, 4);
        const Operand raw(dtype, {shape.rows(), 6 * head_dim}),
            stats(DType::kF32, {shape.rows(), 6});
        const Operand dgains(DType::kF32, {2, head_dim});
        compare_shifted(
            {&qkv, &dqkv, &query, &key, &raw, &stats, &dgains}, gpu_tolerance(dtype),
            [&](ComputeContext& ctx, const Tensors& at) {
              query_key_norm_forward(ctx, shape, at[0], at[2], at[3], 1e-5F, at[4], at[5]);
              query_key_norm_backward(ctx, shape, at[4], at[2], at[3], at[5], at[1], at[6]);
            });
      }
    }
  }
}

class CudaNormTest : public GpuCompareTest {
 protected:
  // body(dtype, rows, width): one column; odd; packs; more columns than a warp's packs and more
  // rows than a slice of the sums over rows; as many as a warp keeps in half of its registers, in
  // all, and more; more than a block has threads for.
  template <typename Body>
  void for_each_case(const Body& body) {
    struct Size {
      std::int64_t rows, width;
    };
    for (const DType dtype : kOperandTypes) {
      for (const Size& size : {Size{3, 1},
                               {5, 37},
                               {6, 64},
                               {201, 136},
                               {9, 1100},
                               {5, 768},
                               {3, 1600},
                               {2, 2056},
                               {2, 4104}}) {
        SCOPED_TRACE(fmt::format("{} [{}, {}]", name_of(dtype), size.rows, size.width));
        body(dtype, size.rows, size.width);
      }
    }
  }
  // The types of a stream that an operator of this type takes.
  static std::vector<DType> streams(DType dtype) {
    return dtype == DType::kF32 ? std::vector{DType::kF32} : std::vector{DType::kF32, dtype};
  }
  // A residual stream away from zero.
  static Operand stream(std::int64_t rows, std::int64_t width, DType type = DType::kF32) {
    const Operand x = random_operand(DType::kF32, {rows, width}, 10);
    Values values = x.values();
    for (double& value : values) value += 0.5;
    return Operand(type, {rows, width}, values);
  }
};

TEST_F(CudaNormTest, ForwardIsTheCpus) {
  for_each_case([&](DType dtype, std::int64_t rows, std::int64_t width) {
    const Operand gamma = random_operand(DType::kF32, {width}, 11),
                  beta = random_operand(DType::kF32, {width}, 12);
    for (const DType stream_type : streams(dtype)) {
      const Operand x = stream(rows, width, stream_type), y(dtype, {rows, width});
      const Operand stats(DType::kF32, {rows, 2}), scale(DType::kF32, {rows, 1});
      compare_shifted({&x, &gamma, &beta, &y, &stats}, gpu_tolerance(dtype),
                      [&](ComputeContext& ctx, const Tensors& at) {
                        layer_norm_forward(ctx, at[0], at[1], at[2], 1e-5F, at[3], at[4]);
                      });
      compare_shifted({&x, &gamma, &y, &scale}, gpu_tolerance(dtype),
                      [&](ComputeContext& ctx, const Tensors& at) {
                        rms_norm_forward(ctx, at[0], at[1], 1e-5F, at[2], at[3]);
                      });
    }
  });
}

TEST_F(CudaNormTest, GradientsAreTheCpus) {
  for_each_case([&](DType dtype, std::int64_t rows, std::int64_t width) {
    for (const DType stream_type : streams(dtype)) {
      const Operand x = stream(rows, width, stream_type),
                    dy = random_operand(dtype, {rows, width}, 14);
      const Operand gamma = random_operand(DType::kF32, {width}, 15),
                    beta = random_operand(DType::kF32, {width}, 16), y(dtype, {rows, width});
      const Operand stats(DType::kF32, {rows, 2}), scale(DType::kF32, {rows, 1});
      layer_norm_forward(cpu(), x.tensor, gamma.tensor, beta.tensor, 1e-3F, y.tensor, stats.tensor);
      rms_norm_forward(cpu(), x.tensor, gamma.tensor, 1e-3F, y.tensor, scale.tensor);
      const Operand residual = random_operand(stream_type, {rows, width}, 17),
                    dx(stream_type, {rows, width});
      const Operand dgamma = random_operand(DType::kF32, {width}, 19),
                    dbeta = random_operand(DType::kF32, {width}, 20),
                    rms_dgamma = random_operand(DType::kF32, {width}, 21);
      const double close = stream_type == DType::kF32 ? 1e-5 : gpu_tolerance(stream_type);
      compare_shifted({&dy, &x, &gamma, &stats, &residual, &dx, &dgamma, &dbeta}, close,
                      [](ComputeContext& ctx, const Tensors& at) {
                        layer_norm_backward(
                            ctx, at[0], at[1], at[2], at[3],
                            {.dx = at[5], .residual = at[4], .dgamma = at[6], .dbeta = at[7]});
                      });
      compare_shifted({&dy, &x, &gamma, &scale, &dx, &rms_dgamma}, close,
                      [](ComputeContext& ctx, const Tensors& at) {
                        rms_norm_backward(ctx, at[0], at[1], at[2], at[3],
                                          {.dx = at[4], .dgamma = at[5]});
                      });
      const Operand over(DType::kF32, {width}), over_beta(DType::kF32, {width}),
          over_rms(DType::kF32, {width});
      compare_shifted({&dy, &x, &gamma, &stats, &scale, &over, &over_beta, &over_rms}, close,
                      [](ComputeContext& ctx, const Tensors& at) {
                        layer_norm_backward(
                            ctx, at[0], at[1], at[2], at[3],
                            {.dgamma = at[5], .dbeta = at[6], .write = Write::kOverwrite});
                        rms_norm_backward(ctx, at[0], at[1], at[2], at[4],
                                          {.dgamma = at[7], .write = Write::kOverwrite});
                      });
    }
  });
}

// A call for one result has the bits of a call for all; in place, and rounded as convert() rounds.
TEST_F(CudaNormTest, GradientsDoNotDependOnWhichAreWanted) {
  const auto check = [&](DType dtype, std::int64_t rows, std::int64_t width, DType stream_type) {
    const OnGpu x(stream(rows, width, stream_type)), dy(random_operand(dtype, {rows, width}, 14));
    const OnGpu gamma(random_operand(DType::kF32, {width}, 15)),
        stats(random_operand(DType::kF32, {rows, 2}, 16));
    const Operand residual = random_operand(stream_type, {rows, width}, 17);
    const Operand sums = random_operand(DType::kF32, {width}, 18);
    const OnGpu from(residual), all(residual), alone(residual), in_place(residual);
    const OnGpu dgamma(sums), dbeta(sums), other_dgamma(sums), other_dbeta(sums);
    const Operand zeros(DType::kBf16, {rows, width}, Values(index_of(rows * width)));
    const OnGpu rounded(zeros), converted(zeros);
    const auto run = [&](const NormGradients& wanted) {
      layer_norm_backward(gpu(), dy.tensor(), x.tensor(), gamma.tensor(), stats.tensor(), wanted);
    };
    const bool rounds = stream_type == DType::kF32;
    run({.dx = all.tensor(),
         .residual = from.tensor(),
         .rounded = rounds ? rounded.tensor() : Tensor{},
         .dgamma = dgamma.tensor(),
         .dbeta = dbeta.tensor()});
    run({.dx = alone.tensor(), .residual = from.tensor()});
    run({.dx = in_place.tensor(), .residual = in_place.tensor()});
    run({.dgamma = other_dgamma.tensor(), .dbeta = other_dbeta.tensor()});
    const auto values = [&](const OnGpu& operand) { return operand.fetch(gpu()).values(); };
    EXPECT_EQ(values(alone), values(all));
    EXPECT_EQ(values(in_place), values(all));
    EXPECT_EQ(values(other_dgamma), values(dgamma));
    EXPECT_EQ(values(other_dbeta), values(dbeta));
    if (!rounds) return;
    convert(gpu(), all.tensor(), converted.tensor());
    EXPECT_EQ(values(rounded), values(converted));
  };
  for_each_case([&](DType dtype, std::int64_t rows, std::int64_t width) {
    for (const DType stream_type : streams(dtype)) check(dtype, rows, width, stream_type);
  });
  check(DType::kBf16, 8200, 8, DType::kF32);  // slices of more rows
}

// Scratch is full of NaN before the GPU's sums: what is read there before it is written shows.
void sum_columns(ComputeContext& ctx, const Tensors& at) {
  const Tensor &dy = at[0], &sums = at[1];
  const std::int64_t width = sums.elements(), rows = dy.elements() / width;
  if (ctx.device() == kGpu) {
    const std::size_t scratch = cuda::column_sums_workspace(rows, width);
    if (scratch > 0) {
      const std::vector<std::byte> nan(scratch, std::byte{0xFF});
      copy_now(kGpu, ctx.workspace(scratch), nan.data(), scratch);
    }
    cuda::sum_columns(ctx, dy, sums);
    return;
  }
  for (std::int64_t column = 0; column < width; ++column) {
    auto sum = static_cast<double>(sums.at(column));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t i = row * width + column;
      sum += dy.spec.dtype == DType::kBf16 ? static_cast<double>(to_float(dy.as<Bf16>()[i]))
                                           : static_cast<double>(dy.at(i));
    }
    sums.at(column) = static_cast<float>(sum);
  }
}

TEST_F(CudaNormTest, ColumnSumsAddToWhatIsThere) {
  for_each_case([&](DType dtype, std::int64_t rows, std::int64_t width) {
    const Operand dy = random_operand(dtype, {rows, width}, 22),
                  sums = random_operand(DType::kF32, {width}, 23);
    compare_shifted({&dy, &sums}, 1e-5, sum_columns);
  });
}

// Slices that a block's rows do not divide, as many as there are at most, and more tiles of columns
// than one launch takes: blocks of each leave the tickets as the next finds them.
TEST_F(CudaNormTest, ColumnSumsOfManySlicesAndTilesAreRight) {
  struct Size {
    std::int64_t rows, width;
  };
  for (const DType dtype : kOperandTypes) {
    for (const Size& size : {Size{4097, 24}, {70, 16 * cuda::Context::kTickets + 3}, {5000, 3}}) {
      SCOPED_TRACE(fmt::format("{} [{}, {}]", name_of(dtype), size.rows, size.width));
      const Operand dy = random_operand(dtype, {size.rows, size.width}, 24),
                    sums = random_operand(DType::kF32, {size.width}, 25);
      compare_shifted({&dy, &sums}, 1e-5, sum_columns);
    }
  }
}

// Also where there is no row.
TEST_F(CudaNormTest, SumsOverwriteWithTheBitsOfAddingToZeros) {
  for (const DType dtype : kOperandTypes) {
    for (const std::int64_t rows : {0, 5, 201, 5000}) {
      SCOPED_TRACE(rows);
      const Operand dy = random_operand(dtype, {rows, 136}, 27);
      const OnGpu values(dy), added(Operand(DType::kF32, {136}, Values(136, 0))),
          over(Operand(DType::kF32, {136}));
      cuda::sum_columns(gpu(), values.tensor(), added.tensor());
      cuda::sum_columns(gpu(), values.tensor(), over.tensor(), Write::kOverwrite);
      EXPECT_EQ(over.values(gpu()), added.values(gpu()));
    }
  }
}

TEST_F(CudaNormTest, ColumnSumsAreTheSameWhateverTheAlignment) {
  for (const DType dtype : kOperandTypes) {
    const Operand dy = random_operand(dtype, {1000, 136}, 26), sums(DType::kF32, {136});
    const OnGpu wide(dy), narrow(dy, size_of(dtype)), one(sums), other(sums, sizeof(float));
    cuda::sum_columns(gpu(), wide.tensor(), one.tensor());
    cuda::sum_columns(gpu(), narrow.tensor(), other.tensor());
    EXPECT_TRUE(same_bits(one.fetch(gpu()), other.fetch(gpu()))) << name_of(dtype);
  }
}

}  // namespace
}  // namespace sluice
