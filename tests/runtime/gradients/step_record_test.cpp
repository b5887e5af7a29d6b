// The norm that rank 0 makes of the ranks' sums over blocks.
#include "runtime/gradients/step_record.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "comm/base/index.hpp"
#include "runtime/layout/parameter_cut.hpp"
#include "stages/compute/call_arguments.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice::testing {
namespace {

struct Ranks {
  int replicas = 1, tensors = 1;
  bool cut = false;
  int shards = 0;  // of the parameters that tensor ranks cut; 0: slices
  int copies = 1;  // of the values, where they are cut
};

// Two stages on two ranks. The second use of "tied" has no square. Tensor ranks cut "large" and
// "last" into slices that end within blocks.
ParameterTable table_of(const Ranks& ranks, int tensor = 0) {
  ParameterTable table;
  table.stages.resize(2);
  table.stages[0].parameters = {{.name = "tied", .elements = 3 * kSumBlock + 5, .tied = true},
                                {.name = "small", .elements = 7, .unit = 1},
                                {.name = "none", .elements = 0, .unit = 1}};
  table.stages[1].parameters = {{.name = "large", .elements = 9 * kSumBlock},
                                {.name = "tied", .elements = 3 * kSumBlock + 5, .tied = true},
                                {.name = "last", .elements = 2 * kSumBlock - 1}};
  TiedParameter& tied = table.tied.emplace_back();
  tied.uses = {{.stage = 0, .index = 0}, {.stage = 1, .index = 1}};
  for (const std::size_t i : {0U, 2U}) {
    ParameterEntry& entry = table.stages[1].parameters[i];
    const std::int64_t rows = entry.elements;
    entry.slice = StagePlace{.tensor = tensor, .tensors = ranks.tensors}.slice(0, rows);
    if (!entry.slice.all()) entry.elements = entry.slice.length;
    if (ranks.shards == 0) continue;
    entry.slice = {.axis = 0, .begin = 0, .length = 0, .whole = rows};
    const int local = ranks.shards / ranks.tensors;
    for (int shard = tensor * local; shard < (tensor + 1) * local; ++shard) {
      entry.parts.push_back(
          {StagePlace{.tensor = shard, .tensors = ranks.shards}.slice(0, rows), shard});
      entry.slice.length += entry.parts.back().slice.length;
    }
    entry.elements = entry.slice.length;
  }
  if (ranks.cut) cut_parameters(table, {ranks.replicas, ranks.copies});
  return table;
}

// The sum over a block of a shard in this step.
double square_of(const PlacedPart& shard, std::int64_t block, std::uint64_t step) {
  const std::int64_t number = shard.count + shard.slice.begin + block;
  std::mt19937_64 random(static_cast<std::uint64_t>(number) + (step << 32));
  return std::uniform_real_distribution<double>(1, 2)(random);
}

double expected_norm(const Ranks& ranks, std::uint64_t step) {
  std::vector<ParameterTable> tables;
  for (int t = 0; t < ranks.tensors; ++t) tables.push_back(table_of(ranks, t));
  double sum = 0;
  for (int s = 0; s < 2; ++s) {
    for (std::size_t i = 0; i < tables[0].stages[at(s)].parameters.size(); ++i) {
      if (!tables[0].is_owner(s, static_cast<int>(i))) continue;
      double square = 0;
      for (const ParameterTable& table : tables) {
        const ParameterEntry& entry = table.stages[at(s)].parameters[i];
        for (const PlacedPart& shard : entry.placed()) {
          double of_shard = 0;
          for (std::int64_t b = 0; b < sum_blocks(shard.count); ++b) {
            of_shard += square_of(shard, b, step);
          }
          square += of_shard;
        }
        if (entry.slice.all()) break;
      }
      sum += square;
    }
  }
  return std::sqrt(sum);
}

// What a rank has of its stage. `broken`: the name of a parameter whose last block is not finite.
std::vector<double> squares_of(const JobLayout& layout, std::uint64_t step,
                               const std::string& broken) {
  const Place here = layout.place.here;
  std::vector<double> squares;
  const std::vector<ParameterEntry>& entries =
      layout.parameters.stages[at(here.pipeline)].parameters;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!layout.parameters.is_owner(here.pipeline, static_cast<int>(i))) continue;
    const std::vector<PlacedPart> shards = entries[i].placed();
    const std::vector<ElementRange> parts = RecordExchange::squared_parts(entries[i], here.replica);
    for (std::size_t shard = 0; shard < parts.size(); ++shard) {
      for (std::int64_t b = 0; b < sum_blocks(parts[shard].count); ++b) {
        const std::int64_t block = (parts[shard].first - shards[shard].first) / kSumBlock + b;
        const bool is_last =
            shard + 1 == shards.size() && block + 1 == sum_blocks(shards[shard].count);
        squares.push_back(entries[i].name == broken && is_last
                              ? std::numeric_limits<double>::infinity()
                              : square_of(shards[shard], block, step));
      }
    }
  }
  return squares;
}

