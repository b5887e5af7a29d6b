// Saving while a pipeline trains, over ranks that are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "runtime/checkpoint/background.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A small model over the ranks of a job, which trains, saves and loads.
class CheckpointerTest : public ::testing::Test {
 protected:
  using Body = std::function<void(Pipeline&, Communicator&)>;

  void run(int ranks, int replicas, const Body& body) {
    const auto source = synthetic_tokens(model_);
    const StageFactory factory = Transformer(model_);
    PipelineOptions options;
    options.shape = {.replicas = replicas, .micro_batches = 4 / replicas};
    options.training.learning_rate = {.peak = 1e-2, .steps = 20};
    options.expert.save_copy = true;
    options.training.optimizer.moments = moments_;
    run_loopback(ranks, [&](Communicator& comm) {
      Pipeline pipeline(comm, factory, *source, options);
      body(pipeline, comm);
    });
  }

  // The digest on rank 0 of a run of `steps` steps that saves nothing.
  std::string digest_after(int steps, int ranks, int replicas = 1) {
    std::string digest;
    run(ranks, replicas, [&](Pipeline& pipeline, Communicator& comm) {
      for (int step = 0; step < steps; ++step) pipeline.train_step();
      const std::string mine = digest_of(pipeline);
      if (comm.rank() == 0) digest = mine;
    });
    return digest;
  }

  [[nodiscard]] std::vector<std::string> steps_on_disk() const {
    std::vector<std::string> names;
    for (const Save& save : scan_saves(saves()).saves) {
      names.push_back(save.directory.filename().string());
    }
    return names;
  }
  [[nodiscard]] fs::path saves() const { return directory_.path() / "saves"; }

  TemporaryDirectory directory_;
  TransformerConfig model_ = small_model();
  DType moments_ = DType::kF32;
};

void train(Pipeline& pipeline, Checkpointer& saver, int steps) {
  for (int step = 0; step < steps; ++step) saver.after_step(pipeline.train_step());
}

TEST_F(CheckpointerTest, SavesWhileTrainingAndContinuesUnderOtherLayoutsWithTheSameBits) {
  const std::string whole = digest_after(9, 2);
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves(), .every_steps = 2, .keep = 3});
    train(pipeline, saver, 7);
    saver.save_now();
  });
  EXPECT_EQ(steps_on_disk().front(), "step-00000007");
  for (const int ranks : {1, 2, 3}) {
    std::string resumed;
    run(ranks, 1, [&](Pipeline& pipeline, Communicator& comm) {
      const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves());
      EXPECT_EQ(loaded.step, 7U);
      EXPECT_EQ(pipeline.step(), 7U);
      EXPECT_THAT(loaded.notes, ::testing::IsEmpty());
      for (int step = 0; step < 2; ++step) pipeline.train_step();
      const std::string mine = digest_of(pipeline);
      if (comm.rank() == 0) resumed = mine;
    });
    EXPECT_EQ(resumed, whole) << ranks << " ranks";
  }
}

TEST_F(CheckpointerTest, MomentsInBf16ContinueUnderOtherLayoutsWithTheSameBits) {
  moments_ = DType::kBf16;
  const std::string whole = digest_after(9, 2);
  for (const int ranks : {1, 3}) EXPECT_EQ(digest_after(9, ranks), whole) << ranks << " ranks";
  run(3, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 5);
    saver.save_now();
  });
  std::size_t moments = 0;
  const SaveState state = scan_saves(saves()).saves.front().state;
  for (const SavedTensor& tensor : state.tensors) {
    if (!tensor.file.starts_with("optimizer")) continue;
    EXPECT_EQ(tensor.spec.dtype, DType::kBf16) << tensor.name;
    ++moments;
  }
  EXPECT_GT(moments, 0U);
  for (const int ranks : {1, 2}) {
    std::string resumed;
    run(ranks, 1, [&](Pipeline& pipeline, Communicator& comm) {
      EXPECT_EQ(load_checkpoint(pipeline, saves()).step, 5U);
      for (int step = 0; step < 4; ++step) pipeline.train_step();
      const std::string mine = digest_of(pipeline);
      if (comm.rank() == 0) resumed = mine;
    });
    EXPECT_EQ(resumed, whole) << ranks << " ranks";
  }
}

