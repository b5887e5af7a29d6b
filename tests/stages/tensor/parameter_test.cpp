#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/parameter.hpp>

#include "stages/tensor/slice_runs.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

std::vector<float> copy(const Tensor& tensor) {
  return {tensor.floats().begin(), tensor.floats().end()};
}

TEST(ParameterSetTest, StartsEveryParameterAtTheAlignmentWithZeroPadding) {
  ParameterSet set;
  set.add("a", {3, 5}, Init::constant(2));
  set.add("b", {7}, Init::constant(3));
  set.add("c", {64}, Init::constant(4));
  set.allocate({}, 1);

  double sum = 0;
  for (const Parameter* parameter : set.all()) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(parameter->value.data) % kBufferAlignment, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(parameter->grad.data) % kBufferAlignment, 0U);
    EXPECT_THAT(parameter->grad.floats(), Each(0.0F));
  }
  for (const float value : set.flat_values()) {
    sum += value;
  }
  EXPECT_EQ(set.flat_values().size(), 3U * 64);
  EXPECT_EQ(set.flat_grads().size(), 3U * 64);
  EXPECT_EQ(sum, 15 * 2 + 7 * 3 + 64 * 4);
}

TEST(ParameterSetTest, ValuesThatCannotBeDrawnAndASecondAllocationAreRefused) {
  ParameterSet set;
  for (const Init init : {Init::normal(std::nan("")), Init::normal(-1), Init::uniform(HUGE_VAL),
                          Init::constant(std::nan(""))}) {
    EXPECT_THROW(set.add("w", {2}, init), Error);
    EXPECT_THROW(set.add_buffer("b", {2}, init), Error);
  }
  set.require_memory();  // an empty set needs none
  set.add("w", {2}, Init::constant(-3));
  EXPECT_THROW(set.require_memory(), Error);
  set.allocate({}, 1);
  set.require_memory();
  EXPECT_THROW(set.allocate({}, 1), Error);
  EXPECT_EQ(set.find("w")->value.at(1), -3);
}

// A stage that never trains: values and buffers, and nothing as large for gradients.
TEST(ParameterSetTest, HasNoGradientsWhereNoneAreWanted) {
  ParameterSet with, without;
  for (ParameterSet* set : {&with, &without}) {
    set->add("a", {33, 9}, Init::normal(0.5));
    set->add("b", {7}, Init::constant(3));
    set->add_buffer("c", {2}, Init::constant(1));
  }
  with.allocate({}, 1);
  without.allocate({}, 1, false);

  EXPECT_TRUE(without.flat_grads().empty());
  without.zero_grads({});
  for (std::size_t i = 0; i < 2; ++i) {
    const Parameter& parameter = *without.all()[i];
    EXPECT_EQ(parameter.grad.data, nullptr);
    EXPECT_EQ(parameter.grad.spec, with.all()[i]->grad.spec);
    EXPECT_EQ(copy(parameter.value), copy(with.all()[i]->value));
  }
  EXPECT_THAT(without.buffers()[0]->value.floats(), Each(1.0F));
}

TEST(ParameterSetTest, UsesOfATiedNameShareAValueWhereNothingTrains) {
  ParameterSet with, without;
  for (ParameterSet* set : {&with, &without}) {
    set->add("tied", {33, 9}, Init::normal(0.5), true, true);
    set->add("between", {7}, Init::constant(3));
    set->add("tied", {33, 9}, Init::normal(0.5), true, true);
    set->add("behind", {5}, Init::constant(4));
  }
  with.allocate({}, 1);
  without.allocate({}, 1, false);

  const std::vector<Parameter*> apart = with.all(), shared = without.all();
  EXPECT_NE(apart[0]->value.data, apart[2]->value.data);
  EXPECT_EQ(shared[0]->value.data, shared[2]->value.data);
  EXPECT_EQ(without.flat_values().size(),
            with.flat_values().size() - parameter_bytes(33 * 9) / sizeof(float));
  for (const std::size_t i : {0U, 1U, 3U}) EXPECT_EQ(copy(shared[i]->value), copy(apart[i]->value));
}

TEST(ParameterSetTest, DrawsAFunctionOfSeedAndNameAlone) {
  ParameterSet alone, among, reseeded;
  alone.add("x", {33, 9}, Init::normal(0.5));
  among.add("w", {1000}, Init::uniform(1));
  among.add("x", {33, 9}, Init::normal(0.5));
  reseeded.add("x", {33, 9}, Init::normal(0.5));
  alone.allocate({}, 42);
  among.allocate({}, 42);
  reseeded.allocate({}, 43);
  EXPECT_EQ(copy(alone.find("x")->value), copy(among.find("x")->value));
  EXPECT_NE(copy(alone.find("x")->value), copy(reseeded.find("x")->value));
}

