// The sum over leaves against the tree that defines it, and gradients between leaves.
#include "runtime/gradients/gradient_folds.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "stages/tensor/stale_gradients.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/stages/prepared.hpp"

namespace sluice::testing {
namespace {

using Leaves = std::vector<std::vector<float>>;

// Between -1 and 1: other trees have other bits.
Leaves random_leaves(int leaves, std::size_t floats) {
  std::mt19937 random(static_cast<std::uint32_t>(leaves));
  std::uniform_real_distribution<float> number(-1, 1);
  Leaves all;
  for (int leaf = 0; leaf < leaves; ++leaf) {
    std::vector<float>& values = all.emplace_back(floats);
    for (float& value : values) value = number(random);
  }
  return all;
}

std::vector<float> added(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  return sum;
}

// Splits at the largest power of two below the number of leaves.
std::vector<float> tree(std::span<const std::vector<float>> leaves) {
  if (leaves.size() == 1) return leaves[0];
  const std::size_t left = std::bit_floor(leaves.size() - 1);
  return added(tree(leaves.first(left)), tree(leaves.subspan(left)));
}

std::vector<float> chain(const Leaves& leaves) {
  std::vector<float> sum = leaves[0];
  for (std::size_t i = 1; i < leaves.size(); ++i) sum = added(sum, leaves[i]);
  return sum;
}

TEST(TreeSumTest, IsTheTreeThatSplitsAtTheLargestPowerOfTwo) {
  ComputeContext compute(Device{}, 1);
  for (int count = 1; count <= 33; ++count) {
    TreeSum sum(compute, 1000, count);
    for (int time = 0; time < 2; ++time) {  // a sum leaves nothing to the next one
      const Leaves leaves = random_leaves(count + 100 * time, 1000);
      std::vector<float> values;
      for (int leaf = 0; leaf < count; ++leaf) {
        values = leaves[static_cast<std::size_t>(leaf)];
        EXPECT_EQ(sum.add(values, leaf), leaf + 1 == count);
      }
      const std::span all(leaves);
      const std::vector<float> expected = tree(all.first(static_cast<std::size_t>(count)));
      EXPECT_EQ(values, expected) << count;
      if (count > 3) {
        EXPECT_NE(values, chain(leaves)) << count;
      }
    }
  }
}

TEST(TreeSumTest, KeepsALevelForEachBitOfTheLastLeaf) {
  const std::vector<int> levels = {0, 1, 2, 2, 3, 3, 3, 3, 4};
  for (std::size_t i = 0; i < levels.size(); ++i) {
    EXPECT_EQ(TreeSum::levels(static_cast<int>(i) + 1), levels[i]) << i + 1;
  }
}

// A stage with one parameter that it overwrites, or adds to.
class OneParameter : public ArithmeticStage {
 public:
  explicit OneParameter(bool overwrites) : ArithmeticStage(0), overwrites_(overwrites) {
    parameters()->all()[0]->asks_next_write = overwrites;
  }
  [[nodiscard]] bool overwrites_gradients() const override { return overwrites_; }

 private:
  bool overwrites_;
};

TEST(GradientFoldsTest, EachLeafStartsAnew) {
  for (const bool overwrites : {false, true}) {
    ComputeContext compute(Device{}, 1);
    OneParameter stage(overwrites);
    prepare(stage, {.compute = &compute});
    Parameter& parameter = *stage.parameters()->all()[0];
    const std::vector<StageBinding> stages = {
        {.index = 3, .stage = &stage, .parameters = stage.parameters()}};
    GradientFolds folds(compute, stages, 3);
    GradientAccess::set_stale(parameter, overwrites);
    for (int leaf = 0; leaf < 3; ++leaf) {
      // The second leaf writes nothing.
      if (leaf != 1 && GradientAccess::next(parameter) == Write::kOverwrite) {
        parameter.grad.at(0) = 0;
      }
      if (leaf != 1) parameter.grad.at(0) += static_cast<float>(leaf + 1);
      folds.fold(2, leaf, false);  // another stage
      folds.fold(3, leaf, true);   // other gradients
      folds.fold(3, leaf, false);
      EXPECT_EQ(parameter.is_stale(), overwrites && leaf < 2) << leaf;
    }
    EXPECT_EQ(parameter.grad.at(0), 1 + 3);
  }
}

}  // namespace
}  // namespace sluice::testing