TEST_F(CheckpointerTest, MomentsOfAnotherPrecisionAreRefusedOrConverted) {
  for (const DType saved : {DType::kF32, DType::kBf16}) {
    const fs::path path = saves() / name_of(saved);
    moments_ = saved;
    std::map<std::string, std::vector<float>> before;
    const auto moments = [](Pipeline& pipeline) {
      std::map<std::string, std::vector<float>> all;
      for (const OptimizerState& state : pipeline.optimizer_state()) {
        std::vector<float>& values = all[state.kind + state.parameter];
        for (std::int64_t i = 0; i < state.tensor.elements(); ++i) {
          values.push_back(state.tensor.spec.dtype == DType::kF32
                               ? state.tensor.floats()[static_cast<std::size_t>(i)]
                               : to_float(state.tensor.as<Bf16>()[i]));
        }
      }
      return all;
    };
    run(1, 1, [&](Pipeline& pipeline, Communicator&) {
      Checkpointer saver(pipeline, {.directory = path});
      train(pipeline, saver, 2);
      saver.save_now();
      before = moments(pipeline);
    });
    moments_ = saved == DType::kF32 ? DType::kBf16 : DType::kF32;
    run(1, 1, [&](Pipeline& pipeline, Communicator&) {
      const std::string untouched = digest_of(pipeline);
      expect_error(ErrorCode::kWeights, {"exp_avg", name_of(saved), "--change moment-precision"},
                   [&] { (void)load_checkpoint(pipeline, path); });
      EXPECT_EQ(digest_of(pipeline), untouched);
      (void)load_checkpoint(pipeline, path, Verify::kFull, OtherPrecision::kConvert);
      if (saved == DType::kF32) {
        for (auto& [name, values] : before) {
          for (float& value : values) value = to_float(to_bf16(value));
        }
      }
      EXPECT_EQ(moments(pipeline), before);
      (void)pipeline.train_step();
    });
  }
}

TEST_F(CheckpointerTest, SavingDoesNotChangeABit) {
  std::string saved;
  run(4, 2, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves(), .every_steps = 1});
    train(pipeline, saver, 6);
    const std::string mine = digest_of(pipeline);
    if (comm.rank() == 0) saved = mine;
  });
  EXPECT_EQ(saved, digest_after(6, 4, 2));
}

TEST_F(CheckpointerTest, ReplicasShareTheWriting) {
  run(4, 2, [&](Pipeline& pipeline, Communicator&) {
    save_checkpoint(pipeline, {.directory = saves()});
  });
  const std::vector<Save> found = scan_saves(saves()).saves;
  ASSERT_EQ(found.size(), 1U);
  std::map<std::string, std::uint64_t> bytes;
  for (const SavedTensor& tensor : found[0].state.tensors) {
    bytes[tensor.file] += tensor.spec.bytes();
  }
  EXPECT_EQ(bytes.count("model-00004-of-00004.safetensors"), 1U);
  EXPECT_EQ(bytes.size(), 8U);  // four ranks, parameters and optimizer state
  // The two replicas of the first rank.
  const auto first = bytes.at("model-00001-of-00004.safetensors");
  const auto second = bytes.at("model-00002-of-00004.safetensors");
  EXPECT_LT(std::max(first, second), 3 * std::min(first, second));
}

TEST_F(CheckpointerTest, KeepsTheNewestAndMilestones) {
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves(), .keep = 2, .keep_every = 4});
    for (int step = 1; step <= 9; ++step) {
      train(pipeline, saver, 1);
      if (step % 2 == 0) saver.save_now();
    }
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000008", "step-00000006", "step-00000004"));
}

TEST_F(CheckpointerTest, ASaveThatIsDueIsPublishedWithinTheNextSteps) {
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves(), .every_steps = 3});
    int steps = 0;
    // Nothing bounds how long the disk takes; a deadline of many steps does.
    bool there = false;
    while (!there && steps < 5000) {
      train(pipeline, saver, 1);
      ++steps;
      there = PipelineAccess::world(pipeline).broadcast_string(
                  comm.rank() == 0 && !saver.last_save().empty() ? "yes" : "no", 0) == "yes";
    }
    EXPECT_TRUE(there);
  });
}