// FNV-1a of 32 bits gives both names 0xDDBB36CD.
TEST(ParameterSetTest, NamesOfOneShortHashDrawDifferentValues) {
  ParameterSet set;
  set.add("yiijsv.weight", {64}, Init::normal(1));
  set.add("ktodoe.weight", {64}, Init::normal(1));
  set.allocate({}, 1);
  EXPECT_NE(copy(set.find("yiijsv.weight")->value), copy(set.find("ktodoe.weight")->value));
}

TEST(ParameterSetTest, PrefixOfALongerParameterIsTheSame) {
  ParameterSet odd, longer;
  odd.add("x", {7}, Init::normal(1));
  longer.add("x", {20}, Init::normal(1));
  odd.allocate({}, 3);
  longer.allocate({}, 3);
  std::vector<float> prefix = copy(longer.find("x")->value);
  prefix.resize(7);
  EXPECT_EQ(copy(odd.find("x")->value), prefix);
}

// Large enough for several threads, where there are cores for them, and odd.
// Values of the whole that lie in the slice, in its order.
std::vector<float> cut(const std::vector<float>& whole, const Parameter& part) {
  std::vector<float> values;
  for_runs(part.shape, part.slice, 0, part.shape.elements(),
           [&](std::int64_t, std::int64_t first, std::int64_t elements) {
             values.insert(values.end(), whole.begin() + first, whole.begin() + first + elements);
           });
  return values;
}

TEST(ParameterSetTest, ASliceBeginsWithThatPartOfTheWhole) {
  const Shape shape = {7, 5, 3};
  for (const Init init : {Init::normal(1), Init::uniform(1), Init::constant(2)}) {
    ParameterSet whole;
    whole.add("w", shape, init);
    whole.allocate({}, 3);
    const std::vector<float> values = copy(whole.find("w")->value);
    for (int axis = 0; axis < 3; ++axis) {
      for (const int ranks : {1, 2, 3, 8}) {
        std::int64_t rows = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const std::int64_t begin = shape[axis] * rank / ranks;
          const std::int64_t end = shape[axis] * (rank + 1) / ranks;
          ParameterSet set;
          const Parameter& part =
              set.add("w", shape, init, true, false, {axis, begin, end - begin, shape[axis]});
          set.allocate({}, 3);
          EXPECT_EQ(part.whole_shape(), shape);
          EXPECT_EQ(part.value.shape(), part.shape);
          EXPECT_EQ(copy(part.value), cut(values, part)) << axis << " " << rank << "/" << ranks;
          rows += part.shape[axis];
        }
        EXPECT_EQ(rows, shape[axis]);
      }
    }
  }
}

// The runs of a slice that several threads draw begin anywhere.
TEST(ParameterSetTest, ALargeSliceBeginsWithThatPartOfTheWhole) {
  const Shape shape = {1001, 1201};
  ParameterSet whole, set;
  whole.add("w", shape, Init::normal(1));
  whole.allocate({}, 3);
  const Parameter& part = set.add("w", shape, Init::normal(1), true, false,
                                  {.axis = 1, .begin = 301, .length = 801, .whole = 1201});
  set.allocate({}, 3);
  EXPECT_EQ(copy(part.value), cut(copy(whole.find("w")->value), part));
}

TEST(ParameterSetTest, PartsBeginWithTheWholesValuesAtTheirElements) {
  const Shape shape = {5, 6, 4};
  ParameterSet whole, set;
  whole.add("w", shape, Init::normal(1));
  whole.allocate({}, 3);
  const std::vector<float> values = copy(whole.find("w")->value);
  std::vector<float> expected;
  std::vector<SlicePart> parts;
  for (const auto& [begin, end, shard] :
       {std::tuple(4, 6, 2), std::tuple(0, 1, 2), std::tuple(3, 3, 3), std::tuple(1, 3, 4)}) {
    parts.push_back({{.axis = 1, .begin = begin, .length = end - begin, .whole = 6}, shard});
    for (int i = 0; i < 5; ++i) {
      const auto row = values.begin() + i * 24;
      expected.insert(expected.end(), row + begin * 4, row + end * 4);
    }
  }
  const Parameter& part = set.add_parts("w", shape, Init::normal(1), true, false, parts);
  set.allocate({}, 3);
  EXPECT_EQ(part.shape, (Shape{5, 5, 4}));
  EXPECT_EQ(part.whole_shape(), shape);
  EXPECT_EQ(copy(part.value), expected);
  EXPECT_EQ(shard_elements(part.slice, part.parts, part.shape.elements()),
            (std::vector<std::int64_t>{60, 0, 40}));
  EXPECT_THROW(set.add_parts("v", shape, Init::normal(1), true, false, {}), Error);
  ParameterSet other;
  parts[1].slice.axis = 0;
  EXPECT_THROW(other.add_parts("v", shape, Init::normal(1), true, false, parts), Error);
}

