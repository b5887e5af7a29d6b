#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice::testing {
namespace {

BatchSpec numbers() { return {.inputs = {{DType::kF32, {4}}}, .targets = {{DType::kF32, {4}}}}; }

Sequential model() {
  return Sequential({nn::linear(4, 4), nn::relu(), nn::linear(4, 4), nn::linear(4, 4)},
                    nn::mse_loss())
      .with_input({DType::kF32, {4}});
}

void train(Pipeline& pipeline, int samples) {
  const std::vector<float> x(static_cast<std::size_t>(samples) * 4, 1);
  const Tensor rows = view(x, {samples, 4});
  (void)pipeline.train_step({.inputs = {rows}, .targets = {rows}});
}

PipelineOptions options_for(const std::string& schedule, int replicas) {
  PipelineOptions options{.shape = {.replicas = replicas, .micro_batches = 4},
                          .order = {.schedule = schedule}};
  options.checks.trace = true;
  return options;
}

TEST(StepTimelineTest, HasWhatEachRankRanInOrderOfTime) {
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    for (const int replicas : {1, 2}) {
      run_loopback(2 * replicas, [&](Communicator& world) {
        Pipeline pipeline(world, model(), numbers(), options_for(schedule, replicas));
        train(pipeline, 4);
        const StepTimeline step = step_timeline(pipeline);
        EXPECT_EQ(step.schedule.name, schedule);
        EXPECT_EQ(step.schedule.micro_batches, 4);
        EXPECT_EQ(step.schedule.ranks, generate(schedule, {2, 4, 1}).ranks);
        EXPECT_EQ(check(step.schedule), std::nullopt);
        EXPECT_GE(step.clock_error, 0);
        for (const Simulation* each : {&step.measured, &step.planned}) {
          ASSERT_EQ(each->timeline.size(), 2U);
          double first = each->makespan;
          for (std::size_t rank = 0; rank < 2; ++rank) {
            const auto& row = each->timeline[rank];
            ASSERT_EQ(row.size(), step.schedule.ranks[rank].size());
            double end = 0;
            for (std::size_t i = 0; i < row.size(); ++i) {
              EXPECT_EQ(row[i].action, step.schedule.ranks[rank][i].action);
              EXPECT_GE(row[i].start, end);
              EXPECT_GE(row[i].end, row[i].start);
              end = row[i].end;
            }
            EXPECT_LE(end, each->makespan);
            first = std::min(first, row[0].start);
          }
          EXPECT_EQ(first, 0);
          EXPECT_GT(each->makespan, 0);
          EXPECT_GE(each->bubble_makespan, 0);
          EXPECT_LT(each->bubble_makespan, 1);
        }
        EXPECT_EQ(step.measured.peak_in_flight, step.planned.peak_in_flight);
      });
    }
  }
}

TEST(StepTimelineTest, IsThatOfTheLastStepWhateverItsSize) {
  run_loopback(2, [](Communicator& world) {
    Pipeline pipeline(world, model(), numbers(), options_for("gpipe", 1));
    train(pipeline, 4);
    train(pipeline, 2);
    const std::vector<float> x(4 * 4, 1);
    (void)pipeline.evaluate({.inputs = {view(x, {4, 4})}, .targets = {view(x, {4, 4})}});
    EXPECT_EQ(step_timeline(pipeline).schedule.micro_batches, 2);
  });
}

TEST(StepTimelineTest, IsRefusedWithoutATraceAndThePipelineGoesOn) {
  run_loopback(2, [](Communicator& world) {
    PipelineOptions options = options_for("gpipe", 1);
    Pipeline traced(world, model(), numbers(), options);
    options.checks.trace = false;
    Pipeline plain(world, model(), numbers(), options);
    train(plain, 4);
    for (Pipeline* each : {&traced, &plain}) {
      expect_error(ErrorCode::kUsage, {"options.checks.trace"},
                   [&] { (void)step_timeline(*each); });
      EXPECT_TRUE(each->usable());
      train(*each, 4);
    }
  });
}

}  // namespace
}  // namespace sluice::testing