TEST_F(CheckpointerTest, ADirectoryOfAnotherRunIsRefusedUnlessItMayBeOverwritten) {
  const auto save_one = [&](const CheckpointOptions& options, int steps) {
    run(2, 1, [&](Pipeline& pipeline, Communicator&) {
      Checkpointer saver(pipeline, options);
      train(pipeline, saver, steps);
      saver.save_now();
    });
  };
  save_one({.directory = saves()}, 5);
  expect_error(ErrorCode::kIo, {"step-00000005", "--resume auto", "--overwrite"},
               [&] { save_one({.directory = saves()}, 1); });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000005"));
  save_one({.directory = saves(), .overwrite = true}, 1);
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000001"));
}

TEST_F(CheckpointerTest, ARunThatWentBackReplacesLaterStepsOnlyWhenAsked) {
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves(), .keep = 9});
    for (int step = 1; step <= 4; ++step) {
      train(pipeline, saver, 1);
      saver.save_now();
    }
  });
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves() / "step-00000002");
    expect_error(ErrorCode::kIo, {"'step-00000004', which is newer than step 2", "--overwrite"},
                 [&] { Checkpointer(pipeline, {.directory = saves(), .run = loaded.run}); });
  });
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves() / "step-00000002");
    EXPECT_EQ(loaded.step, 2U);
    Checkpointer saver(pipeline,
                       {.directory = saves(), .keep = 9, .overwrite = true, .run = loaded.run});
    train(pipeline, saver, 1);
    saver.save_now();
  });
  // The newest save is the one that was made last.
  EXPECT_EQ(steps_on_disk().front(), "step-00000003");
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    EXPECT_EQ(load_checkpoint(pipeline, saves()).step, 3U);
  });
}

TEST_F(CheckpointerTest, WhatASaveCannotRecordIsRefusedFirst) {
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    std::string keys;
    for (int i = 0; i < 5000; ++i) keys += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
    expect_error(ErrorCode::kUsage, {"no JSON that a save can hold"}, [&] {
      Checkpointer(pipeline, {.directory = saves(), .model = "{" + keys + "}"});
    });
  });
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    saver.save_now();
  });
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves());
    expect_error(ErrorCode::kUsage, {"is one save of a directory of saves"}, [&] {
      Checkpointer(pipeline, {.directory = loaded.directory, .run = loaded.run});
    });
  });
}

TEST_F(CheckpointerTest, ABrokenSaveIsNamedAndTheOneBeforeIsUsed) {
  std::string before;
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    saver.save_now();
    const std::string mine = digest_of(pipeline);
    if (comm.rank() == 0) before = mine;
    train(pipeline, saver, 1);
    saver.save_now();
  });
  const fs::path damaged = saves() / "step-00000002" / "optimizer-00002-of-00002.safetensors";
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put('\x55');
  file.close();
  for (const Verify verify : {Verify::kFull, Verify::kRead}) {
    run(3, 1, [&](Pipeline& pipeline, Communicator& comm) {
      const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves(), verify);
      EXPECT_EQ(loaded.step, 1U);
      ASSERT_EQ(loaded.notes.size(), 1U);
      EXPECT_THAT(loaded.notes[0], HasSubstr("optimizer-00002-of-00002.safetensors"));
      const std::string mine = digest_of(pipeline);
      if (comm.rank() == 0) {
        EXPECT_EQ(mine, before);
      }
    });
  }
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    const std::string untouched = digest_of(pipeline);
    expect_error(ErrorCode::kWeights, {"step-00000002", "optimizer-00002-of-00002.safetensors"},
                 [&] { (void)load_checkpoint(pipeline, saves() / "step-00000002"); });
    EXPECT_TRUE(pipeline.usable());
    EXPECT_EQ(digest_of(pipeline), untouched);
  });
}

