// The optimizer's state in a file: bits of trainings and saves are those of state in memory, and
// what a disk does to it is named.
#include "runtime/gradients/offloaded_state.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/compute.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "runtime/files/sha256.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/weights/weights.hpp"
#include "tests/allocation_counter.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace {
std::atomic<bool> slow_writes = false;  // every third
std::atomic<int> writes = 0;
}  // namespace

// In place of the C library's.
extern "C" ssize_t pwrite(int file, const void* bytes, std::size_t count, off_t offset) {
  if (slow_writes && writes++ % 3 == 0) usleep(2000);
  return syscall(SYS_pwrite64, file, bytes, count, offset);
}

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;
using To = PipelineOptions::Offload::To;

constexpr std::size_t kPool = 64 << 10;  // pieces of 8 KiB of each of two kinds

struct Case {
  std::string name = {};
  OptimizerConfig optimizer = OptimizerConfig::adamw();
  PipelineOptions::Shape shape = {};
  std::string schedule = "1f1b";
  DType precision = DType::kF32;
  std::vector<ParameterGroup> groups = {};
};

int ranks_of(const PipelineOptions::Shape& shape) {
  return std::max(1, shape.pipeline) * shape.replicas * shape.tensor;
}

// Every tensor of a save, by name: a digest of its bytes.
std::map<std::string, std::string> tensors_in(const fs::path& saves) {
  std::map<std::string, std::string> all;
  for (const auto& save : fs::directory_iterator(saves)) {
    for (const char* kind : {"model", "optimizer"}) {
      if (!save.is_directory() || !has_weights(save.path(), kind)) continue;
      const WeightsDirectory weights(save.path(), kind);
      for (const std::string& name : weights.names()) {
        all[save.path().filename().string() + " " + name] = sha256_hex(weights.find(name)->bytes);
      }
    }
  }
  return all;
}

class OffloadedStateTest : public ::testing::Test {
 protected:
  using Body = std::function<void(Pipeline&, const DataSource&)>;

  [[nodiscard]] PipelineOptions options_of(const Case& what, bool offloaded) const {
    PipelineOptions options;
    options.shape = what.shape;
    options.shape.micro_batches = 2;
    options.shape.virtual_replicas = 2;
    options.shape.tensor_shards = 2;
    options.shape.micro_batch_size = 1;
    options.order.schedule = what.schedule;
    options.training.optimizer = what.optimizer;
    options.training.optimizer.weight_decay = 0.1F;
    options.training.groups = what.groups;
    options.training.learning_rate = {.peak = 1e-2, .warmup = 1, .steps = 10};
    options.training.clip = 0.5;
    options.training.skip_nonfinite = true;
    options.expert.save_copy = true;
    if (offloaded) {
      options.offload = {.optimizer = To::kCachedDisk, .directory = scratch(), .pool = kPool};
    }
    return options;
  }
  void run(const Case& what, const PipelineOptions& options, const Body& body) const {
    TransformerConfig model = small_model();
    model.precision = what.precision;
    const auto source = synthetic_tokens(model);
    run_loopback(ranks_of(what.shape), [&](Communicator& comm) {
      Pipeline pipeline(comm, Transformer(model), *source, options);
      body(pipeline, *source);
      pipeline.close();
    });
  }
  // Trains until `steps` are done, from the newest save if there is one, and saves every step.
  void train(const Case& what, bool offloaded, std::uint64_t steps, const fs::path& saves) const {
    run(what, options_of(what, offloaded), [&](Pipeline& pipeline, const DataSource&) {
      CheckpointOptions how{.directory = saves, .every_steps = 1, .keep = 100};
      if (fs::exists(saves)) how.run = load_checkpoint(pipeline, saves).run;
      Checkpointer checkpointer(pipeline, how);
      while (pipeline.step() < steps) checkpointer.after_step(pipeline.train_step());
      checkpointer.save_now();
    });
  }
  [[nodiscard]] std::string scratch() const { return (directory_.path() / "scratch").string(); }

