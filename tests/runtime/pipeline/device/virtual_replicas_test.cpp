// Virtual replicas that one GPU computes one after the other: the bits of as many replicas, also
// where the calls between their folds are replayed. Ranks are threads.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/device.hpp>

#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

// Gradients are overwritten; with logits in chunks the loss writes some of them in a forward. The
// second step is replayed where calls are recorded.
std::vector<TrainingCase> folded_cases() {
  std::vector<TrainingCase> all = {named("tied, dropout"), named("untied, logits in chunks")};
  for (TrainingCase& each : all) each.steps = 2;
  all[0].model.dropout = 0.2F;
  all[0].micro_batches = 2;
  all[0].micro_batch_size = 1;
  all[1].model.tied = false;
  all[1].model.layers = 1;
  all[1].model.width = 16;
  all[1].model.logit_chunks = 2;  // of the 528 rows of a micro-batch
  all[1].micro_batches = 1;
  all[1].micro_batch_size = 33;
  return all;
}

TrainingOutcome outcome_of(const TrainingCase& what, const Layout& layout) {
  TrainingOutcome outcome;
  run_loopback(layout.pipeline * layout.replicas, [&](Communicator& comm) {
    const TrainingOutcome mine = train(comm, what, layout);
    if (comm.rank() == 0) outcome = mine;
  });
  return outcome;
}

void expect_equal(const std::string& where, const TrainingOutcome& expected,
                  const TrainingOutcome& actual) {
  EXPECT_EQ(expected.losses, actual.losses) << where;
  EXPECT_EQ(expected.norms, actual.norms) << where;
  EXPECT_EQ(expected.validation, actual.validation) << where;
  EXPECT_EQ(expected.digest, actual.digest) << where;
}

class DeviceVirtualReplicasTest : public ::testing::TestWithParam<int> {};

// Stale gradients are NaN before each step.
TEST_P(DeviceVirtualReplicasTest, OnOneGpuHaveTheBitsOfAsManyReplicas) {
  SLUICE_NEED_A_GPU();
  for (TrainingCase what : folded_cases()) {
    const TrainingOutcome expected =
        outcome_of(what, {.replicas = GetParam(), .devices = "cuda:0"});
    what.before_step = [](Pipeline& pipeline) { (void)spoil_old_gradients(pipeline); };
    for (const bool graphs : {false, true}) {
      for (const char* schedule : {"1f1b", "zb-h1"}) {
        const Layout layout{.pipeline = std::string(schedule) == "1f1b" ? 1 : 2,
                            .virtual_replicas = GetParam(),
                            .schedule = schedule,
                            .devices = "cuda:0",
                            .cuda_graphs = graphs};
        expect_equal(what.name + ", " + schedule + (graphs ? ", replayed" : ""), expected,
                     outcome_of(what, layout));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Numbers, DeviceVirtualReplicasTest, ::testing::Values(2, 4));

// Sums over two replicas go on from the folds of each.
TEST(NcclVirtualReplicasTest, OnTwoGpusHaveTheBitsOfFour) {
  SLUICE_NEED_GPUS(4, device_count(DeviceKind::kCuda));
  const std::vector<RankDevice> devices(1);
  if (const std::string why = why_no_nccl(devices); !why.empty()) GTEST_SKIP() << why;
  for (const TrainingCase& what : folded_cases()) {
    const auto over_nccl = [&](int replicas, bool graphs) {
      return outcome_of(what, {.replicas = replicas,
                               .virtual_replicas = 4,
                               .devices = "cuda",
                               .transport = TransportChoice::kNccl,
                               .cuda_graphs = graphs});
    };
    const TrainingOutcome expected = over_nccl(4, false);
    for (const bool graphs : {false, true}) {
      expect_equal(what.name + (graphs ? ", replayed" : ""), expected, over_nccl(2, graphs));
    }
  }
}

}  // namespace
}  // namespace sluice::testing