// [step] The results of steps.
std::vector<StepState> records_of(Communicator& comm, const Ranks& ranks, std::uint64_t steps,
                                  const std::string& broken = "") {
  PipelineOptions options;
  options.shape = {.pipeline = 2, .replicas = ranks.replicas, .tensor = ranks.tensors};
  JobContext job(comm, options);
  JobLayout layout;
  layout.place = job.place;
  layout.place.shard_groups.copies = ranks.copies;
  layout.plans.train.placement = Placement::linear(2);
  layout.parameters = table_of(ranks, job.place.here.tensor);
  for (int t = 0; ranks.tensors > 1 && t < ranks.tensors; ++t) {
    layout.tensor_parameters.push_back(table_of(ranks, t));
  }
  RecordExchange record(job, layout, options);
  const std::vector<LossResult> losses(layout.place.here.pipeline == 1 ? 1 : 0, {1, 1});
  StepOutcome outcome;
  outcome.losses = losses;
  std::vector<StepState> results;
  for (std::uint64_t step = 0; step < steps; ++step) {
    results.emplace_back().begin_batch(0, 1, BatchEnd::kUpdate);
    record.exchange(results.back(), outcome, squares_of(layout, step, broken));
  }
  return results;
}

// In a few of so many steps any other order of adding has other bits.
TEST(StepRecordTest, NormAddsBlocksThenSlicesThenParametersWhateverReplicasHave) {
  constexpr std::uint64_t kSteps = 50;
  for (const auto& [replicas, tensors] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(1, 2), std::pair(2, 3)}) {
    run_loopback(2 * replicas * tensors, [&, d = replicas, t = tensors](Communicator& comm) {
      for (const bool cut : {false, true}) {
        for (const int shards : {0, 3 * t}) {
          const std::vector<StepState> results = records_of(comm, {d, t, cut, shards}, kSteps);
          for (std::uint64_t step = 0; step < kSteps; ++step) {
            EXPECT_EQ(results[step].totals.grad_norm,
                      expected_norm({.tensors = t, .shards = shards}, step))
                << d << " replicas, " << t << " tensor ranks" << (cut ? ", cut" : "") << ", "
                << shards << " shards, step " << step;
            EXPECT_EQ(results[step].totals.loss_sum, d) << "of tensor rank 0 alone";
          }
        }
      }
    });
  }
  run_loopback(8, [&](Communicator& comm) {
    const Ranks groups{.replicas = 4, .cut = true, .copies = 2};
    const std::vector<StepState> results = records_of(comm, groups, kSteps);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(results[step].totals.grad_norm, expected_norm({}, step)) << "step " << step;
    }
  });
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(expected_norm({.tensors = 1, .shards = 6}, step),
              expected_norm({.tensors = 3, .shards = 6}, step));
  }
}

TEST(StepRecordTest, ParameterWithABlockThatIsNotFiniteIsNamed) {
  for (const int tensors : {1, 2}) {
    run_loopback(4 * tensors, [&](Communicator& comm) {
      for (const bool cut : {false, true}) {
        const Ranks ranks = {2, tensors, cut, 2 * tensors};
        const StepState step = records_of(comm, ranks, 1, "large").front();
        EXPECT_TRUE(step.refused());
        JobLayout layout;
        layout.parameters = table_of(ranks);
        EXPECT_THAT(step.refusal(layout).what(),
                    ::testing::HasSubstr("not finite, first in parameter 'large'"));
      }
    });
  }
}

}  // namespace
}  // namespace sluice::testing