  TemporaryDirectory directory_;
};

OptimizerConfig rounded() {
  OptimizerConfig config = OptimizerConfig::adamw();
  config.moments = DType::kBf16;
  return config;
}

std::vector<Case> cases() {
  const std::vector<ParameterGroup> groups = {{.names = "*norm*", .weight_decay = 0.3F},
                                              {.names = "blocks.0.*", .learning_rate_scale = 0.5},
                                              {.names = "position*", .frozen = true}};
  return {
      {.name = "AdamW"},
      {.name = "groups, bf16 copies", .precision = DType::kBf16, .groups = groups},
      {.name = "bf16 moments of shards", .optimizer = rounded(), .shape = {.tensor = 2}},
      {.name = "Adam, p2 d2, all levels of shards",
       .optimizer = OptimizerConfig::adam(),
       .shape = {.pipeline = 2, .replicas = 2, .shard = ShardLevel::kParameters},
       .schedule = "zb-h1",
       .precision = DType::kBf16},
      {.name = "SGD, d2, gradients",
       .optimizer = OptimizerConfig::sgd(0.9F, true),
       .shape = {.replicas = 2, .shard = ShardLevel::kGradients}},
      {.name = "bf16 moments, p2 d2, groups",
       .optimizer = rounded(),
       .shape = {.pipeline = 2, .replicas = 2, .shard = ShardLevel::kOptimizer},
       .schedule = "gpipe",
       .groups = groups},
      {.name = "d2 T2", .shape = {.replicas = 2, .tensor = 2, .shard = ShardLevel::kOptimizer}},
      {.name = "two stages a rank", .shape = {.pipeline = 2}, .schedule = "looped-bfs"},
      {.name = "SGD without state", .optimizer = OptimizerConfig::sgd()},
  };
}

TEST_F(OffloadedStateTest, HasTheBitsOfStateInMemoryInEverySave) {
  for (const Case& what : cases()) {
    const fs::path plain = directory_.path() / what.name / "plain";
    const fs::path away = directory_.path() / what.name / "offloaded";
    train(what, false, 3, plain);
    train(what, true, 3, away);
    const auto expected = tensors_in(plain);
    EXPECT_GT(expected.size(), 28U) << what.name;
    EXPECT_EQ(tensors_in(away), expected) << what.name;
  }
  EXPECT_TRUE(fs::is_empty(scratch()));
}

// Of which each goes on from the one before, with another layout.
TEST_F(OffloadedStateTest, GoesOnFromStateInMemoryAndBack) {
  for (const OptimizerConfig& optimizer : {OptimizerConfig::adamw(), rounded()}) {
    const fs::path folder = directory_.path() / name_of(optimizer.moments);
    train({.optimizer = optimizer}, false, 6, folder / "plain");
    const std::vector<std::pair<PipelineOptions::Shape, bool>> chain = {
        {{.replicas = 2, .shard = ShardLevel::kOptimizer}, true},
        {{.pipeline = 2}, false},
        {{.tensor = 2}, true},
        {{.pipeline = 2, .replicas = 2, .shard = ShardLevel::kParameters}, true},
        {{.tensor = 2}, false},
        {{}, true}};
    for (std::size_t i = 0; i < chain.size(); ++i) {
      train({.optimizer = optimizer, .shape = chain[i].first}, chain[i].second, i + 1,
            folder / "chain");
    }
    const auto expected = tensors_in(folder / "plain"), actual = tensors_in(folder / "chain");
    int compared = 0;
    for (const auto& [name, digest] : expected) {
      if (!name.starts_with("step-00000006 ")) continue;
      ++compared;
      EXPECT_TRUE(actual.contains(name) && actual.at(name) == digest) << name;
    }
    EXPECT_GT(compared, 28) << expected.begin()->first;
  }
}

