// Sums over replicas that run concurrently with computation, over NCCL: they have the bits of sums
// that block, for every kind of schedule. Ranks are threads, each with its own GPU or, in mixed
// pipelines, with a CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>

#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/gradients/sums_cases.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#ifdef SLUICE_EMULATED
#include "tests/emulated_cuda/control.hpp"
#endif

namespace sluice::testing {
namespace {

struct Job {
  int pipeline = 1, replicas = 2;
};

std::string job_name(const ::testing::TestParamInfo<Job>& info) {
  return std::to_string(info.param.pipeline) + "x" + std::to_string(info.param.replicas);
}

class ReplicaSumsTest : public ::testing::TestWithParam<Job> {
 protected:
  void SetUp() override {
    SLUICE_NEED_GPUS(ranks(), device_count(DeviceKind::kCuda));
    const std::vector<RankDevice> devices(1);
    if (const std::string why = why_no_nccl(devices); !why.empty()) GTEST_SKIP() << why;
  }
  static int ranks() { return GetParam().pipeline * GetParam().replicas; }
  static Layout layout(const std::string& schedule, const std::string& devices = "cuda") {
    const bool parted = schedule == "interleaved" || schedule == "zb-v";
    return {.pipeline = GetParam().pipeline,
            .replicas = GetParam().replicas,
            .schedule = schedule,
            .chunks = parted ? 2 : 1,
            .devices = devices};
  }
  static TrainingCase training() {
    TrainingCase what;
    what.model = small_model();
    what.micro_batches = 4;
    what.micro_batch_size = 1;
    what.steps = 2;
    return what;
  }
  static TrainingOutcome blocking(Communicator& comm, Layout layout) {
    layout.transport = TransportChoice::kMpi;
    return train(comm, training(), layout);
  }
};

void expect_same(const std::string& where, const TrainingOutcome& expected,
                 const TrainingOutcome& actual) {
  EXPECT_EQ(expected.losses, actual.losses) << where;
  EXPECT_EQ(expected.norms, actual.norms) << where;
  EXPECT_EQ(expected.digest, actual.digest) << where;
}

TEST_P(ReplicaSumsTest, HaveTheBitsOfTheHostsForEverySchedule) {
  run_loopback(ranks(), [&](Communicator& comm) {
    const TrainingOutcome expected = blocking(comm, layout("1f1b"));
    const auto expect = [&](const char* schedule, std::size_t bytes) {
      Layout wanted = layout(schedule);
      wanted.bucket_bytes = bytes;
      expect_same(std::string(schedule) + ", " + std::to_string(bytes), expected,
                  train(comm, training(), wanted));
    };
    // Less than any layer's matrices; no divisor of anything; more than a stage has.
    for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v"}) expect(schedule, 3'000);
    for (const std::size_t bytes : {40'000UL, 25'000'000UL}) expect("zb-v", bytes);
  });
}

TEST_P(ReplicaSumsTest, BesideSharesHaveTheBitsOfTheHosts) {
  run_loopback(ranks(), [&](Communicator& comm) {
    Layout wanted = layout("zb-h1");
    wanted.tensor_shards = 2;
    wanted.bucket_bytes = 3'000;
    expect_same("2 shards", blocking(comm, wanted), train(comm, training(), wanted));
  });
}

// Steps 3 and 4 replay what was recorded, but for the calls that start sums.
TEST_P(ReplicaSumsTest, BesideReplayedCallsHaveTheirBits) {
  run_loopback(ranks(), [&](Communicator& comm) {
    TrainingCase what = training();
    what.steps = 4;
    for (const char* schedule : {"1f1b", "zb-v"}) {
      Layout wanted = layout(schedule);
      wanted.bucket_bytes = 3'000;
      const TrainingOutcome expected = train(comm, what, wanted);
      wanted.cuda_graphs = true;
      expect_same(schedule, expected, train(comm, what, wanted));
    }
  });
}

TEST_P(ReplicaSumsTest, InBucketsByTheLibraryAreCloseToTheOrderedOnes) {
  run_loopback(ranks(), [&](Communicator& comm) {
    const TrainingOutcome expected = blocking(comm, layout("zb-h1"));
    Layout wanted = layout("zb-h1");
    wanted.all_reduce = true;
    wanted.bucket_bytes = 3'000;
    const TrainingOutcome actual = train(comm, training(), wanted);
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_NEAR(expected.losses[i], actual.losses[i], 1e-5);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Jobs, ReplicaSumsTest,
                         ::testing::Values(Job{1, 2}, Job{1, 3}, Job{2, 2}, Job{2, 3}), job_name);

#ifdef SLUICE_EMULATED

// Messages and sums over NCCL. A closed pipeline frees its communicators and refuses to compute.
TEST_P(ReplicaSumsTest, EndWithoutAnAbortWhereThePipelineIsClosed) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  const StageFactory factory = Transformer(model);
  for (const bool closes : {true, false}) {
    const int before = emulated::aborted_communicators();
    run_loopback(ranks(), [&](Communicator& comm) {
      PipelineOptions options;
      options.shape.pipeline = GetParam().pipeline;
      options.shape.replicas = GetParam().replicas;
      options.shape.micro_batches = 2;
      options.devices.choices = parse_devices("cuda");
      options.expert.evaluations = {4};
      Pipeline pipeline(comm, factory, *source, options);
      (void)pipeline.train_step();
      if (!closes) return;
      pipeline.close();
      pipeline.close();  // does nothing more
      EXPECT_THROW((void)pipeline.train_step(), Error);
    });
    const int aborted = emulated::aborted_communicators() - before;
    if (closes) {
      EXPECT_EQ(aborted, 0);
    } else {
      EXPECT_GE(aborted, ranks()) << "at least the one for sums each";
    }
  }
}

#endif

class MixedReplicaSumsTest : public ReplicaSumsTest {};

TEST_P(MixedReplicaSumsTest, OverNcclOnOneRankAndThroughMessagesOnTheOther) {
  run_loopback(ranks(), [&](Communicator& comm) {
    for (const char* schedule : {"1f1b", "interleaved", "zb-v"}) {
      for (const char* devices : {"cuda,cpu", "cpu,cuda"}) {
        expect_same(std::string(schedule) + " on " + devices,
                    blocking(comm, layout(schedule, devices)),
                    train(comm, training(), layout(schedule, devices)));
      }
    }
  });
}

TEST_P(MixedReplicaSumsTest, StandInTheTraceWhereTheyStandInTheList) {
  expect_sums_between_actions(GetParam().replicas, "cuda,cpu");
}

INSTANTIATE_TEST_SUITE_P(Jobs, MixedReplicaSumsTest, ::testing::Values(Job{2, 2}, Job{2, 3}),
                         job_name);

class BucketOrderTest : public ReplicaSumsTest {
 protected:
  // Each rank's error, empty where none failed.
  static std::vector<std::string> run(
      const std::function<void(int replica, StageContext&, std::span<float>)>& meanwhile) {
    return run_two_buckets(ranks(), "cuda", true, meanwhile).errors;
  }
};

// Seen from within the stage's last backward: the second parameter's gradient becomes the sum.
TEST_P(BucketOrderTest, ABucketIsSummedBeforeTheBackwardThatFilledItReturns) {
  std::vector<float> seen(static_cast<std::size_t>(ranks()), 0);
  std::vector<int> calls(static_cast<std::size_t>(ranks()), 0);
  const auto expected = static_cast<float>(ranks() * (ranks() + 1)) / 2;
  const auto said = run([&](int replica, StageContext& ctx, std::span<float> second) {
    const auto at = static_cast<std::size_t>(replica);
    ++calls[at];
    constexpr int kMostPolls = 1'000'000;  // ends a test that fails
    for (int i = 0; i < kMostPolls && seen[at] != expected; ++i) {
      ctx.final_gradients->from(TwoBucketStage::kFloats);
      copy_now(ctx.compute.device(), &seen[at], second.data(), sizeof(float));
      std::this_thread::yield();
    }
  });
  for (const std::string& text : said) EXPECT_EQ(text, "");
  for (const float value : seen) EXPECT_EQ(value, expected);
  for (const int count : calls) EXPECT_EQ(count, 1) << "of two backwards the last one";
}

// Its peers' queues hold a sum that never completes.
TEST_P(BucketOrderTest, ARankThatFailsBetweenBucketsEndsAll) {
  const auto said = run([&](int replica, StageContext& ctx, std::span<float>) {
    if (replica + 1 == ranks()) throw Error(ErrorCode::kData, "no second bucket today");
    ctx.final_gradients->from(TwoBucketStage::kFloats);
  });
  for (const std::string& text : said) {
    EXPECT_NE(text.find("no second bucket today"), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, BucketOrderTest, ::testing::Values(Job{1, 2}, Job{1, 3}), job_name);

// Copies its input to its output; its forward calls `act`, which makes `sums` sums over replicas.
class PassingStage : public CopyingStage {
 public:
  using Act = std::function<void(StageContext&)>;
  PassingStage(int sums, Act act) : sums_(sums), act_(std::move(act)) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    const PlannedCollective sum{
        .axis = CollectiveAxis::kReplica, .bytes = sizeof(double), .type = DType::kF64};
    StageDescription description{.outputs = {inputs[0]}};
    description.collectives.forward.assign(static_cast<std::size_t>(sums_), sum);
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    act_(ctx);
    CopyingStage::forward(ctx, x, y);
  }

 private:
  int sums_;
  Act act_;
};

// Replica 1 joins the collective of micro-batch 1 only once replica 0's message of micro-batch 0,
// which passes through its sender's host memory, has arrived.
TEST(CollectiveOfAStageTest, CarriesTheRanksMessagesWhileItWaits) {
  SLUICE_NEED_A_GPU();
  std::atomic<bool> arrived = false, joined_late = false;
  run_loopback(4, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = 2;
    options.shape.replicas = 2;
    options.order.schedule = "gpipe";
    options.shape.micro_batches = 2;
    options.devices.choices = parse_devices("cuda:0");
    const auto source =
        make_array_source({1, 2, 3, 4, 5, 6, 7, 8}, 1, std::vector<float>(8, 1), 1, 4);
    const int replica = comm.rank() / 2;
    const StageFactory factory = [&](int stage, int) {
      return std::make_unique<PassingStage>(1 - stage, [&, replica, stage](StageContext& ctx) {
        if (stage == 1 && replica == 0) arrived = true;
        if (stage == 1) return;
        if (replica == 1 && ctx.micro_batch == 1) {
          constexpr int kMostPolls = 20'000'000;  // ends a test that fails
          for (int i = 0; i < kMostPolls && !arrived; ++i) std::this_thread::yield();
          joined_late = arrived.load();
        }
        double one = 1;
        ctx.collective->sum({&one, 1});
        EXPECT_EQ(one, 2);
      });
    };
    Pipeline pipeline(comm, factory, *source, options);
    (void)pipeline.train_step();
  });
  EXPECT_TRUE(joined_late);
}

TEST(BucketOptionTest, BucketsOfNothingAreRefused) {
  run_loopback(1, [](Communicator& comm) {
    TrainingCase what;
    what.model = small_model();
    EXPECT_THROW((void)train(comm, what, {.bucket_bytes = 0}), Error);
  });
}

}  // namespace
}  // namespace sluice::testing