TEST(ParameterSetTest, SharesOfGradientsAreZeroedWithThem) {
  ParameterSet set;
  set.add("none", {3}, Init::constant(1));
  set.add("a", {5}, Init::constant(1)).shares = 2;
  set.add("b", {65}, Init::constant(1)).shares = 2;
  set.allocate({}, 1);
  Parameter &a = *set.find("a"), &b = *set.find("b");
  ASSERT_EQ(a.share_grads.size(), 2U);
  EXPECT_TRUE(set.find("none")->share_grads.empty());
  for (int share = 0; share < 2; ++share) {
    const std::span<float> flat = set.flat_shares(share);
    EXPECT_EQ(flat.size(), 64U + 128);
    EXPECT_EQ(flat.data(), a.share_grads[static_cast<std::size_t>(share)].as<float>());
    EXPECT_EQ(flat.data() + 64, b.share_grads[static_cast<std::size_t>(share)].as<float>());
  }
  EXPECT_TRUE(set.flat_shares(2).empty());
  for (const bool stale : {false, true}) {
    b.share_grads[1].at(64) = 7;
    {
      const GradientsAside aside(set, {});
      b.share_grads[1].at(64) = 9;
    }
    EXPECT_EQ(b.share_grads[1].at(64), 7);
    const Stream stream{Device{}};
    if (stale) {
      GradientAccess::mark_stale(set, stream.view());
    } else {
      set.zero_grads(stream.view());
    }
    EXPECT_THAT(b.share_grads[1].floats(), Each(0.0F));
  }
  ParameterSet without;
  without.add("a", {5}, Init::constant(1)).shares = 2;
  without.allocate({}, 1, /*gradients=*/false);
  EXPECT_TRUE(without.find("a")->share_grads.empty());
}

TEST(ParameterSetTest, RunsOfASliceAreThoseOfEachElement) {
  const Shape shape = {3, 2, 2};  // of the slice; the whole is [3, 5, 2]
  const Slice slice = {.axis = 1, .begin = 2, .length = 2, .whole = 5};
  for (std::int64_t first = 0; first <= 12; ++first) {
    std::vector<std::int64_t> places;
    for_runs(shape, slice, first, 12 - first,
             [&](std::int64_t here, std::int64_t in_whole, std::int64_t elements) {
               EXPECT_EQ(here, first + std::ssize(places));
               for (std::int64_t i = 0; i < elements; ++i) places.push_back(in_whole + i);
             });
    const std::vector<std::int64_t> all = {4, 5, 6, 7, 14, 15, 16, 17, 24, 25, 26, 27};
    EXPECT_EQ(places, std::vector<std::int64_t>(all.begin() + first, all.end()));
  }
}

TEST(ParameterSetTest, SlicesThatDoNotLieInTheShapeAreRefused) {
  ParameterSet set;
  for (const Slice& slice : {Slice{2, 0, 1, 4}, Slice{1, 0, 1, 4}, Slice{0, -1, 2, 4},
                             Slice{0, 3, 2, 4}, Slice{0, 0, -1, 4}, Slice{0, 0, 5, 4}}) {
    EXPECT_THROW(set.add("w", {4, 3}, Init::constant(0), true, false, slice), Error);
    EXPECT_THROW(set.add_buffer("b", {4, 3}, Init::constant(0), ReplicaRule::kMean, slice), Error);
  }
  EXPECT_EQ(set.add("none", {4, 3}, Init::constant(0), true, false, {0, 4, 0, 4}).shape,
            (Shape{0, 3}));
  set.add("w", {4, 3}, Init::constant(0), true, true, {0, 0, 2, 4});
  set.add("w", {4, 3}, Init::constant(0), true, true, {0, 2, 2, 4});
  EXPECT_THROW(set.allocate({}, 1), Error);
}

TEST(ParameterSetTest, ValuesAreTheSameOnOneCore) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 20) + 3;
  const auto draw = [] {
    ParameterSet set;
    set.add("normal", {kCount}, Init::normal(1));
    set.add("uniform", {kCount}, Init::uniform(1));
    set.allocate({}, 3);
    return std::pair(copy(set.find("normal")->value), copy(set.find("uniform")->value));
  };
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &all)) CPU_SET(core, &one);
  }
  const auto on_all = draw();
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const auto on_one = draw();
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  EXPECT_TRUE(on_all == on_one);
}

