// Training with AdamW's moments in bf16. That its bits do not depend on the layout is a case of
// exactness_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/changed_tokens.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

struct Trained {
  std::vector<double> losses;
  std::size_t planned = 0;  // bytes of the optimizer's state
};

Trained train(const OptimizerConfig& optimizer, int steps) {
  Trained trained;
  TransformerConfig model = small_model();
  model.dropout = 0.1F;
  const FourBatches source(model);
  PipelineOptions options;
  options.shape = {.micro_batches = 2, .micro_batch_size = 2};
  options.training.learning_rate = {.peak = 3e-3, .warmup = 10, .steps = 200};
  options.training.optimizer = optimizer;
  run_loopback(1, [&](Communicator& comm) {
    Pipeline pipeline(comm, Transformer(model), source, options);
    trained.planned = PipelineAccess::layout(pipeline).memory.ranks[0].optimizer;
    for (int step = 0; step < steps; ++step) trained.losses.push_back(pipeline.train_step().loss);
  });
  return trained;
}

double mean_of_last(const std::vector<double>& losses, std::ptrdiff_t count) {
  return std::accumulate(losses.end() - count, losses.end(), 0.0) / static_cast<double>(count);
}

// Found: within 0.09 % at each step, means of the last 20 within 0.015 %.
TEST(Bf16MomentsTrainingTest, TwoHundredStepsStayCloseToThoseOfF32) {
  const Trained exact = train({}, 200), rounded = train({.moments = DType::kBf16}, 200);
  EXPECT_LT(exact.losses.back(), 0.5 * exact.losses.front()) << "it learns";
  EXPECT_NE(exact.losses, rounded.losses);
  for (std::size_t step = 0; step < exact.losses.size(); ++step) {
    EXPECT_NEAR(rounded.losses[step], exact.losses[step], 0.005 * exact.losses[step]) << step;
  }
  EXPECT_NEAR(mean_of_last(rounded.losses, 20), mean_of_last(exact.losses, 20),
              0.001 * mean_of_last(exact.losses, 20));
  EXPECT_LT(static_cast<double>(rounded.planned), 0.52 * static_cast<double>(exact.planned));
}

// With AdamW a step rounds no weight again, except for uses of tied parameters that it does not
// update. With SGD the stage does it. Other writers of values leave copies old.
TEST(RoundedWeightsTest, AdamWLeavesThemCurrent) {
  TransformerConfig model = small_model();
  model.precision = DType::kBf16;
  const auto source = synthetic_tokens(model);
  for (const bool adamw : {true, false}) {
    PipelineOptions options;
    if (!adamw) options.training.optimizer = OptimizerConfig::sgd(0.9F);
    run_loopback(2, [&](Communicator& comm) {
      Pipeline pipeline(comm, Transformer(model), *source, options);
      const auto current = [&] {
        std::vector<std::string> names;
        int copies = 0;
        for (const Pipeline::Owned& owned : pipeline.parameters()) {
          if (owned.parameter->bf16_copy.data == nullptr) continue;
          ++copies;
          if (owned.parameter->bf16_copy_is_current) names.push_back(owned.parameter->name);
        }
        EXPECT_GE(copies, 4) << "the weights of a block at least";
        return names;
      };
      (void)pipeline.train_step();
      if (adamw) {
        EXPECT_GE(current().size(), 4U);
      } else {
        EXPECT_TRUE(current().empty());
      }
      pipeline.values_changed();
      EXPECT_TRUE(current().empty());
      (void)pipeline.train_step();
    });
  }
}

TEST(Bf16MomentsTrainingTest, SettingsWithoutSenseAreRefusedBeforeAnythingIsAllocated) {
  OptimizerConfig sgd = OptimizerConfig::sgd(0.9F);
  sgd.moments = DType::kBf16;
  expect_error(ErrorCode::kUsage, {"SGD's momentum is f32"}, [&] { (void)train(sgd, 1); });
  expect_error(ErrorCode::kUsage, {"f16", "legal: f32, bf16"},
               [&] { (void)train({.moments = DType::kF16}, 1); });
}

}  // namespace
}  // namespace sluice::testing
