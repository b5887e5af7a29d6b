// Bit for bit: losses, gradient norms, validation losses and every parameter are the same for every
// pipeline depth and schedule. Under mpirun one job runs every configuration that fits its ranks;
// each rank compares with a training it does alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>

#include "runtime/program/explore/schedule_report.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice::testing {
namespace {

// With sizes of no multiples.
void make_odd_llama(TransformerConfig& model) {
  set_options_of_llama(model);
  model.width = 31;
  model.vocabulary = 47;
  model.norm_epsilon = 1e-6F;
  model.rotary_scaling = {
      .kind = RotaryScaling::Kind::kLlama3, .factor = 4, .original_context = 10};
}

std::vector<TrainingCase> cases() {
  std::vector<TrainingCase> all;
  all.push_back(named("tied"));
  all.push_back(named("untied"));
  all.back().model.tied = false;
  all.push_back(named("dropout"));
  all.back().model.dropout = 0.2F;
  all.push_back(named("odd layers, more micro-batches"));
  all.back().model.layers = 3;
  all.back().micro_batches = 5;
  all.push_back(named("more stages than layers"));
  all.back().model.layers = 1;
  all.push_back(named("smaller last micro-batch"));
  all.back().micro_batches = 4;
  all.back().micro_batch_size = 3;
  all.back().batch_size = 10;
  all.push_back(named("one micro-batch"));
  all.back().micro_batches = 1;
  all.push_back(named("llama, grouped queries"));
  all.back().model.kind = TransformerKind::kLlama;
  all.back().model.kv_heads = 1;
  all.push_back(named("llama with all its options"));
  make_odd_llama(all.back().model);
  all.push_back(named("bf16, moments too"));
  all.back().model.precision = DType::kBf16;
  all.back().moments = DType::kBf16;
  all.push_back(named("bf16 stream, dropout"));
  all.back().model.precision = all.back().model.stream_precision = DType::kBf16;
  all.back().model.dropout = 0.2F;
  all.push_back(named("llama with all its options, bf16 stream"));
  make_odd_llama(all.back().model);
  all.back().model.precision = all.back().model.stream_precision = DType::kBf16;
  all.back().model.recompute = Recompute::kBlock;
  return all;
}

// Large enough that another leading dimension, or accumulation elsewhere than in place, would show.
TrainingCase large_case() {
  TrainingCase large = named("1024 tokens a micro-batch, MLP 1024 wide");
  large.model.width = 256;
  large.model.heads = 4;
  large.model.kv_heads = 4;
  large.model.context = 256;
  large.micro_batches = 2;
  large.micro_batch_size = 4;
  large.steps = 2;
  return large;
}

bool is_legal(const std::string& schedule, const ScheduleShape& shape) {
  try {
    return stages_of(schedule, shape) > 0;
  } catch (const Error&) {
    return false;
  }
}

void expect_same(Communicator& comm, const TrainingCase& what, const Layout& layout,
                 const TrainingOutcome& expected, const TrainingOutcome& actual) {
  const std::string where = what.name + ", p = " + std::to_string(layout.pipeline) +
                            ", d = " + std::to_string(layout.replicas) + ", " + layout.schedule +
                            ", v = " + std::to_string(layout.chunks) +
                            ", m = " + std::to_string(what.micro_batches);
  testing::expect_same(comm, where, expected, actual);
}

int stages_per_rank(const std::string& schedule) {
  return stages_of(schedule, {.ranks = 2, .micro_batches = 2}) / 2;
}

class ExactnessTest : public ::testing::TestWithParam<int> {};

TEST_P(ExactnessTest, EveryDepthAndScheduleGivesTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const TrainingCase& what : cases()) {
      const TrainingOutcome expected = alone(comm, what);
      for (const char* schedule : {"gpipe", "1f1b"}) {
        const Layout layout{.pipeline = GetParam(), .schedule = schedule};
        expect_same(comm, what, layout, expected, train(comm, what, layout));
      }
    }
  });
}

// 1,280 rows: chunks of 512, 512 and 256, and a last micro-batch of 640 rows. On a CPU they change
// no bit, also where the backward is split and where blocks are recomputed.
TEST_P(ExactnessTest, LogitsInChunksGiveTheBitsOfLogitsAtOnce) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const DType precision : {DType::kF32, DType::kBf16}) {
      TrainingCase what = named("chunks of logits");
      what.model.context = 128;
      what.model.tied = precision == DType::kF32;
      what.model.precision = precision;
      what.micro_batches = 2;
      what.micro_batch_size = 10;
      what.batch_size = 15;
      what.steps = 2;
      const TrainingOutcome expected = alone(comm, what);
      for (const int chunks : {2, 3, 1000}) {
        what.model.logit_chunks = chunks;
        what.model.recompute = chunks == 2 ? Recompute::kBlock : Recompute::kNone;
        for (const char* schedule : {"gpipe", "zb-h1"}) {
          const Layout layout{.pipeline = GetParam(), .schedule = schedule};
          expect_same(comm, what, layout, expected, train(comm, what, layout));
        }
      }
    }
  });
}

