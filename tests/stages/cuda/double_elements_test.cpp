// Dropout and AdamW on a GPU against double precision, with the random numbers that philox() gives
// on the host.
#include <bit>
#include <cstdint>

#include "stages/compute/internal_operators.hpp"
#include "tests/stages/cuda/double_tools.hpp"

namespace sluice {
namespace {

std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> sizes = {1, 7, 131, 9001};
  if (real_shapes()) sizes.push_back(1024 * 768);
  return sizes;
}

// Word `element` of the stream of a key: four words a block.
std::uint32_t word_of(const RandomKey& key, std::uint64_t element) {
  return philox(key, 0, element / 4)[element % 4];
}

// By the definition: an element is kept if its number in [0, 1) is at least the probability.
bool keeps(const Dropout& mask, std::size_t i) {
  return to_unit(word_of(mask.key, mask.first_element + i)) >= mask.probability;
}

// Numbers are not 0, so that what is dropped shows.
Operand not_zero(DType dtype, std::int64_t size, unsigned seed) {
  Operand x = random_operand(dtype, {size}, seed);
  const Values values = x.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) x.set(i, 1);
  }
  return x;
}

// Kept values are the type's nearest to value * factor, to the bit; the rest are 0.
TEST_F(CudaDoubleTest, Dropout) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t size : sizes()) {
      for (const float probability : {0.1F, 0.5F}) {
        const Dropout mask = {probability, {7, random_site(2, 1), 11}, 4003};
        SCOPED_TRACE(fmt::format("{} {}, {}", name_of(dtype), size, probability));
        const Operand x = not_zero(dtype, size, 1), on_cpu(dtype, {size});
        const Values before = x.values();
        Operand expected(dtype, {size});
        const float factor = 1 / (1 - probability);
        for (std::size_t i = 0; i < before.size(); ++i) {
          expected.set(i, keeps(mask, i) ? static_cast<float>(before[i]) * factor : 0);
        }
        const OnGpu gx(x), gy(Operand(dtype, {size}));
        dropout(gpu(), gx.tensor(), mask, gy.tensor());
        expect_equal(gy, expected.values(), "y");
        dropout(cpu(), x.tensor, mask, on_cpu.tensor);
        EXPECT_EQ(gy.values(gpu()), on_cpu.values());
        if (size < 9001) continue;
        const Values found = gy.values(gpu());
        const auto kept = static_cast<double>(
            std::count_if(found.begin(), found.end(), [](double y) { return y != 0; }));
        const auto all = static_cast<double>(size), share = 1 - static_cast<double>(probability);
        EXPECT_NEAR(kept / all, share, 5 * std::sqrt(share * (1 - share) / all));
      }
    }
  }
}

TEST_F(CudaDoubleTest, DropoutToTheResidual) {
  for (const auto& [dtype, stream] : kStreams) {
    for (const std::int64_t size : sizes()) {
      SCOPED_TRACE(fmt::format("{}, {} {}", name_of(dtype), name_of(stream), size));
      const Dropout mask = {0.3F, {7, random_site(2, 1), 11}, 4003};
      const Operand x = not_zero(dtype, size, 1), residual = random_operand(stream, {size}, 2),
                    on_cpu(stream, {size});
      Values y = residual.values();
      const Values before = x.values();
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (keeps(mask, i)) y[i] += before[i] / (1 - static_cast<double>(mask.probability));
      }
      const OnGpu gx(x), gresidual(residual), gy(Operand(stream, {size}));
      dropout_residual(gpu(), gx.tensor(), mask, gresidual.tensor(), gy.tensor());
      expect_within(gy, y, allowed_once(stream), "y");
      dropout_residual(cpu(), x.tensor, mask, residual.tensor, on_cpu.tensor);
      EXPECT_EQ(gy.values(gpu()), on_cpu.values());
    }
  }
}

constexpr AdamWStep kStep = {.learning_rate = 0.01F,
                             .weight_decay = 0.1F,
                             .correction1 = 0.19F,
                             .correction2 = 0.0975F,
                             .grad_scale = 0.5F,
                             .seed = 77,
                             .step = 3};

