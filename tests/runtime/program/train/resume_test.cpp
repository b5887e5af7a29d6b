// Which options a resumed run takes from its save, and which differences are refused.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/program/train/saved_run.hpp"
#include "runtime/program/train/train_options.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Arguments = std::vector<std::string>;

// A directory of saves that hold options and no tensors.
class ResumeOptionsTest : public ::testing::Test {
 protected:
  // What `sluice train --save run <arguments>` on `ranks` ranks leaves at `step`.
  void save(std::uint64_t step, Arguments arguments, int ranks = 1,
            const std::function<void(SaveState&)>& change = {}) {
    arguments.insert(arguments.end(), {"--dry-run", "--save", run()});
    const TrainOptions options = parse_train_options(arguments, ranks);
    SaveState state;
    state.save = state.run = std::string(32, 'a');
    state.sequence = step;
    state.step = step;
    state.time = "2026-01-31T12:00:00Z";
    state.weights_only = options.checkpoint.weights_only;
    const PipelineOptions::Shape& shape = options.pipeline.shape;
    state.layout = {{"ranks", ranks},
                    {"replicas", shape.replicas},
                    {"virtual_replicas", shape.virtual_replicas},
                    {"tensor", shape.tensor},
                    {"tensor_shards", shape.tensor_shards}};
    if (options.pipeline.training.gradient_order != GradientOrder::kStep) {
      state.layout[kMicroBatchOrder] = 1;
    }
    state.options = options.checkpoint.options;
    state.model = model_config_text(options.model);
    state.data = {{"tokens", "4000"}, {"sha256", "00ff"}};
    if (change) change(state);
    fs::create_directories(directory_.path() / "run");
    std::vector<std::string> lines;
    publish_save(run(), begin_save(run(), step, lines), state, lines);
  }
  TrainOptions resume(Arguments arguments, int ranks = 1) {
    arguments.insert(arguments.begin(), {"--dry-run", "--resume", run()});
    return parse_train_options(arguments, ranks);
  }
  std::string refusal(Arguments arguments, int ranks = 1) {
    try {
      (void)resume(std::move(arguments), ranks);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
    return "accepted";
  }
  [[nodiscard]] std::string changes(const TrainOptions& options) {
    return changes_since(*options.resume.from, options);
  }
  [[nodiscard]] std::string run() const { return (directory_.path() / "run").string(); }

  TemporaryDirectory directory_;
};

TEST_F(ResumeOptionsTest, TheNewestSaveGivesTheOptions) {
  save(2, {"--steps", "10", "--layers", "3", "--learning-rate", "0.5"});
  save(4, {"--steps", "10", "--layers", "2", "--learning-rate", "0.25", "--untie", "--keep", "7"});
  const TrainOptions options = resume({});
  EXPECT_EQ(options.resume.from->step, 4U);
  EXPECT_EQ(options.model.layers, 2);
  EXPECT_FALSE(options.model.tied);
  EXPECT_EQ(options.steps, 10U);
  EXPECT_EQ(options.pipeline.training.learning_rate.peak, 0.25);
  EXPECT_EQ(options.checkpoint.keep, 7);
  EXPECT_EQ(options.save, run());
  EXPECT_EQ(changes(options), "");
}

// A training that goes on removes old saves while others read them.
TEST_F(ResumeOptionsTest, ASaveThatVanishesWhileItIsReadIsFollowedByTheNext) {
  save(2, {"--steps", "10"});
  save(4, {"--steps", "10"});
  run_loopback(2, [&](Communicator& world) {
    std::vector<std::string> asked;
    Collectives collectives(world, 1, nullptr);
    with_newest_save(run(), world, [&](const fs::path& save) {
      asked.push_back(save.filename().string());
      collectives.barrier();
      if (asked.size() > 1) return;
      if (world.rank() == 0) fs::remove_all(save);
      collectives.barrier();
      throw Error(ErrorCode::kWeights, "a file is missing");
    });
    EXPECT_THAT(asked, ::testing::ElementsAre("step-00000004", "step-00000002"));
  });
}

TEST_F(ResumeOptionsTest, AnErrorOfASaveThatIsThereIsFinal) {
  save(2, {"--steps", "10"});
  save(4, {"--steps", "10"});
  run_loopback(2, [&](Communicator& world) {
    int calls = 0;
    expect_error(ErrorCode::kWeights, {"damaged"}, [&] {
      with_newest_save(run(), world, [&](const fs::path&) {
        ++calls;
        throw Error(ErrorCode::kWeights, "damaged");
      });
    });
    EXPECT_EQ(calls, 1);
  });
}

TEST_F(ResumeOptionsTest, OneStepGivesItsOwnOptionsAndSavesNextToIt) {
  save(2, {"--steps", "10", "--learning-rate", "0.5"});
  save(4, {"--steps", "10", "--learning-rate", "0.25"});
  for (const char* name : {"/step-00000002", "/step-00000002/"}) {
    const TrainOptions options = parse_train_options({"--dry-run", "--resume", run() + name});
    EXPECT_EQ(options.pipeline.training.learning_rate.peak, 0.5);
    EXPECT_EQ(options.save, run());
  }
}

TEST_F(ResumeOptionsTest, TheCommandLineAndTheFileWinAndDifferencesAreListed) {
  save(4, {"--steps", "10", "--learning-rate", "0.001", "--clip", "2"});
  const fs::path file = directory_.write("more.conf", "steps = 20\nclip = 3\n");
  const TrainOptions options =
      resume({"--config", file.string(), "--steps", "30", "--learning-rate", "0.1"});
  EXPECT_EQ(options.steps, 30U);
  EXPECT_EQ(options.pipeline.training.clip, 3);
  const std::string text = changes(options);
  EXPECT_THAT(text, AllOf(HasSubstr("learning-rate 0.001 -> 0.1"), HasSubstr("steps 10 -> 30"),
                          HasSubstr("clip 2 -> 3"), Not(HasSubstr("warmup"))));
}

TEST_F(ResumeOptionsTest, WhatNobodyGaveSuitsTheStepsOfTheRunThatGoesOn) {
  save(72, {"--steps", "100000"});
  const TrainOptions shorter = resume({"--steps", "92"});
  EXPECT_EQ(shorter.pipeline.training.learning_rate.warmup, 9U);
  EXPECT_THAT(changes(shorter), Not(HasSubstr("warmup")));
  // Saves of earlier versions have the number.
  save(73, {"--steps", "100000", "--warmup", "100"});
  EXPECT_EQ(resume({}).pipeline.training.learning_rate.warmup, 100U);
  const TrainOptions older = resume({"--steps", "92"});
  EXPECT_EQ(older.pipeline.training.learning_rate.warmup, 9U);
  EXPECT_THAT(changes(older), HasSubstr("warmup 100 -> auto"));
  EXPECT_THAT(refusal({"--steps", "92", "--warmup", "93"}), HasSubstr("at most 92"));
}

TEST_F(ResumeOptionsTest, ALearningRateThatJumpsIsNamedWithTheWayOut) {
  const auto jump = [&](const Arguments& arguments) {
    const TrainOptions options = resume(arguments);
    return rate_jump_since(*options.resume.from, options);
  };
  save(50, {"--steps", "50", "--warmup", "5", "--learning-rate", "0.001"});
  EXPECT_THAT(jump({"--steps", "2000"}),
              AllOf(HasSubstr("rate of step 51 from 0.0001 to 0.000999; "),
                    HasSubstr("--learning-rate-decay constant --warmup 0 --learning-rate 0.0001")));
  EXPECT_EQ(jump({"--steps", "2000", "--learning-rate-decay", "constant", "--warmup", "0",
                  "--learning-rate", "0.0001"}),
            "");
  save(51, {"--steps", "100", "--warmup", "5"});
  EXPECT_EQ(jump({"--learning-rate", "0.1"}), "");
}

TEST_F(ResumeOptionsTest, WhatChangesTheFunctionIsRefusedUnlessNamed) {
  save(4, {"--steps", "10", "--heads", "4", "--width", "16"});
  for (const Arguments& given : std::vector<Arguments>{{"--model", "llama"},
                                                       {"--layers", "3"},
                                                       {"--heads", "2"},
                                                       {"--width", "32"},
                                                       {"--context", "8"},
                                                       {"--vocabulary", "300"},
                                                       {"--mlp-width", "20"},
                                                       {"--dropout", "0.1"},
                                                       {"--untie"},
                                                       {"--precision", "bf16"},
                                                       {"--optimizer", "sgd"},
                                                       {"--moment-precision", "bf16"},
                                                       {"--logit-chunks", "2"},
                                                       {"--seed", "99"},
                                                       {"--validation-share", "0.2"}}) {
    const std::string key = given[0].substr(2);
    EXPECT_THAT(refusal(given), AllOf(HasSubstr(key + " "), HasSubstr("--change " + key)));
    Arguments allowed = given;
    allowed.insert(allowed.end(), {"--change", "data," + key});
    EXPECT_THAT(changes(resume(allowed)), HasSubstr(key + " "));
  }
  EXPECT_THAT(
      refusal({"--seed", "9", "--heads", "2", "--change", "seed"}),
      AllOf(HasSubstr("heads 4 -> 2"), HasSubstr("--change heads"), Not(HasSubstr("seed"))));
}

TEST_F(ResumeOptionsTest, AnotherStreamPrecisionIsRefusedUnlessNamed) {
  save(4, {"--steps", "10", "--precision", "bf16"});
  EXPECT_THAT(
      refusal({"--stream-precision", "bf16"}),
      AllOf(HasSubstr("stream-precision fp32 -> bf16"), HasSubstr("--change stream-precision")));
  EXPECT_THAT(changes(resume({"--stream-precision", "bf16", "--change", "data,stream-precision"})),
              HasSubstr("stream-precision fp32 -> bf16"));
  save(5, {"--steps", "10", "--precision", "bf16", "--stream-precision", "bf16"});
  EXPECT_EQ(resume({}).model.stream_precision, DType::kBf16);
  EXPECT_THAT(refusal({"--stream-precision", "fp32"}), HasSubstr("stream-precision bf16 -> fp32"));
  EXPECT_THAT(refusal({"--precision", "fp32"}),
              HasSubstr("--stream-precision bf16 with --precision f32"));
}

TEST_F(ResumeOptionsTest, OtherDataIsRefusedUnlessNamed) {
  save(4, {"--steps", "10"});
  const TrainOptions options = resume({"--data", "moved.txt"});
  const SavedRun& saved = *options.resume.from;
  EXPECT_EQ(data_changes_since(saved, options, saved.data), "");
  const OptionValues other = {{"tokens", "5000"}, {"sha256", "00ff"}};
  expect_error(ErrorCode::kUsage, {"'moved.txt'", "tokens 4000 -> 5000", "--change data"},
               [&] { (void)data_changes_since(saved, options, other); });
  EXPECT_EQ(data_changes_since(saved, resume({"--change", "data"}), other), "tokens 4000 -> 5000");
}

TEST_F(ResumeOptionsTest, TheLayoutIsTakenWhereTheNumberOfRanksIsTheSame) {
  save(4, {"--steps", "10", "--pipeline", "2", "--replicas", "2", "--partition", "1,3"}, 4);
  const TrainOptions same = resume({}, 4);
  EXPECT_EQ(same.pipeline.shape.pipeline, 2);
  EXPECT_EQ(same.partition, "1,3");
  const TrainOptions other = resume({}, 6);
  EXPECT_EQ(other.pipeline.shape.pipeline, 0);
  EXPECT_EQ(other.pipeline.shape.replicas, 2);
  EXPECT_EQ(other.partition, "auto");
  EXPECT_THAT(changes(other),
              AllOf(HasSubstr("pipeline 2 -> auto"), HasSubstr("partition 1,3 -> ")));
  const TrainOptions deeper = resume({"--pipeline", "4", "--replicas", "1"}, 4);
  EXPECT_EQ(deeper.partition, "auto");
  EXPECT_EQ(deeper.pipeline.shape.batch_size, 4);
}

TEST_F(ResumeOptionsTest, VirtualReplicasStayWhereTheReplicasCanDivideThem) {
  save(4, {"--steps", "10", "--replicas", "4", "--micro-batches", "3"}, 4);
  for (const char* replicas : {"1", "2", "4"}) {
    const TrainOptions options = resume({"--replicas", replicas});
    EXPECT_EQ(options.pipeline.shape.virtual_replicas, 4);
    EXPECT_EQ(options.pipeline.shape.micro_batches, 3);
    EXPECT_EQ(options.pipeline.shape.batch_size, 12);
    EXPECT_EQ(bits_change_since(*options.resume.from, options), "");
  }
  const TrainOptions other = resume({"--replicas", "3"});
  EXPECT_EQ(other.pipeline.shape.virtual_replicas, 3);
  EXPECT_EQ(other.pipeline.shape.batch_size, 12);
  EXPECT_EQ(bits_change_since(*other.resume.from, other),
            "other bits from step 5 on: 3 virtual replicas, the save has 4");
  EXPECT_EQ(changes(other), "replicas 4 -> 3, virtual-replicas 4 -> 3, micro-batches 3 -> 4");
  EXPECT_THAT(refusal({"--replicas", "3", "--virtual-replicas", "4"}),
              HasSubstr("option --virtual-replicas: 4"));
}

// They had as many as replicas.
TEST_F(ResumeOptionsTest, SavesOlderThanVirtualReplicasHaveSome) {
  save(4, {"--steps", "10", "--replicas", "4"}, 4, [](SaveState& state) {
    std::erase_if(state.options, [](const auto& each) { return each.first == "virtual-replicas"; });
    state.layout.erase("virtual_replicas");
  });
  const TrainOptions options = resume({"--replicas", "2"}, 2);
  EXPECT_EQ(options.pipeline.shape.virtual_replicas, 4);
  EXPECT_EQ(changes(options), "replicas 4 -> 2");
  EXPECT_EQ(bits_change_since(*options.resume.from, options), "");
}

TEST_F(ResumeOptionsTest, ShardsStayWhereTheTensorRanksCanDivideThem) {
  save(4, {"--steps", "10", "--tensor", "4", "--tensor-shards", "8"}, 4);
  EXPECT_EQ(resume({}, 4).pipeline.shape.tensor, 4);
  EXPECT_EQ(changes(resume({}, 4)), "");
  for (const auto& [tensor, ranks] : {std::pair("1", 1), {"2", 4}, {"8", 8}}) {
    const TrainOptions options = resume({"--tensor", tensor}, ranks);
    EXPECT_EQ(options.pipeline.shape.tensor_shards, 8);
    EXPECT_EQ(bits_change_since(*options.resume.from, options), "");
  }
  const TrainOptions one = resume({}, 1);  // another number of ranks: the layout is not taken
  EXPECT_EQ(one.pipeline.shape.tensor, 1);
  EXPECT_EQ(one.pipeline.shape.tensor_shards, 8);
  EXPECT_EQ(changes(one), "tensor 4 -> 1");
  const TrainOptions other = resume({"--tensor", "3", "--virtual-replicas", "2"}, 3);
  EXPECT_EQ(other.pipeline.shape.tensor_shards, 3);
  EXPECT_EQ(bits_change_since(*other.resume.from, other),
            "other bits from step 5 on: 2 virtual replicas, the save has 1; 3 tensor shards, the "
            "save has 8");
  EXPECT_THAT(refusal({"--tensor", "3", "--tensor-shards", "8"}, 3),
              HasSubstr("option --tensor-shards: 8"));
}

// They had one.
TEST_F(ResumeOptionsTest, SavesOlderThanShardsHaveOne) {
  save(4, {"--steps", "10"}, 2, [](SaveState& state) {
    std::erase_if(state.options, [](const auto& each) { return each.first.starts_with("tensor"); });
    state.layout.erase("tensor");
    state.layout.erase("tensor_shards");
  });
  const TrainOptions same = resume({}, 2);
  EXPECT_EQ(same.pipeline.shape.tensor_shards, 1);
  EXPECT_EQ(changes(same), "");
  EXPECT_EQ(bits_change_since(*same.resume.from, same), "");
  const TrainOptions shared = resume({"--tensor", "2"}, 2);
  EXPECT_EQ(bits_change_since(*shared.resume.from, shared),
            "other bits from step 5 on: 2 tensor shards, the save has 1");
}

// In both directions, and from saves older than the option. Without a new value the save's counts.
TEST_F(ResumeOptionsTest, ShardsMayChange) {
  save(4, {"--steps", "10", "--replicas", "2", "--shard", "optimizer"}, 2);
  EXPECT_EQ(resume({}, 2).pipeline.shape.shard, ShardLevel::kOptimizer);
  EXPECT_EQ(changes(resume({}, 2)), "");
  const TrainOptions whole = resume({"--shard", "none"}, 2);
  EXPECT_EQ(whole.pipeline.shape.shard, ShardLevel::kNone);
  EXPECT_EQ(changes(whole), "shard optimizer -> none");
  save(5, {"--steps", "10", "--replicas", "2"}, 2);
  EXPECT_EQ(changes(resume({"--shard", "optimizer"}, 2)), "shard none -> optimizer");
  TrainOptions options = resume({"--shard", "optimizer"}, 2);
  SavedRun older = *options.resume.from;
  std::erase_if(older.options, [](const auto& option) { return option.first == "shard"; });
  EXPECT_EQ(changes_since(older, options), "shard none -> optimizer");
}

// What a save says of shards of the parameters alone goes with them.
TEST_F(ResumeOptionsTest, GroupsOfShardsMayChangeAndGoWithTheParametersShards) {
  save(4,
       {"--steps", "10", "--replicas", "4", "--shard", "parameters", "--shard-gather", "use",
        "--shard-group", "2"},
       4);
  EXPECT_EQ(resume({}, 4).pipeline.shape.shard_group, 2);
  EXPECT_EQ(changes(resume({"--shard-group", "all"}, 4)), "shard-group 2 -> all");
  const TrainOptions optimizer = resume({"--shard", "optimizer"}, 4);
  EXPECT_EQ(optimizer.pipeline.shape.shard_group, 0);
  EXPECT_EQ(optimizer.pipeline.shape.shard_gather, ShardGather::kAuto);
  const TrainOptions more = resume({"--replicas", "2"}, 2);
  EXPECT_EQ(more.pipeline.shape.shard_group, 0) << "it fits one number of ranks";
}

TEST_F(ResumeOptionsTest, TheOrderOfGradientsStaysUnlessOneIsGiven) {
  const Arguments two = {"--steps", "10", "--replicas", "2", "--shard", "gradients"};
  save(4, two, 2);
  TrainOptions options = resume({"--gradient-order", "micro-batch"}, 2);
  EXPECT_EQ(
      bits_change_since(*options.resume.from, options),
      "other bits from step 5 on: gradients in the order micro-batch, those of the save in the "
      "order step");
  Arguments other = two;
  other.insert(other.end(), {"--gradient-order", "micro-batch"});
  save(5, other, 2);
  options = resume({}, 2);
  EXPECT_EQ(options.pipeline.training.gradient_order, GradientOrder::kMicroBatch);
  EXPECT_EQ(bits_change_since(*options.resume.from, options), "");
  const std::int64_t size = options.pipeline.shape.micro_batch_size;
  options = resume({"--micro-batch-size", fmt::format("{}", 2 * size)}, 2);
  EXPECT_EQ(bits_change_since(*options.resume.from, options),
            fmt::format("other bits from step 6 on: micro-batches of {}, the save has {}", 2 * size,
                        size));
  options = resume({"--gradient-order", "step"}, 2);
  EXPECT_EQ(
      bits_change_since(*options.resume.from, options),
      "other bits from step 6 on: gradients in the order step, those of the save in the order "
      "micro-batch");
}

TEST_F(ResumeOptionsTest, ABatchOptionChangesASavedBatchFromEachSource) {
  save(4, {"--steps", "10", "--micro-batches", "4", "--micro-batch-size", "2"});
  EXPECT_EQ(resume({"--batch-size", "12"}).pipeline.shape.micro_batches, 6);
  const std::string file = directory_.write("more.conf", "batch-size = 12\n").string();
  EXPECT_EQ(resume({"--config", file}).pipeline.shape.micro_batches, 6);
  const TrainOptions both = resume({"--config", file, "--micro-batches", "3"});
  EXPECT_EQ(both.pipeline.shape.micro_batch_size, 4);
}

TEST_F(ResumeOptionsTest, OptionsOfOneRunAreNotTaken) {
  save(4, {"--steps", "10", "--trace", "t.json", "--overwrite"});
  const TrainOptions options = resume({"--verify", "off"});
  EXPECT_EQ(options.trace, "");
  EXPECT_FALSE(options.checkpoint.overwrite);
  EXPECT_EQ(changes(options), "");
}

TEST_F(ResumeOptionsTest, MetricsGoOnOnlyWhereTheSavesDo) {
  save(4, {"--steps", "10", "--metrics", "m.jsonl"});
  EXPECT_EQ(resume({}).metrics, "m.jsonl");
  EXPECT_EQ(resume({"--save", run()}).metrics, "m.jsonl");
  EXPECT_EQ(resume({"--save", (directory_.path() / "branch").string()}).metrics, "");
}

TEST_F(ResumeOptionsTest, AutoGoesOnOrStartsAnew) {
  const Arguments arguments = {"--dry-run", "--save", run(), "--resume", "auto"};
  EXPECT_FALSE(parse_train_options(arguments).resume.from);
  save(4, {"--steps", "10", "--seed", "5"});
  const TrainOptions options = parse_train_options(arguments);
  ASSERT_TRUE(options.resume.from);
  EXPECT_EQ(options.pipeline.training.seed, 5U);
  EXPECT_EQ(options.resume.path, run());
  fs::resize_file(fs::path(run()) / "step-00000004" / "state.json", 20);
  expect_error(ErrorCode::kWeights, {run(), "step-00000004"},
               [&] { (void)parse_train_options(arguments); });
}

TEST_F(ResumeOptionsTest, AnExportAndAnEmptyDirectoryCannotBeResumed) {
  expect_error(ErrorCode::kWeights, {run(), "holds no save"}, [&] { (void)resume({}); });
  save(4, {"--steps", "10", "--save-weights-only"});
  expect_error(ErrorCode::kWeights, {"step-00000004", "weights only"}, [&] { (void)resume({}); });
}

TEST(SaveOptionsTest, NonsenseIsRefusedWithWhatIsLegal) {
  const auto refuse = [](Arguments arguments) -> std::string {
    arguments.emplace_back("--dry-run");
    try {
      (void)parse_train_options(arguments);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refuse({"--save", "run", "--keep", "0"}), AllOf(HasSubstr("--keep"), HasSubstr("1")));
  EXPECT_THAT(refuse({"--save", "run", "--save-minutes", "-1"}), HasSubstr("from 0 up"));
  EXPECT_THAT(refuse({"--save", "run", "--save-minutes", "nan"}), HasSubstr("--save-minutes"));
  EXPECT_THAT(refuse({"--save", "run", "--save-every", "-1"}), HasSubstr("--save-every"));
  EXPECT_THAT(refuse({"--save", "run", "--keep-every", "x"}), HasSubstr("--keep-every"));
  EXPECT_THAT(refuse({"--resume", "run", "--change", "layer"}),
              AllOf(HasSubstr("'layer'"), HasSubstr("layers, heads, kv-heads")));
  EXPECT_THAT(refuse({"--resume", "run", "--change", "layers,"}), HasSubstr("unknown key ''"));
  EXPECT_THAT(refuse({"--resume", "run", "--verify", "all"}), HasSubstr("full, read, off"));
  EXPECT_THAT(refuse({"--on-nan", "retry"}), HasSubstr("stop, skip"));
  EXPECT_THAT(refuse({"--on-nan", "skip", "--max-skips", "0"}), HasSubstr("from 1"));
  EXPECT_THAT(refuse({"--max-skips", "5"}), HasSubstr("--on-nan skip"));
  EXPECT_THAT(refuse({"--profile-operators", "--cuda-graphs"}), HasSubstr("--cuda-graphs"));
  for (const Arguments& arguments : std::vector<Arguments>{{"--save-every", "5"},
                                                           {"--save-minutes", "5"},
                                                           {"--keep", "2"},
                                                           {"--keep-every", "5"},
                                                           {"--save-weights-only"},
                                                           {"--save-local"},
                                                           {"--overwrite"}}) {
    EXPECT_THAT(refuse(arguments), AllOf(HasSubstr(arguments[0]), HasSubstr("--save DIR")));
  }
  EXPECT_THAT(refuse({"--resume", "auto"}), HasSubstr("--save DIR"));
  EXPECT_THAT(refuse({"--save", "run", "--resume", "run", "--overwrite"}),
              AllOf(HasSubstr("--overwrite"), HasSubstr("--resume")));
  EXPECT_THAT(refuse({"--save", "run", "--resume", "auto", "--save-weights-only"}),
              HasSubstr("--save-weights-only"));
  EXPECT_THAT(refuse({"--change", "seed"}), HasSubstr("--resume"));
  EXPECT_THAT(refuse({"--verify", "off"}), HasSubstr("--resume"));
}

TEST(SaveOptionsTest, ValuesReachTheCheckpointerAndThePipeline) {
  const TrainOptions options =
      parse_train_options({"--dry-run", "--save", "run", "--save-every", "7", "--save-minutes",
                           "1.5", "--keep", "3", "--keep-every", "100", "--save-local",
                           "--overwrite", "--on-nan", "skip", "--max-skips", "4"});
  EXPECT_EQ(options.checkpoint.directory, "run");
  EXPECT_EQ(options.checkpoint.every_steps, 7U);
  EXPECT_EQ(options.checkpoint.every_minutes, 1.5);
  EXPECT_EQ(options.checkpoint.keep, 3);
  EXPECT_EQ(options.checkpoint.keep_every, 100U);
  EXPECT_TRUE(options.checkpoint.local);
  EXPECT_TRUE(options.checkpoint.overwrite);
  EXPECT_TRUE(options.pipeline.expert.save_copy);
  EXPECT_TRUE(options.pipeline.training.skip_nonfinite);
  EXPECT_EQ(options.max_skips, 4);
  EXPECT_EQ(parse_train_options({"--dry-run"}).checkpoint.keep, 2);
}

TEST(SaveOptionsTest, ValidationIsBoundedUnlessAllIsNamed) {
  EXPECT_EQ(parse_train_options({"--dry-run"}).validation_samples, TrainOptions::kSomeWindows);
  EXPECT_EQ(parse_train_options({"--dry-run", "--validation-samples", "auto"}).validation_samples,
            TrainOptions::kSomeWindows);
  const TrainOptions all = parse_train_options({"--dry-run", "--validation-samples", "all"});
  EXPECT_EQ(all.validation_samples, TrainOptions::kAllWindows);
  EXPECT_THAT(to_config_text(all.pipeline.expert.configuration),
              HasSubstr("validation-samples = all\n"));
}

}  // namespace
}  // namespace sluice