// Whole, split and overlapped backwards against one rank that keeps everything.
TEST_P(ExactnessTest, RecomputationGivesTheBitsOfOneRankThatKeeps) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const bool llama : {false, true}) {
      TrainingCase what = named(llama ? "recomputation of llama" : "recomputation");
      if (llama) make_odd_llama(what.model);
      what.model.layers = 3;
      what.model.dropout = 0.2F;
      what.micro_batches = 8;
      what.micro_batch_size = 1;
      what.steps = 2;
      const TrainingOutcome expected = alone(comm, what);
      constexpr auto kNone = Recompute::kNone, kAttention = Recompute::kAttention,
                     kBlock = Recompute::kBlock;
      for (const std::vector<Recompute>& blocks : {std::vector(3, kNone),
                                                   std::vector(3, kAttention),
                                                   std::vector(3, kBlock),
                                                   {kBlock, kAttention, kNone}}) {
        what.model.recompute_blocks = blocks;
        for (const char* name : {"gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"}) {
          const bool chunked = std::string(name).ends_with("-v") || *name == 'i';
          const int chunks = chunked ? 2 : 1;
          if (!is_legal(name, {GetParam(), what.micro_batches, chunks})) continue;
          const Layout layout{.pipeline = GetParam(), .schedule = name, .chunks = chunks};
          expect_same(comm, what, layout, expected, train(comm, what, layout));
        }
      }
    }
  });
}

// States come back into another slot, and while others leave.
TEST_P(ExactnessTest, OffloadedActivationsGiveTheBitsOfOneRankThatKeeps) {
  using To = PipelineOptions::Offload::To;
  const std::string directory = std::filesystem::temp_directory_path();
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = named("offloaded activations");
    what.model.layers = 4;
    what.model.dropout = 0.2F;
    what.micro_batches = 9;
    what.batch_size = 17;  // the last micro-batch is smaller
    what.steps = 2;
    const TrainingOutcome expected = alone(comm, what);
    for (const To to : {To::kDisk, To::kCachedDisk}) {
      what.model.recompute = to == To::kDisk ? Recompute::kNone : Recompute::kBlock;
      for (const std::string& name : schedule_names()) {
        if (name == "forward-only" || name == "gpipe-lifo") continue;  // the latter: other bits
        const int chunks = stages_per_rank(name);
        if (!is_legal(name, {GetParam(), what.micro_batches, chunks})) continue;
        const Layout layout{.pipeline = GetParam(),
                            .schedule = name,
                            .chunks = chunks,
                            .offload = {.activations = to, .directory = directory}};
        expect_same(comm, what, layout, expected, train(comm, what, layout));
      }
    }
  });
}

// Ten samples a step, cut in every way: the last micro-batch is a smaller one. Short contexts ask
// for it, longer ones always have it.
std::vector<TrainingCase> cases_of_any_micro_batch() {
  std::vector<TrainingCase> all;
  const auto add = [&](const char* name, int context, DType precision) -> TransformerConfig& {
    all.push_back(named(name));
    TrainingCase& added = all.back();
    added.model.context = context;
    added.model.batch_invariant = context < 256;
    added.model.precision = precision;
    added.batch_size = 10;
    added.steps = 2;
    return added.model;
  };
  add("gpt2 of 7 positions", 7, DType::kF32).dropout = 0.2F;
  make_odd_llama(add("llama of 96 positions", 96, DType::kF32));
  add("gpt2 of 257 positions in bf16", 257, DType::kBf16).logit_chunks = 2;
  TransformerConfig& llama = add("llama of 320 positions, bf16 stream", 320, DType::kBf16);
  make_odd_llama(llama);
  llama.stream_precision = DType::kBf16;
  llama.recompute = Recompute::kBlock;
  add("gpt2 of 1000 positions", 1000, DType::kF32).logit_chunks = 2;
  return all;
}

TEST_P(ExactnessTest, EveryMicroBatchSizeGivesTheBitsOfSingleSamples) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (TrainingCase& what : cases_of_any_micro_batch()) {
      for (const int threads : {1, 2}) {
        if (threads == 2 && GetParam() > 1) continue;
        what.threads = threads;
        what.micro_batch_size = 1;
        what.micro_batches = 10;
        const TrainingOutcome expected = alone(comm, what);
        for (const int size : {2, 3, 4, 10}) {
          if (threads == 2 && size != 3) continue;
          what.micro_batch_size = size;
          what.micro_batches = (10 + size - 1) / size;
          const Layout layout{.pipeline = GetParam(), .schedule = size == 3 ? "zb-h1" : "1f1b"};
          expect_same(comm, what, layout, expected, train(comm, what, layout));
        }
      }
    }
  });
}

TEST_P(ExactnessTest, LargeMatmulsGiveTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TrainingCase what = large_case();
    const TrainingOutcome expected = alone(comm, what);
    const Layout layout{.pipeline = GetParam()};
    expect_same(comm, what, layout, expected, train(comm, what, layout));
  });
}

