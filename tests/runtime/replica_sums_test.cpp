// Sums over replicas that run beside computation, over NCCL: the bits of the sums that block, for
// every kind of schedule. Ranks are threads, each with a GPU of its own or, in mixed pipelines, a
// CPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/device.hpp"
#include "comm/error.hpp"
#include "comm/loopback.hpp"
#include "tests/runtime/training_cases.hpp"

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
    if (device_count(DeviceKind::kCuda) < ranks()) {
      GTEST_SKIP() << "fewer than " << ranks() << " GPUs";
    }
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
    for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v"}) {
      expect_same(schedule, expected, train(comm, training(), layout(schedule)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Jobs, ReplicaSumsTest,
                         ::testing::Values(Job{1, 2}, Job{1, 3}, Job{2, 2}, Job{2, 3}), job_name);

class MixedReplicaSumsTest : public ReplicaSumsTest {};

// The GPU's sums stand behind its last gradients, the CPU's at the end of its list; all ranks have
// planned both alike.
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

INSTANTIATE_TEST_SUITE_P(Jobs, MixedReplicaSumsTest, ::testing::Values(Job{2, 2}, Job{2, 3}),
                         job_name);

}  // namespace
}  // namespace sluice::testing
