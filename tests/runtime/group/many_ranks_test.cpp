// Trainings of as many ranks as the job has, 64: what they exchange travels along trees of several
// levels, whose root is far from most ranks.
#include <gtest/gtest.h>

#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

TEST(ManyRanksTest, TrainToTheBitsOfFewWithEqualReplicas) {
  const auto comm = world().duplicate();
  constexpr int kReplicas = 8;
  if (comm->size() % kReplicas != 0) GTEST_SKIP() << "8 replicas need 8 ranks or a multiple";
  TrainingCase what = named("8 blocks");
  what.model.layers = 8;
  what.model.width = 16;
  what.micro_batches = 2;
  what.micro_batch_size = 1;
  what.steps = 2;
  TrainingOutcome expected;
  train_on_some(*comm, what, {.replicas = kReplicas},
                [&](const TrainingOutcome& outcome) { expected = outcome; });
  for (const RankOrder order : {RankOrder::kPipelineFirst, RankOrder::kReplicaFirst}) {
    const TrainingOutcome outcome = train(
        *comm, what, {.pipeline = comm->size() / kReplicas, .replicas = kReplicas, .order = order});
    expect_same(*comm, order == RankOrder::kPipelineFirst ? "pipeline first" : "replica first",
                expected, outcome);
  }
}

}  // namespace
}  // namespace sluice::testing