TEST(ParameterSetTest, DrawsTheDistributionsAskedFor) {
  ParameterSet set;
  constexpr int kCount = 200000;
  set.add("normal", {kCount}, Init::normal(0.02));
  set.add("uniform", {kCount}, Init::uniform(0.25));
  set.allocate({}, 5);

  double sum = 0, squares = 0, fourth = 0;
  for (const float value : set.find("normal")->value.floats()) {
    const double x = value / 0.02;
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.02);
  EXPECT_NEAR(fourth / kCount, 3.0, 0.1);

  double total = 0;
  for (const float value : set.find("uniform")->value.floats()) {
    ASSERT_GE(value, -0.25F);
    ASSERT_LE(value, 0.25F);
    total += value * value;
  }
  EXPECT_NEAR(total / kCount, 0.25 * 0.25 / 3, 0.0005);
}

TEST(ParameterSetTest, TiedUsesHaveEqualValuesAndGradientsOfTheirOwn) {
  ParameterSet set;
  set.add("e", {4, 4}, Init::normal(1), true, true);
  set.add("other", {4}, Init::constant(0));
  set.add("e", {4, 4}, Init::normal(1), true, true);
  set.allocate({}, 9);
  const std::vector<Parameter*> all = set.all();
  EXPECT_EQ(copy(all[0]->value), copy(all[2]->value));
  EXPECT_NE(all[0]->grad.data, all[2]->grad.data);
  EXPECT_EQ(set.find("e"), all[0]);
  EXPECT_EQ(set.find("none"), nullptr);
}

void expect_usage(ParameterSet& set, const std::string& part) {
  try {
    set.allocate({}, 0);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(ParameterSetTest, RefusesANameUsedTwiceUnlessTied) {
  ParameterSet twice;
  twice.add("x", {2}, Init::constant(0));
  twice.add("x", {2}, Init::constant(0));
  EXPECT_THROW(twice.allocate({}, 0), Error);

  ParameterSet half_tied;
  half_tied.add("x", {2}, Init::constant(0), true, true);
  half_tied.add("x", {2}, Init::constant(0));
  EXPECT_THROW(half_tied.allocate({}, 0), Error);

  ParameterSet shapes;
  shapes.add("x", {2}, Init::constant(0), true, true);
  shapes.add("x", {3}, Init::constant(0), true, true);
  try {
    shapes.allocate({}, 0);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("x"), HasSubstr("[2]"), HasSubstr("[3]")));
  }
}

TEST(ParameterSetTest, RefusesUsesOfOneNameThatBeginWithOtherValues) {
  ParameterSet set;
  set.add("x", {2}, Init::normal(0.5), true, true);
  set.add("x", {2}, Init::normal(0.1), true, true);
  expect_usage(set, "tied parameter x begins with normal 0.5 and with normal 0.1");
}

TEST(ParameterSetTest, RefusesWhatIsAddedAfterAllocate) {
  ParameterSet set, buffers;
  set.add("x", {2}, Init::constant(0));
  set.allocate({}, 0);
  buffers.add_buffer("x", {2}, Init::constant(0));
  buffers.allocate({}, 0);
  for (ParameterSet* each : {&set, &buffers}) {
    for (const bool buffer : {false, true}) {
      try {
        (void)(buffer ? each->add_buffer("late", {1}, {}) : each->add("late", {1}, {}));
        FAIL() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUsage);
        EXPECT_THAT(error.what(), HasSubstr("late is added after allocate(); add it before"));
      }
    }
  }
}

TEST(ParameterSetTest, ZeroesGradientsAndCountsVersions) {
  ParameterSet set;
  set.add("x", {5}, Init::constant(1));
  set.allocate({}, 0);
  const std::uint64_t version = set.version();
  set.find("x")->grad.floats()[3] = 2;
  set.zero_grads({});
  EXPECT_THAT(set.flat_grads(), Each(0.0F));
  EXPECT_EQ(set.version(), version);
  set.mark_values_changed();
  EXPECT_GT(set.version(), version);
}

// Two parameters whose stage asks, and one of a stage that adds; all gradients are 3.
class StaleGradientsTest : public testing::Test {
 protected:
  StaleGradientsTest() {
    for (const char* name : {"a", "b", "c"}) set_.add(name, {5}, Init::constant(1));
    set_.allocate({}, 0);
    for (Parameter* each : {&a(), &b()}) each->asks_next_write = true;
    for (Parameter* each : set_.all()) {
      for (float& g : each->grad.floats()) g = 3;
    }
  }
  Parameter& a() { return *set_.find("a"); }
  Parameter& b() { return *set_.find("b"); }
  Parameter& c() { return *set_.find("c"); }