// A parameter whose run starts at element kFirst of it, with what AdamW makes of it.
struct AdamWCase {
  static constexpr std::uint64_t kSite = 13, kFirst = 1003;
  AdamWCase(std::int64_t size, DType moments)
      : value(random_operand(DType::kF32, {size}, 1)),
        grad(random_operand(DType::kF32, {size}, 2)),
        first(random_operand(moments, {size}, 3, 0.1)),
        second(moments, {size}, squares(random_values(size, 4, moments, 0.3))),
        new_value(value.values()),
        new_first(first.values()),
        new_second(second.values()),
        first_error(index_of(size)) {
    const Values gradients = grad.values();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const double g = gradients[i] * static_cast<double>(kStep.grad_scale);
      const auto beta1 = static_cast<double>(kStep.beta1), beta2 = static_cast<double>(kStep.beta2);
      first_error[i] = 0x1p-22 * (std::abs(beta1 * new_first[i]) + std::abs((1 - beta1) * g));
      new_first[i] = beta1 * new_first[i] + (1 - beta1) * g;
      new_second[i] = beta2 * new_second[i] + (1 - beta2) * g * g;
      const double mean = new_first[i] / static_cast<double>(kStep.correction1);
      const double size_of_step = std::sqrt(new_second[i] / static_cast<double>(kStep.correction2));
      const auto rate = static_cast<double>(kStep.learning_rate);
      new_value[i] *= 1 - rate * static_cast<double>(kStep.weight_decay);
      new_value[i] -= rate * mean / (size_of_step + static_cast<double>(kStep.epsilon));
    }
  }
  static Values squares(Values values) {
    for (double& each : values) each = each * each + 0.01;
    return values;
  }
  Operand value, grad, first, second;
  Values new_value, new_first, new_second;
  Values first_error;  // of fp32: the two terms may cancel
};

// The bf16 number that the random half-word picks of the two beside `exact`: it is added below
// bf16's last bit, and what is below that is cut off. `error`: fp32's own, by which it may pick the
// other.
::testing::AssertionResult is_rounded_at_random(double found, double exact, double error,
                                                std::uint32_t half) {
  const auto cut = [&](double value) {
    const auto sum = std::bit_cast<std::uint32_t>(static_cast<float>(value)) + half;
    return static_cast<double>(std::bit_cast<float>(sum & 0xFFFF0000U));
  };
  if (cut(exact - error) <= found && found <= cut(exact + error)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << found << " from " << exact << " with " << half;
}

// Values within fp32, their copy the nearest bf16 of what was stored; moments within fp32, or where
// they are bf16 within one rounding, and by the random numbers of their places.
TEST_F(CudaDoubleTest, AdamW) {
  for (const DType moments : kTypes) {
    for (const std::int64_t size : sizes()) {
      SCOPED_TRACE(fmt::format("moments {}, {}", name_of(moments), size));
      const AdamWCase all(size, moments);
      AdamWStep step = kStep;
      step.moments = moments;
      const OnGpu value(all.value), grad(all.grad), first(all.first), second(all.second),
          copy(Operand(DType::kBf16, {size}));
      const UpdateRun run = {.value = value.tensor().as<float>(),
                             .grad = grad.tensor().as<float>(),
                             .first = first.data(),
                             .second = second.data(),
                             .count = size,
                             .site = AdamWCase::kSite,
                             .element = AdamWCase::kFirst,
                             .bf16_copy = copy.tensor().as<Bf16>()};
      adamw(gpu(), step, {&run, 1});
      expect_within(value, all.new_value, 1e-6, "values");
      Operand rounded(DType::kBf16, {size}, value.values(gpu()));
      expect_equal(copy, rounded.values(), "their copy in bf16");
      expect_equal(grad, all.grad.values(), "gradients");
      if (moments == DType::kF32) {
        expect_within(first, all.new_first, 1e-6, "first moments");
        expect_within(second, all.new_second, 1e-6, "second moments");
        continue;
      }
      const Values found_first = first.values(gpu()), found_second = second.values(gpu());
      const RandomKey key = {kStep.seed, AdamWCase::kSite, kStep.step};
      for (std::size_t i = 0; i < found_first.size(); ++i) {
        const std::uint32_t word = word_of(key, AdamWCase::kFirst + i);
        ASSERT_TRUE(is_rounded_at_random(found_first[i], all.new_first[i], all.first_error[i],
                                         word & 0xFFFFU))
            << i;
        ASSERT_TRUE(is_rounded_at_random(found_second[i], all.new_second[i],
                                         0x1p-22 * all.new_second[i], word >> 16))
            << i;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