TEST_F(CheckpointerTest, ASaveThatCannotBeginLeavesThePipelineUsable) {
  const std::string whole = digest_after(4, 3);
  run(3, 1, [&](Pipeline& pipeline, Communicator& comm) {
    bool ready = false;
    Checkpointer saver(pipeline, {.directory = saves()});
    saver.add_state("loader", [&]() -> ProgramState {
      if (!ready) throw std::runtime_error("the loader is not ready");
      return {};
    });
    train(pipeline, saver, 1);
    expect_error(ErrorCode::kUser, {"state 'loader': the loader is not ready"},
                 [&] { saver.save_now(); });
    EXPECT_TRUE(pipeline.usable());
    ready = true;
    saver.save_now();
    train(pipeline, saver, 1);
    // The directory goes away, with the lock, as that of a network file system may.
    const fs::path away = directory_.path() / "away";
    if (comm.rank() == 0) fs::rename(saves(), away);
    expect_error(ErrorCode::kIo, {"saves"}, [&] { saver.save_now(); });
    if (comm.rank() == 0) fs::rename(away, saves());
    EXPECT_TRUE(pipeline.usable());
    train(pipeline, saver, 2);
    saver.save_now();
    const std::string mine = digest_of(pipeline);
    if (comm.rank() == 0) {
      EXPECT_EQ(mine, whole);
    }
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000004", "step-00000001"));
}

TEST_F(CheckpointerTest, ANoteThatThrowsIsRefusedOnAllRanks) {
  run(3, 1, [&](Pipeline& pipeline, Communicator& comm) {
    int notes = 0;
    Checkpointer saver(pipeline, {.directory = saves(), .every_steps = 1}, [&](const std::string&) {
      ++notes;
      throw std::runtime_error("the log is full");
    });
    int refused = 0;
    for (int step = 0; step < 4 && refused == 0; ++step) {
      const StepReport report = pipeline.train_step();
      try {
        saver.after_step(report);
      } catch (const Error& error) {
        EXPECT_EQ(error.rank(), 0);
        EXPECT_STREQ(error.what(), "the note of a Checkpointer: the log is full");
        ++refused;
      }
    }
    EXPECT_EQ(refused, 1) << "no save had to wait";
    EXPECT_EQ(notes, comm.rank() == 0 ? 1 : 0);
    EXPECT_TRUE(pipeline.usable());
    train(pipeline, saver, 1);
    saver.save_now();
  });
}

TEST_F(CheckpointerTest, ASaveThatIsLostWhileItIsWrittenIsRefusedOnAllRanksAndTheNextOneSucceeds) {
  run(3, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves(), .every_steps = 2});
    train(pipeline, saver, 2);
    Collectives& world = PipelineAccess::world(pipeline);
    world.barrier();
    if (comm.rank() == 0) {
      const fs::directory_iterator entries(saves());
      const auto open = std::find_if(begin(entries), end(entries),
                                     [](const auto& entry) { return entry.is_directory(); });
      fs::rename(open->path(), directory_.path() / "lost");
    }
    world.barrier();
    expect_error(ErrorCode::kIo, {"step-00000002"}, [&] { saver.save_now(); });
    EXPECT_TRUE(pipeline.usable());
    saver.save_now();  // the same step once more
    train(pipeline, saver, 1);
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000002"));
}

TEST_F(CheckpointerTest, ASaveOfOneRankAloneIsRefusedOnAllRanks) {
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    expect_error(ErrorCode::kMismatch, {"ranks make different calls", "a save", "train_step()"},
                 [&] {
                   if (comm.rank() == 0) return saver.save_now();
                   (void)pipeline.train_step();
                 });
    expect_error(ErrorCode::kMismatch, {"ranks make different calls", "state()", "close()"}, [&] {
      if (comm.rank() == 0) return pipeline.close();
      (void)pipeline.state();
    });
    EXPECT_TRUE(pipeline.usable());
    EXPECT_EQ(pipeline.train_step().step, 2U);
    saver.save_now();
    pipeline.close();
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000002"));
}

TEST_F(CheckpointerTest, ALoadFromOtherPathsIsRefusedOnAllRanks) {
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    (void)pipeline.train_step();
    const fs::path mine = directory_.path() / (comm.rank() == 0 ? "a" : "b");
    for (const char* name : {"a", "b"}) {
      save_checkpoint(pipeline, {.directory = directory_.path() / name});
      (void)pipeline.train_step();
    }
    const std::string before = digest_of(pipeline);
    const auto refused = [&](const auto& load) {
      expect_error(ErrorCode::kMismatch, {"'path to load from': rank 0 has '", "/a', rank 1 has '"},
                   load);
    };
    refused([&] { (void)load_checkpoint(pipeline, mine); });
    refused([&] { load_weights(pipeline, mine); });
    refused([&] { load_weights(pipeline, mine, FileLayout{}); });
    EXPECT_EQ(digest_of(pipeline), before);
    EXPECT_EQ(load_checkpoint(pipeline, directory_.path() / "b").step, 2U);
  });
}