TEST_F(OffloadedStateTest, ARefusedStepLeavesItAsItIs) {
  std::map<std::string, std::string> saved[2];
  for (const bool offloaded : {false, true}) {
    const fs::path saves = directory_.path() / (offloaded ? "offloaded" : "plain");
    run({}, options_of({}, offloaded), [&](Pipeline& pipeline, const DataSource& source) {
      (void)pipeline.train_step();
      (void)source;
      // A rate that is no finite number of f32's makes no parameter move either.
      Parameter& first = *pipeline.parameters().front().parameter;
      const float before = first.value.at(0);
      first.value.at(0) = std::numeric_limits<float>::quiet_NaN();
      pipeline.values_changed();
      EXPECT_TRUE(pipeline.train_step().skipped);
      first.value.at(0) = before;
      pipeline.values_changed();
      Checkpointer checkpointer(pipeline, {.directory = saves});
      checkpointer.save_now();
      (void)pipeline.train_step();
      checkpointer.save_now();
    });
    saved[offloaded ? 1 : 0] = tensors_in(saves);
  }
  EXPECT_FALSE(saved[0].empty());
  EXPECT_EQ(saved[0], saved[1]);
}

TEST_F(OffloadedStateTest, ThePlanHasThePoolAndTheDisk) {
  const Case what{.shape = {.pipeline = 2, .replicas = 2, .shard = ShardLevel::kOptimizer}};
  std::vector<std::size_t> plain;
  run(what, options_of(what, false), [&](Pipeline& pipeline, const DataSource&) {
    if (pipeline.parameters().front().stage != 0) return;
    plain.clear();
    for (const RankMemory& rank : PipelineAccess::layout(pipeline).memory.ranks)
      plain.push_back(rank.optimizer);
  });
  run(what, options_of(what, true), [&](Pipeline& pipeline, const DataSource&) {
    const auto& ranks = PipelineAccess::layout(pipeline).memory.ranks;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      EXPECT_EQ(ranks[i].optimizer, kPool);
      EXPECT_GE(ranks[i].optimizer_disk, plain[i]);
      EXPECT_LE(ranks[i].optimizer_disk, plain[i] + 2 * 4096);
      EXPECT_LT(ranks[i].save_copy, ranks[i].disk);
    }
    expect_error(ErrorCode::kUsage, {"offloaded", "legal: a save"},
                 [&] { (void)pipeline.optimizer_state(); });
  });
}

// Opens what lies in the directory without a name.
std::vector<int> open_again(const fs::path& directory) {
  std::vector<int> all;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    if (!target.starts_with(directory.string() + "/")) continue;
    all.push_back(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
  }
  return all;
}

TEST_F(OffloadedStateTest, DamageEndsTheRunAndNamesTheSaveToGoOnFrom) {
  for (const bool saves : {false, true}) {
    expect_error(ErrorCode::kIo,
                 {scratch(), "are not those that were written", "update() of step ",
                  saves ? "go on from the save of step 1" : "there is no save to go on from"},
                 [&] {
                   run({}, options_of({}, true), [&](Pipeline& pipeline, const DataSource&) {
                     (void)pipeline.train_step();
                     if (saves)
                       save_checkpoint(pipeline, {.directory = directory_.path() / "saves"});
                     const std::vector<int> files = open_again(scratch());
                     EXPECT_EQ(files.size(), 2U);
                     for (const int fd : files) {
                       for (off_t at = 100; at < 1 << 16; at += 8192)
                         EXPECT_EQ(::pwrite(fd, "x", 1, at), 1);
                       ::close(fd);
                     }
                     // The pieces that were read ahead are right.
                     for (int step = 0; step < 3; ++step) (void)pipeline.train_step();
                   });
                 });
  }
}

