#include <gtest/gtest.h>

#include <set>

#include <sluice/tensor.hpp>

namespace sluice {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Known answers of Random123 (kat_vectors, philox4x32 10).
TEST(PhiloxTest, GivesTheKnownAnswers) {
  EXPECT_EQ(philox_block({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  constexpr std::uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(philox_block({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(
      philox_block({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}),
      (Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

TEST(PhiloxTest, EveryPartOfTheKeyAndCounterMatters) {
  const RandomKey key = {1, 2, 3};
  std::set<Words> seen = {philox(key, 0, 0),
                          philox(key, 0, 1),
                          philox(key, 1, 0),
                          philox({2, 2, 3}, 0, 0),
                          philox({1, 3, 3}, 0, 0),
                          philox({1, 2 + (1ULL << 40), 3}, 0, 0),
                          philox({1, 2, 4}, 0, 0),
                          philox({1ULL << 40 | 1, 2, 3}, 0, 0),
                          philox({1, 2, 3 + (1ULL << 40)}, 0, 0),
                          philox(key, 0, 1ULL << 40),
                          philox(key, 1ULL << 40, 0)};
  EXPECT_EQ(seen.size(), 11U);
  EXPECT_EQ(philox(key, 5, 6), philox(key, 5, 6));
}

TEST(PhiloxTest, KeysAreTheBlockOfSiteAndStepUnderTheSeed) {
  const auto key_of = [](const Words& words) {
    return std::array<std::uint32_t, 2>{words[0], words[1]};
  };
  EXPECT_EQ(philox_key({1, random_site(2, 3), 4}),
            key_of(philox_block({2 << 8 | 3, 4, 0, 0x536C7563}, {1, 0})));
  EXPECT_EQ(philox_key({1, 5ULL << 32 | 6, 4}),
            key_of(philox_block({6, 4, 0, 0x536C7563 ^ 5}, {1, 0})));
}

TEST(PhiloxTest, UnitNumbersLieInTheHalfOpenInterval) {
  EXPECT_EQ(to_unit(0), 0.0F);
  EXPECT_LT(to_unit(0xFFFFFFFF), 1.0F);
  EXPECT_EQ(to_unit(0x80000000), 0.5F);
}

TEST(PhiloxTest, NamesHashAsFnv1a) {
  EXPECT_EQ(hash_name(""), 0xCBF29CE484222325U);
  EXPECT_EQ(hash_name("a"), 0xAF63DC4C8601EC8CU);
  EXPECT_EQ(hash_name("foobar"), 0x85944171F73967E8U);
}

}  // namespace
}  // namespace sluice