TEST_F(CheckpointerTest, StatesOfTheProgramComeBackOnEveryRank) {
  const std::array<std::int32_t, 3> numbers = {7, -1, 1 << 30};
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves()});
    saver.add_state("loader", [&] {
      const auto bytes = std::as_bytes(std::span(numbers));
      const HostTensor order{{DType::kI32, {3}}, {bytes.begin(), bytes.end()}};
      return ProgramState{.json = R"({"epoch":3})", .tensors = {{"order", order}}};
    });
    train(pipeline, saver, 1);
    saver.save_now();
  });
  run(3, 1, [&](Pipeline& pipeline, Communicator&) {
    const LoadedCheckpoint loaded = load_checkpoint(pipeline, saves());
    ASSERT_EQ(loaded.states.count("loader"), 1U);
    const ProgramState& state = loaded.states.at("loader");
    EXPECT_EQ(state.json, R"({"epoch":3})");
    ASSERT_EQ(state.tensors.size(), 1U);
    const HostTensor& order = state.tensors.at("order");
    EXPECT_EQ(order.spec, (TensorSpec{DType::kI32, {3}}));
    EXPECT_TRUE(std::ranges::equal(order.bytes, std::as_bytes(std::span(numbers))));
  });
}

TEST_F(CheckpointerTest, AnyRankStopsAllAtTheEndOfTheSameStep) {
  run(3, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    EXPECT_FALSE(saver.stop_requested());
    if (comm.rank() == 2) saver.request_stop();
    train(pipeline, saver, 1);
    EXPECT_TRUE(saver.stop_requested());
    saver.save_now();
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000002"));
}

TEST_F(CheckpointerTest, ACallerThatCaughtItsOwnExceptionSaves) {
  std::string before;
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves()});
    try {
      train(pipeline, saver, 2);
      throw std::runtime_error("the caller's own");
    } catch (const std::runtime_error&) {
      saver.save_now();
    }
    saver.save_now();  // nothing new: returns at once
    const std::string mine = digest_of(pipeline);
    if (comm.rank() == 0) before = mine;
  });
  EXPECT_THAT(steps_on_disk(), ElementsAre("step-00000002"));
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    (void)load_checkpoint(pipeline, saves());
    EXPECT_EQ(digest_of(pipeline), before);
  });
}

TEST_F(CheckpointerTest, TheStopFileStopsAndGoes) {
  fs::create_directories(saves());
  std::ofstream(saves() / "stop").close();
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    EXPECT_TRUE(saver.stop_requested());
    saver.save_now();
  });
  EXPECT_FALSE(fs::exists(saves() / "stop"));
}

TEST_F(CheckpointerTest, ADirectoryThatIsGoneIsAnErrorOnEveryRank) {
  std::atomic<int> told = 0;
  run(2, 1, [&](Pipeline& pipeline, Communicator& comm) {
    Checkpointer saver(pipeline, {.directory = saves()});
    train(pipeline, saver, 1);
    PipelineAccess::world(pipeline).barrier();
    if (comm.rank() == 0) fs::remove_all(saves());
    PipelineAccess::world(pipeline).barrier();
    try {
      saver.save_now();
      ADD_FAILURE() << "saved into a directory that is gone";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(saves().string()));
      ++told;
    }
  });
  EXPECT_EQ(told, 2);
}

TEST_F(CheckpointerTest, WeightsAloneLoadButDoNotResume) {
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    save_checkpoint(pipeline, {.directory = saves(), .weights_only = true});
  });
  run(1, 1, [&](Pipeline& pipeline, Communicator&) { load_weights(pipeline, saves()); });
  expect_error(ErrorCode::kWeights, {"weights alone"}, [&] {
    run(1, 1, [&](Pipeline& pipeline, Communicator&) { load_checkpoint(pipeline, saves()); });
  });
}