TEST_F(OffloadedStateTest, WhatCannotWorkIsRefusedByName) {
  const auto refused = [&](std::initializer_list<std::string> parts, const auto& change) {
    PipelineOptions options = options_of({}, true);
    change(options);
    expect_error(ErrorCode::kUsage, parts,
                 [&] { run({}, options, [](Pipeline&, const DataSource&) {}); });
  };
  refused({"legal: --offload optimizer:disk=DIR"},
          [](auto& o) { o.offload.optimizer = To::kHost; });
  refused({"offload.pool is 4096 bytes"}, [](auto& o) { o.offload.pool = 4096; });
  refused({"make_optimizer", "legal: options.training.optimizer"}, [](auto& o) {
    o.training.make_optimizer = [](std::span<const ParameterSlice>, const DeviceMemory&) {
      return std::unique_ptr<Optimizer>();
    };
  });
  refused({"names a disk and no directory"}, [](auto& o) { o.offload.directory.clear(); });
  PipelineOptions inference = options_of({}, true);
  inference.training.inference = true;
  run({}, inference, [&](Pipeline& pipeline, const DataSource&) {
    EXPECT_EQ(PipelineAccess::offloaded_state(pipeline), nullptr);
    EXPECT_EQ(PipelineAccess::layout(pipeline).memory.ranks[0].optimizer_disk, 0U);
  });
}

// --- alone ---
struct Vectors {
  Vectors(const OffloadedState::Sizes& sizes, const fs::path& directory,
          Interrupt* interrupt = nullptr)
      : state(sizes, {.optimizer = To::kDisk, .directory = directory.string()}, interrupt, nullptr),
        bytes(sizes.bytes) {}

  // Adds `number` to each byte of the first vector, twice that to the second one's.
  void add(int number) {
    for (std::size_t begin = 0; begin < bytes; begin += bytes / 3) {  // three optimizers
      state.visit(begin, std::min(begin + bytes / 3, bytes),
                  [&](std::size_t from, std::size_t to, std::span<std::byte* const> memory) {
                    for (std::size_t kind = 0; kind < memory.size(); ++kind) {
                      for (std::size_t i = 0; i < to - from; ++i) {
                        memory[kind][i] =
                            static_cast<std::byte>(static_cast<int>(memory[kind][i]) +
                                                   number * static_cast<int>(kind + 1));
                      }
                    }
                  });
    }
  }
  // Of all of a vector.
  std::vector<std::byte> all(std::size_t kind) {
    std::vector<std::byte> read(bytes);
    OffloadedState::Access access(state, OffloadedState::Access::Use::kReads);
    access.read(state.address(kind, 0), read);
    return read;
  }

  OffloadedState state;
  std::size_t bytes;
};

TEST_F(OffloadedStateTest, KeepsWhatUpdatesAndLoadsLeaveInEachPiece) {
  for (const std::size_t pages : {1U, 2U, 9U, 50U}) {
    const OffloadedState::Sizes sizes{.kinds = 2, .bytes = pages * 4096 - 256, .pool = kPool};
    EXPECT_LE(sizes.memory(), kPool);
    Vectors vectors(sizes, scratch());
    for (int step = 0; step < 3; ++step) vectors.add(5);
    for (const std::size_t kind : {0U, 1U}) {
      EXPECT_THAT(vectors.all(kind), ::testing::Each(static_cast<std::byte>(15 * (kind + 1))));
    }
    {  // of bytes that lie in no unit wholly
      OffloadedState::Access access(vectors.state, OffloadedState::Access::Use::kWrites);
      const std::vector<std::byte> ones(vectors.bytes - 700, std::byte{1});
      access.write(vectors.state.address(1, 300), ones);
      access.flush();
    }
    vectors.add(1);
    EXPECT_THAT(vectors.all(0), ::testing::Each(std::byte{16}));
    const std::vector<std::byte> second = vectors.all(1);
    for (std::size_t i = 0; i < second.size(); ++i) {
      const bool loaded = i >= 300 && i < vectors.bytes - 400;
      ASSERT_EQ(second[i], loaded ? std::byte{3} : std::byte{32}) << i;
    }
  }
}

