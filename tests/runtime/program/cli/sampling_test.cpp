#include "runtime/program/cli/sampling.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include <sluice/error.hpp>

namespace sluice {
namespace {

const std::vector<float> kLogits = {0.0F, 2.0F, 1.0F, 2.0F, -3.0F};

std::map<int, int> counts(const SamplingOptions& options, int draws) {
  std::map<int, int> result;
  for (int i = 0; i < draws; ++i) {
    ++result[sample_token(kLogits, options, static_cast<std::uint64_t>(i))];
  }
  return result;
}

TEST(SamplingTest, TemperatureZeroTakesTheFirstOfTheLikeliest) {
  EXPECT_EQ(sample_token(kLogits, {.temperature = 0}, 7), 1);
}

TEST(SamplingTest, FrequenciesFollowTheSoftmax) {
  constexpr int kDraws = 20000;
  const double temperature = 1.5;
  auto seen = counts({.temperature = temperature}, kDraws);
  double sum = 0;
  for (const float logit : kLogits) sum += std::exp(logit / temperature);
  for (std::size_t i = 0; i < kLogits.size(); ++i) {
    const double expected = std::exp(kLogits[i] / temperature) / sum;
    const double deviation = std::sqrt(expected * (1 - expected) / kDraws);
    EXPECT_NEAR(seen[static_cast<int>(i)] / double{kDraws}, expected, 5 * deviation) << i;
  }
}

TEST(SamplingTest, TopKLeavesOutAllOthersAndTiesGoToTheLowerIndex) {
  EXPECT_THAT(counts({.temperature = 1, .top_k = 1}, 100),
              ::testing::ElementsAre(::testing::Pair(1, 100)));
  const auto two = counts({.temperature = 1, .top_k = 2}, 1000);
  EXPECT_EQ(two.size(), 2U);
  EXPECT_TRUE(two.count(1) == 1 && two.count(3) == 1);
  EXPECT_EQ(counts({.temperature = 1, .top_k = 99}, 500), counts({.temperature = 1}, 500));
}

TEST(SamplingTest, DependsOnSeedAndPositionAlone) {
  const SamplingOptions options = {.temperature = 1, .seed = 3};
  std::vector<int> first, again, other;
  for (std::uint64_t i = 0; i < 50; ++i) {
    first.push_back(sample_token(kLogits, options, i));
    other.push_back(sample_token(kLogits, {.temperature = 1, .seed = 4}, i));
  }
  for (std::uint64_t i = 50; i-- > 0;) {
    again.insert(again.begin(), sample_token(kLogits, options, i));
  }
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
}

TEST(SamplingTest, AddingAConstantToTheLogitsChangesNothing) {
  std::vector<float> shifted;
  for (const float logit : kLogits) shifted.push_back(logit + 64.0F);
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(sample_token(shifted, {.temperature = 1}, i),
              sample_token(kLogits, {.temperature = 1}, i));
  }
}

TEST(SamplingTest, RefusesLogitsThatAreNotFinite) {
  std::vector<float> logits = kLogits;
  logits[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW((void)sample_token(logits, {}, 0), Error);
}

TEST(TokenTextTest, UpTo256TokensAreBytes) {
  const TokenText text(256);
  EXPECT_EQ(text.prompt_tokens("a\xff"), (std::vector<int>{97, 255}));
  EXPECT_EQ(text.text_of(255), "\xff");
  EXPECT_THROW((void)TokenText(100).prompt_tokens("z"), Error);
  EXPECT_THROW((void)text.prompt_tokens(""), Error);
}

TEST(TokenTextTest, MoreTokensAreNumbers) {
  const TokenText text(50257);
  EXPECT_EQ(text.prompt_tokens(" 5  50256"), (std::vector<int>{5, 50256}));
  EXPECT_EQ(text.text_of(12), "12 ");
  for (const char* wrong : {"50257", "-1", "5,6", "x", "", "99999999999"}) {
    EXPECT_THROW((void)text.prompt_tokens(wrong), Error) << wrong;
  }
}

}  // namespace
}  // namespace sluice