TEST_F(CheckpointerTest, NonsenseIsRefused) {
  const auto open = [&](const CheckpointOptions& options) {
    run(2, 1, [&](Pipeline& pipeline, Communicator&) { Checkpointer(pipeline, options); });
  };
  expect_error(ErrorCode::kUsage, {"nearest legal value is 1"},
               [&] { open({.directory = saves(), .keep = 0}); });
  expect_error(ErrorCode::kUsage, {"minutes"},
               [&] { open({.directory = saves(), .every_minutes = -1}); });
  expect_error(ErrorCode::kUsage, {"no JSON"}, [&] { open({.directory = saves(), .model = "{"}); });
  expect_error(ErrorCode::kUsage, {"needs a directory"}, [&] { open({}); });
  expect_error(ErrorCode::kIo, {"/dev/null"}, [&] { open({.directory = "/dev/null/saves"}); });
  for (const std::string& text :
       {std::string("x\ny"), std::string("my run"), std::string(1000, 'a'), std::string(32, 'A')}) {
    expect_error(ErrorCode::kUsage, {std::to_string(text.size()), "32 hexadecimal digits"},
                 [&] { open({.directory = saves(), .run = text}); });
  }
  run(1, 1, [&](Pipeline& pipeline, Communicator&) {
    Checkpointer saver(pipeline, {.directory = saves()});
    expect_error(ErrorCode::kUsage, {"state 'loader'", "no function"},
                 [&] { saver.add_state("loader", {}); });
  });
}

TEST_F(CheckpointerTest, ALayoutOfFilesThatCannotWorkIsRefusedBeforeASave) {
  run(2, 1, [&](Pipeline& pipeline, Communicator&) {
    // Of stages on different ranks.
    const std::vector<StageEntry>& stages = PipelineAccess::layout(pipeline).parameters.stages;
    const ParameterEntry& one = stages.front().parameters.front();
    const ParameterEntry& other = stages.back().parameters.front();
    const auto refused = [&](const FileLayout& layout, const std::string& text) {
      expect_error(ErrorCode::kUsage, {text},
                   [&] { Checkpointer(pipeline, {.directory = saves(), .layout = layout}); });
      EXPECT_TRUE(pipeline.usable());
    };
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    refused({{one.name, {{"a", 1}, {"a", 1}}}}, "tensor 'a' twice");
    refused({{one.name, {{"a", 1}}}, {other.name, {{"a", 1}}}}, "tensor 'a' twice");
    refused({{one.name, {{other.name, 1}}}}, "tensor '" + other.name + "' twice");
    refused({{one.name, {{"", 1}}}}, "without a name");
    refused({{one.name, {{"a", kMost}, {"b", kMost}, {"c", 3}}}},
            "a part 'a' of 9223372036854775807 rows");
  });
}

TEST_F(CheckpointerTest, ThePlanCountsTheHostCopy) {
  for (const auto& [moments, bytes] : {std::pair(DType::kF32, 12U), std::pair(DType::kBf16, 8U)}) {
    moments_ = moments;
    run(2, 1, [&](Pipeline& pipeline, Communicator&) {
      const JobLayout& layout = PipelineAccess::layout(pipeline);
      std::size_t planned = 0, elements = 0;
      for (const RankMemory& memory : layout.memory.ranks) planned += memory.save_copy;
      for (const SavedParameter& share : share_saves(layout)) {
        elements += static_cast<std::size_t>(share.elements);
      }
      EXPECT_EQ(planned, bytes * elements);  // AdamW keeps two values per parameter
    });
  }
}

TEST(BackgroundTest, RunsAJobAndHandsOnWhatItThrows) {
  Background background;
  int ran = 0;
  background.start([&] { ++ran; });
  background.wait();
  EXPECT_FALSE(background.busy());
  EXPECT_FALSE(background.failed());
  background.start([] { throw Error(ErrorCode::kIo, "full"); });
  background.wait();
  EXPECT_TRUE(background.failed());
  expect_error(ErrorCode::kIo, {"full"}, [&] { background.rethrow(); });
  EXPECT_FALSE(background.failed());
  background.rethrow();
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace sluice::testing