// Of five pieces four are in memory: a piece is read as soon as it is written.
TEST_F(OffloadedStateTest, NoPieceIsReadBeforeItIsWritten) {
  const OffloadedState::Sizes sizes{.kinds = 2, .bytes = 9 * 4096, .pool = kPool};
  ASSERT_EQ(sizes.pieces(), sizes.slots() + 1);
  Vectors vectors(sizes, scratch());
  slow_writes = true;
  for (int step = 0; step < 10; ++step) vectors.add(3);
  slow_writes = false;
  for (const std::size_t kind : {0U, 1U}) {
    EXPECT_THAT(vectors.all(kind), ::testing::Each(static_cast<std::byte>(30 * (kind + 1))));
  }
}

// Lets a save end that a wait has polled for a while.
struct EndsASave : Interrupt {
  void begin_wait(const WaitSubject& subject) noexcept override {
    for_save = subject.what == WaitSubject::What::kSave;
  }
  void poll() override {
    if (for_save && ++polls == 5) save.reset();
  }
  std::optional<OffloadedState::Access> save;
  bool for_save = false;
  int polls = 0;
};

TEST_F(OffloadedStateTest, NoUpdateStartsBeforeASaveHasReadIt) {
  EndsASave ends;
  Vectors vectors({.kinds = 2, .bytes = 20 * 4096, .pool = kPool}, scratch(), &ends);
  vectors.add(1);
  ends.save.emplace(vectors.state, OffloadedState::Access::Use::kReads);
  vectors.state.visit(0, vectors.bytes, [&](std::size_t, std::size_t, std::span<std::byte* const>) {
    EXPECT_FALSE(ends.save.has_value());
  });
  EXPECT_EQ(ends.polls, 5);
}

TEST_F(OffloadedStateTest, NoLoadStartsBeforeASaveHasReadIt) {
  EndsASave ends;
  Vectors vectors({.kinds = 2, .bytes = 20 * 4096, .pool = kPool}, scratch(), &ends);
  vectors.add(1);
  ends.save.emplace(vectors.state, OffloadedState::Access::Use::kReads);
  const OffloadedState::Access load(vectors.state, OffloadedState::Access::Use::kWrites);
  EXPECT_FALSE(ends.save.has_value());
  EXPECT_EQ(ends.polls, 5);
}

TEST_F(OffloadedStateTest, AnUpdateAllocatesNothing) {
  ComputeContext compute({}, 1);
  ParameterSet set;
  for (const char* name : {"a", "b", "c"}) set.add(name, {300, 70}, Init::normal(1));
  set.allocate(compute.memory(), 1);
  const OptimizerConfig config = rounded();
  const auto sizes =
      OffloadedState::Sizes::of(config, 3 * optimizer_bytes(config, 300 * 70), kPool);
  EXPECT_GT(sizes.pieces(), 3 * sizes.slots());
  OffloadedState state(sizes, {.optimizer = To::kDisk, .directory = scratch()}, nullptr, nullptr);
  const auto optimizer =
      make_optimizer(config, whole_slices(set.all()), compute.memory(), 1, &state);
  optimizer->update(compute, 1, 0.1F, 1);
  const std::size_t before = allocations_of_this_thread();
  for (std::uint64_t step = 2; step < 5; ++step) optimizer->update(compute, step, 0.1F, 1);
  EXPECT_EQ(allocations_of_this_thread(), before);
}

TEST_F(OffloadedStateTest, NoPieceIsReadOrWrittenWhereAllAreZeros) {
  Vectors vectors({.kinds = 1, .bytes = 100 * 4096, .pool = kPool}, scratch());
  EXPECT_THAT(vectors.all(0), ::testing::Each(std::byte{}));
  for (const int fd : open_again(scratch())) {
    EXPECT_EQ(::lseek(fd, 0, SEEK_DATA), -1) << "nothing was written";
    EXPECT_EQ(::lseek(fd, 0, SEEK_END), 100 * 4096);
    ::close(fd);
  }
}

}  // namespace
}  // namespace sluice::testing
