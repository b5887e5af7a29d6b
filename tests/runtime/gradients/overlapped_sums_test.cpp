// Sums over replicas on CPUs: they go on while operators run, and stand in the plan where a stage's
// last gradients are final.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>
#include <sluice/transformer.hpp>

#include "runtime/files/trace.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

constexpr std::size_t kFloats = kBufferAlignment / sizeof(float);  // of a bucket

// A whole model with two parameters of one bucket each, whose gradients are the replica's number
// from 1 on. Its last backward finishes the second one, calls `meanwhile` and goes on.
class TwoBucketStage : public CopyingStage {
 public:
  using Meanwhile = std::function<void(StageContext&, std::span<const float> second)>;

  TwoBucketStage(int replica, Meanwhile meanwhile)
      : first_(&set_.add("first", Shape{kFloats}, Init::constant(0))),
        second_(&set_.add("second", Shape{kFloats}, Init::constant(0))),
        number_(static_cast<float>(replica + 1)),
        meanwhile_(std::move(meanwhile)) {}

  void backward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor>) override {
    std::ranges::fill(second_->grad.floats(), number_);
    if (ctx.final_gradients != nullptr) {
      ctx.final_gradients->from(kFloats);
      meanwhile_(ctx, second_->grad.floats());
    }
    std::ranges::fill(first_->grad.floats(), number_);
  }

 private:
  Parameter *first_, *second_;
  float number_;
  Meanwhile meanwhile_;
};

void run_operator(ComputeContext& compute) {
  std::array<float, 1> x = {1}, weight = {1}, y = {};
  const auto tensor = [](std::array<float, 1>& values) {
    return Tensor{values.data(), {DType::kF32, Shape{1, 1}}};
  };
  linear_forward(compute, tensor(x), tensor(weight), {}, tensor(y));
}

// A step of a TwoBucketStage per replica, each with these calls of its last backwards.
struct Ran {
  std::vector<double> norms;
  std::vector<std::string> errors;  // empty where none
};
Ran run_replicas(
    int replicas, bool progress_in_actions,
    const std::function<void(int replica, StageContext&, std::span<const float>)>& meanwhile) {
  Ran ran{std::vector<double>(static_cast<std::size_t>(replicas)),
          std::vector<std::string>(static_cast<std::size_t>(replicas))};
  run_loopback(replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = 1;
    options.shape.replicas = replicas;
    options.shape.micro_batches = 2;
    options.devices.threads = 1;
    options.expert.bucket_bytes = kFloats * sizeof(float);
    options.expert.progress_in_actions = progress_in_actions;
    const auto source =
        make_array_source({1, 2, 3, 4, 5, 6, 7, 8}, 1, std::vector<float>(8, 1), 1, 2 * replicas);
    const int replica = comm.rank();
    const auto place = static_cast<std::size_t>(replica);
    const StageFactory factory = [&](int, int) {
      return std::make_unique<TwoBucketStage>(
          replica, [&meanwhile, replica](StageContext& ctx, std::span<const float> second) {
            meanwhile(replica, ctx, second);
          });
    };
    try {
      Pipeline pipeline(comm, factory, *source, options);
      ran.norms[place] = pipeline.train_step().grad_norm;
    } catch (const Error& error) {
      ran.errors[place] = error.what();
    }
  });
  return ran;
}

class OverlappedSumsTest : public ::testing::TestWithParam<int> {
 protected:
  static int replicas() { return GetParam(); }
  static float sum() { return static_cast<float>(replicas() * (replicas() + 1)) / 2; }
};

TEST_P(OverlappedSumsTest, ABucketIsSummedWhileTheBackwardThatFilledItRunsOperators) {
  std::vector<float> seen(static_cast<std::size_t>(replicas()), 0);
  const auto run = [&](bool progress_in_actions) {
    return run_replicas(replicas(), progress_in_actions,
                        [&](int replica, StageContext& ctx, std::span<const float> second) {
                          // The number ends a test that fails.
                          const int most = progress_in_actions ? 50'000'000 : 1000;
                          float& last = seen[static_cast<std::size_t>(replica)];
                          last = second.back();
                          for (int i = 0; i < most && last != sum(); ++i) {
                            run_operator(ctx.compute);
                            last = second.back();
                          }
                        });
  };
  const Ran inside = run(true);
  for (const float value : seen) EXPECT_EQ(value, sum());
  const Ran between = run(false);
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], static_cast<float>(i + 1));
  EXPECT_EQ(inside.norms, between.norms);
  for (const auto* ran : {&inside, &between}) {
    for (const std::string& error : ran->errors) EXPECT_EQ(error, "");
  }
}

// Its peers hold a sum that never completes.
TEST_P(OverlappedSumsTest, ARankThatFailsBetweenBucketsEndsAll) {
  const Ran ran =
      run_replicas(replicas(), true, [&](int replica, StageContext&, std::span<const float>) {
        if (replica + 1 == replicas()) throw Error(ErrorCode::kData, "no first bucket today");
      });
  for (const std::string& error : ran.errors) {
    EXPECT_NE(error.find("no first bucket today"), std::string::npos) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, OverlappedSumsTest, ::testing::Values(2, 3));

TEST(OverlappedSumsPlanTest, TheSumOfOneChunkComesBetweenActionsOfTheOther) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  const StageFactory factory = Transformer(model);
  run_loopback(4, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = 2;
    options.shape.replicas = 2;
    options.order.schedule = "interleaved";
    options.order.chunks = 2;
    options.shape.micro_batches = 4;
    options.checks.trace = true;
    Pipeline pipeline(comm, factory, *source, options);
    (void)pipeline.train_step();
    double last_compute = 0;
    std::vector<TraceEvent> sums;
    for (const TraceEvent& event : PipelineAccess::trace(pipeline)) {
      if (event.track == TraceTrack::kCompute) last_compute = std::max(last_compute, event.start);
      if (event.track == TraceTrack::kSums) sums.push_back(event);
    }
    ASSERT_EQ(sums.size(), 2U);
    EXPECT_LT(sums[0].start, last_compute);
    EXPECT_GT(sums[1].start, last_compute);
    EXPECT_EQ(sums[0].stage, PipelineAccess::layout(pipeline).place.here.pipeline + 2);
  });
}

}  // namespace
}  // namespace sluice::testing