  ParameterSet set_;
};

TEST_F(StaleGradientsTest, AreLeftAndOthersZeroed) {
  EXPECT_EQ(next_write({&a()}, {}), Write::kAdd);
  GradientAccess::mark_stale(set_, {});
  EXPECT_TRUE(a().is_stale() && b().is_stale());
  EXPECT_FALSE(c().is_stale());
  EXPECT_THAT(a().grad.floats(), Each(3.0F));
  EXPECT_THAT(c().grad.floats(), Each(0.0F));
}

TEST_F(StaleGradientsTest, AreOverwrittenOnce) {
  GradientAccess::mark_stale(set_, {});
  EXPECT_EQ(next_write({&a(), nullptr, &b()}, {}), Write::kOverwrite);
  EXPECT_EQ(next_write({&a(), nullptr, &b()}, {}), Write::kAdd);
  EXPECT_THAT(a().grad.floats(), Each(3.0F));
  GradientAccess::zero_stale(set_, {});
  EXPECT_THAT(a().grad.floats(), Each(3.0F));
}

TEST_F(StaleGradientsTest, OfOneOperatorAreZeroedWhereSomeAreNot) {
  GradientAccess::mark_stale(set_, {});
  EXPECT_EQ(next_write({&b()}, {}), Write::kOverwrite);
  EXPECT_EQ(next_write({&a(), &b()}, {}), Write::kAdd);
  EXPECT_THAT(a().grad.floats(), Each(0.0F));
  EXPECT_THAT(b().grad.floats(), Each(3.0F));
  EXPECT_FALSE(a().is_stale());
}

TEST_F(StaleGradientsTest, ThatNothingWroteAreZeroedFromAPlaceOn) {
  GradientAccess::mark_stale(set_, {});
  GradientAccess::zero_stale(
      set_, {}, static_cast<std::size_t>(b().grad.as<float>() - set_.flat_grads().data()));
  EXPECT_TRUE(a().is_stale());
  EXPECT_THAT(a().grad.floats(), Each(3.0F));
  EXPECT_THAT(b().grad.floats(), Each(0.0F));
  EXPECT_EQ(next_write({&b()}, {}), Write::kAdd);
  set_.zero_grads({});
  EXPECT_FALSE(a().is_stale());
}

// A record of a call has those that it zeroes if stale: a replay does what the call did.
TEST_F(StaleGradientsTest, ThatAreZeroedCountAsAskedFor) {
  GradientAccess::mark_stale(set_, {});
  (void)next_write({&b()}, {});
  for (Parameter* each : {&a(), &b()}) (void)GradientAccess::take_asked(*each);
  zero_if_stale(a(), {});
  zero_if_stale(b(), {});
  EXPECT_TRUE(GradientAccess::take_asked(a()));
  EXPECT_TRUE(GradientAccess::take_asked(b()));
  EXPECT_FALSE(a().is_stale());
  EXPECT_THAT(a().grad.floats(), Each(0.0F));
  EXPECT_THAT(b().grad.floats(), Each(3.0F));
}

TEST_F(StaleGradientsTest, AreAsBeforeAfterGradientsAside) {
  GradientAccess::mark_stale(set_, {});
  (void)next_write({&b()}, {});
  const void* const place_of_a = a().grad.data;
  {
    const GradientsAside aside(set_, {});
    EXPECT_EQ(a().grad.data, place_of_a) << "nobody reads what is stale";
    GradientAccess::set_stale(set_, true);
    for (Parameter* each : set_.all()) {
      for (float& g : each->grad.floats()) g = 7;
      (void)GradientAccess::next(*each);
    }
  }
  EXPECT_TRUE(a().is_stale());
  EXPECT_FALSE(b().is_stale());
  EXPECT_THAT(b().grad.floats(), Each(3.0F));
}

TEST(ParameterSetTest, StaysValidWhenEmptyOrMoved) {
  ParameterSet empty;
  empty.allocate({}, 0);
  EXPECT_TRUE(empty.flat_grads().empty());

  ParameterSet set;
  set.add("x", {5}, Init::constant(1));
  set.allocate({}, 0);
  ParameterSet moved = std::move(set);
  EXPECT_THAT(moved.find("x")->value.floats(), Each(1.0F));
}

}  // namespace
}  // namespace sluice