TEST_P(ExactnessTest, DescendingBackwardsGiveEqualBitsAmongThemselves) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TrainingCase what = cases().front();
    const TrainingOutcome expected = alone(comm, what, {.schedule = "gpipe-lifo"});
    const Layout layout{.pipeline = GetParam(), .schedule = "gpipe-lifo"};
    expect_same(comm, what, layout, expected, train(comm, what, layout));
  });
}

// Chunks, V placement, split and overlapped backwards included: every generator, run for real.
TEST_P(ExactnessTest, EveryGeneratorGivesTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = cases().front();
    what.model.layers = 3;
    what.micro_batch_size = 1;
    what.steps = 2;
    for (const int micro_batches : {1, 2, 3, 8, 9}) {
      what.micro_batches = micro_batches;
      const TrainingOutcome expected = alone(comm, what);
      for (const std::string& name : schedule_names()) {
        for (int chunks = 1; chunks <= 3; ++chunks) {
          if (name == "forward-only" || !is_legal(name, {GetParam(), micro_batches, chunks}))
            continue;
          const Schedule schedule = generate(name, {GetParam(), micro_batches, chunks});
          const Layout layout{.pipeline = GetParam(), .schedule = name, .chunks = chunks};
          const TrainingOutcome actual = train(comm, what, layout);
          if (is_exact(schedule)) expect_same(comm, what, layout, expected, actual);
          if (comm.rank() != 0) continue;
          EXPECT_EQ(actual.peaks, peak_in_flight(schedule)) << name << ", m = " << micro_batches;
        }
      }
    }
  });
}

TEST_P(ExactnessTest, EngineHoldsAsManyMicroBatchesAsTheScheduleSays) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = cases().front();
    what.micro_batches = 5;
    const TrainingOutcome outcome = train(comm, what, {.pipeline = GetParam()});
    if (comm.rank() != 0) return;
    for (int s = 0; s < GetParam(); ++s) {
      EXPECT_EQ(outcome.peaks[static_cast<std::size_t>(s)], std::min(GetParam() - s, 5));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Depths, ExactnessTest, ::testing::Values(1, 2, 3, 4));

// Trains with the order that a file holds: the bits of one rank where it is exact, else its own
// bits in every run.
void train_from_file(const std::string& path, bool exact) {
  const auto order = std::make_shared<const Schedule>(load_schedule(path).schedule);
  EXPECT_EQ(is_exact(*order), exact) << path;
  with_ranks(order->placement.ranks(), [&](Communicator& comm) {
    TrainingCase what = named(order->name.c_str());
    what.model.layers = 3;
    what.micro_batches = order->micro_batches;
    what.micro_batch_size = 1;
    what.steps = 2;
    const Layout layout{.pipeline = order->placement.ranks(), .own = order};
    const TrainingOutcome actual = train(comm, what, layout);
    const TrainingOutcome expected = exact ? alone(comm, what) : train(comm, what, layout);
    expect_same(comm, what, layout, expected, actual);
    if (comm.rank() != 0) return;
    EXPECT_EQ(actual.peaks, peak_in_flight(*order)) << path;
  });
}

struct Sample {
  const char* file;
  bool exact = true;
};

class ScheduleFilesTest : public ::testing::TestWithParam<Sample> {};

TEST_P(ScheduleFilesTest, TrainLikeAGenerator) {
  train_from_file(std::string(SLUICE_SCHEDULE_SAMPLES "/") + GetParam().file, GetParam().exact);
}

INSTANTIATE_TEST_SUITE_P(All, ScheduleFilesTest,
                         ::testing::Values(Sample{"v_split.json"}, Sample{"overlapped_v.csv"},
                                           Sample{"every_message_cell.csv"},
                                           Sample{"older_alphabet.csv"},
                                           Sample{"descending.csv", false},
                                           Sample{"pytorch_2_15/interleaved_zero_bubble.csv"},
                                           Sample{"pytorch_2_15/zbv.csv"},
                                           Sample{"pytorch_2_15/dualpipev.csv"}),
                         [](const auto& instance) {
                           return std::filesystem::path(instance.param.file).stem().string();
                         });

class ReplicasTest : public ::testing::TestWithParam<int> {};

// Two replicas prove nothing about the order of a sum; three and four do.
TEST_P(ReplicasTest, DepthTwoGivesTheBitsOfDepthOne) {
  const int replicas = GetParam();
  TrainingCase what = cases().front();
  what.micro_batches = 2;
  what.micro_batch_size = 1;
  with_ranks(2 * replicas, [&](Communicator& comm) {
    TrainingOutcome expected;
    train_on_some(comm, what, {.pipeline = 1, .replicas = replicas},
                  [&](const TrainingOutcome& outcome) { expected = outcome; });
    for (const RankOrder order : {RankOrder::kPipelineFirst, RankOrder::kReplicaFirst}) {
      const Layout layout{.pipeline = 2, .replicas = replicas, .order = order};
      expect_same(comm, what, layout, expected, train(comm, what, layout));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Counts, ReplicasTest, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace sluice::testing
