#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

namespace sluice {
namespace {

TEST(TensorTest, CountsElementsAndBytes) {
  EXPECT_EQ(Shape().elements(), 1);
  EXPECT_EQ((Shape{4, 0, 3}).elements(), 0);
  EXPECT_EQ((TensorSpec{DType::kBf16, {4, 256}}).bytes(), 2048U);
  EXPECT_EQ((TensorSpec{DType::kF64, {3}}).bytes(), 24U);
  EXPECT_NE((Shape{4}), (Shape{4, 1}));
}

TEST(TensorTest, PrintsItsShape) {
  EXPECT_EQ(to_string(Shape{4, 256, 64}), "[4, 256, 64]");
  EXPECT_EQ(to_string(TensorSpec{DType::kF32, {4, 16}}), "f32 [4, 16]");
  EXPECT_EQ(to_string(Shape()), "[]");
}

TEST(TensorTest, RefusesShapesThatCannotBe) {
  EXPECT_THROW((Shape{1, 2, 3, 4, 5, 6, 7}), Error);
  EXPECT_THROW((Shape{2, -1}), Error);
  EXPECT_THROW((Shape{1LL << 40, 1LL << 40}), Error);
}

TEST(F16Test, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const F16 value = {static_cast<std::uint16_t>(bits)};
    const bool nan = (bits & 0x7C00U) == 0x7C00U && (bits & 0x3FFU) != 0;
    EXPECT_EQ(to_f16(to_float(value)).bits, nan ? (bits & 0x8000U) | 0x7E00U : bits);
    EXPECT_EQ(std::isnan(to_float(value)), nan);
  }
}

// Between each value and the next: below, at and above the middle.
TEST(F16Test, RoundsToNearestEven) {
  for (std::uint16_t bits = 0; bits < 0x7BFF; ++bits) {
    const float low = to_float(F16{bits}),
                high = to_float(F16{static_cast<std::uint16_t>(bits + 1)});
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(to_f16(std::nextafter(middle, low)).bits, bits);
    EXPECT_EQ(to_f16(middle).bits, bits + (bits & 1U));
    EXPECT_EQ(to_f16(std::nextafter(middle, high)).bits, bits + 1);
    EXPECT_EQ(to_f16(-middle).bits, (bits + (bits & 1U)) | 0x8000U);
  }
  EXPECT_EQ(to_float(F16{0x3C00}), 1.0F);
  EXPECT_EQ(to_float(F16{0x0001}), 0x1p-24F);
  EXPECT_EQ(to_float(F16{0x7BFF}), 65504.0F);
  EXPECT_EQ(to_f16(65519.0F).bits, 0x7BFF);
  EXPECT_EQ(to_f16(65520.0F).bits, 0x7C00);
  EXPECT_EQ(to_f16(1e-10F).bits, 0);
}

TEST(Bf16Test, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0F).bits, 0x3F80);
  EXPECT_EQ(to_bf16(1.0F + 0x1p-8F).bits, 0x3F80);             // halfway, down to even
  EXPECT_EQ(to_bf16(1.0F + 3 * 0x1p-8F).bits, 0x3F82);         // halfway, up to even
  EXPECT_EQ(to_bf16(1.0F + 0x1p-8F + 0x1p-20F).bits, 0x3F81);  // above halfway
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Bf16Test, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Bf16 value = {static_cast<std::uint16_t>(bits)};
    if (std::isnan(to_float(value))) continue;
    ASSERT_EQ(to_bf16(to_float(value)).bits, value.bits);
  }
}

}  // namespace
}  // namespace sluice
