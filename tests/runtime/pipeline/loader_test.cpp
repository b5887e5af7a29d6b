// Loaders of a pipeline: each rank reads what it passes, and the bits are those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

constexpr int kContext = 16;

// Item i has tokens that follow from i and the epoch.
class Tokens : public Dataset {
 public:
  explicit Tokens(std::int64_t size, std::int64_t context = kContext)
      : size_(size), context_(context) {}
  [[nodiscard]] std::int64_t size() const override { return size_; }
  [[nodiscard]] BatchSpec spec() const override {
    const TensorSpec tokens{DType::kI32, {context_}};
    return {.inputs = {tokens}, .targets = {tokens}};
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    const auto vocabulary = static_cast<std::uint32_t>(small_model().vocabulary);
    for (std::int64_t i = 0; i <= context_; ++i) {
      const std::uint32_t word = philox(item.random, static_cast<std::uint64_t>(item.index),
                                        static_cast<std::uint64_t>(i))[0];
      const auto token = static_cast<std::int32_t>(word % vocabulary);
      if (!inputs.empty() && i < context_) inputs[0].as<std::int32_t>()[i] = token;
      if (!targets.empty() && i > 0) targets[0].as<std::int32_t>()[i - 1] = token;
    }
  }

 private:
  std::int64_t size_, context_;
};

StageFactory factory() {
  TransformerConfig model = small_model();
  model.context = kContext;
  return Transformer(model);
}

PipelineOptions options_of(int pipeline, int replicas, int virtual_replicas = 0) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline,
                   .replicas = replicas,
                   .virtual_replicas = virtual_replicas,
                   .rank_order = RankOrder::kPipelineFirst,
                   .micro_batches = 2,
                   .micro_batch_size = 2};
  options.training.learning_rate = {.peak = 1e-2};
  return options;
}

BatchSpec spec(Feed feed) {
  BatchSpec spec = Tokens(1).spec();
  spec.feed = feed;
  return spec;
}

LoaderOptions shuffled(int replicas, int workers) {
  return {.batch_size = 4 * replicas, .shuffle = true, .seed = 3, .workers = workers};
}

// Losses of two epochs and the digest of the parameters.
std::pair<std::vector<double>, std::string> trained(Communicator& comm, int pipeline, int replicas,
                                                    Feed feed, int workers,
                                                    int virtual_replicas = 0) {
  Pipeline job(comm, factory(), spec(feed), options_of(pipeline, replicas, virtual_replicas));
  DataLoader loader = job.loader(std::make_shared<Tokens>(18),
                                 shuffled(std::max(replicas, virtual_replicas), workers));
  std::vector<double> losses;
  for (int epoch = 0; epoch < 2; ++epoch) {
    while (const LoadedBatch* batch = loader.next()) {
      losses.push_back(job.train_step(*batch).loss);
    }
  }
  return {losses, digest_of(job)};
}

class PipelineLoaderTest : public ::testing::TestWithParam<int> {};

TEST_P(PipelineLoaderTest, EveryLayoutAndFeedTrainsOnTheSameBatches) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const auto alone = trained(*self, 1, 1, Feed::kPerStage, 0);
    EXPECT_EQ(alone.first.size(), 10U);
    EXPECT_EQ(trained(comm, comm.size(), 1, Feed::kPerStage, 2), alone);
    EXPECT_EQ(trained(comm, comm.size(), 1, Feed::kRank0, 1), alone);
    if (comm.size() % 2 != 0) return;
    const auto pairs = trained(comm, comm.size() / 2, 2, Feed::kPerStage, 2);
    EXPECT_EQ(pairs.first.size(), 6U);
    EXPECT_EQ(trained(comm, comm.size() / 2, 2, Feed::kRank0, 0), pairs);
    EXPECT_EQ(trained(comm, comm.size(), 1, Feed::kPerStage, 1, 2), pairs);
  });
}

TEST_P(PipelineLoaderTest, ASaveTakesTheLoaderWithIt) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::string directory = ::testing::TempDir() + "/loader_" + std::to_string(comm.size());
    const auto data = std::make_shared<Tokens>(18);
    Pipeline whole(comm, factory(), spec({}), options_of(comm.size(), 1));
    DataLoader all = whole.loader(data, shuffled(1, 0));
    Checkpointer saver(whole, {.directory = directory, .overwrite = true});
    saver.add_state("loader", [&] { return ProgramState{.json = all.state()}; });
    for (int call = 0; call < 9; ++call) {  // the end of an epoch, and three batches of the next
      const LoadedBatch* batch = all.next();
      if (batch != nullptr) (void)whole.train_step(*batch);
      if (call == 2) saver.save_now();
    }
    Pipeline resumed(comm, factory(), spec({}), options_of(comm.size(), 1));
    const LoadedCheckpoint loaded = load_checkpoint(resumed, directory);
    DataLoader rest = resumed.loader(data, shuffled(1, 2));
    rest.set_state(loaded.states.at("loader").json);
    for (int call = 3; call < 9; ++call) {
      if (const LoadedBatch* batch = rest.next()) (void)resumed.train_step(*batch);
    }
    EXPECT_EQ(resumed.step(), whole.step());
    EXPECT_EQ(digest_of(resumed), digest_of(whole));
  });
}

TEST_P(PipelineLoaderTest, WhatDiffersBetweenRanksIsRefusedOnAll) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    Pipeline job(comm, factory(), spec({}), options_of(comm.size(), 1));
    const bool last = comm.rank() == comm.size() - 1;
    const auto refused = [&](ErrorCode code, const std::string& part, std::int64_t size,
                             const LoaderOptions& options) {
      expect_error(code, {part},
                   [&] { (void)job.loader(std::make_shared<Tokens>(size), options); });
      EXPECT_TRUE(job.usable());
    };
    if (comm.size() > 1) {
      refused(ErrorCode::kMismatch, "size of the data set", last ? 17 : 18, {});
      refused(ErrorCode::kMismatch, "LoaderOptions::batch_size", 18, {.batch_size = last ? 3 : 4});
      refused(ErrorCode::kMismatch, "LoaderOptions::seed", 18, {.seed = last ? 3U : 4U});
      refused(ErrorCode::kMismatch, "LoaderOptions::shuffle", 18, {.shuffle = last});
      refused(ErrorCode::kMismatch, "LoaderOptions::drop_last", 18, {.drop_last = last});
    }
    refused(ErrorCode::kUsage, "the data set has 0 items", last ? 0 : 18, {});
    refused(ErrorCode::kUsage, "LoaderOptions::workers is -1", 18, {.workers = last ? -1 : 2});
    expect_error(ErrorCode::kUsage, {"a loader needs a data set"},
                 [&] { (void)job.loader(last ? nullptr : std::make_shared<Tokens>(18), {}); });
    expect_error(ErrorCode::kUsage,
                 {"input 0 of the data set is i32 [samples, 8], but i32 [samples, 16] is needed"},
                 [&] { (void)job.loader(std::make_shared<Tokens>(18, last ? 8 : 16), {}); });
    DataLoader loader = job.loader(std::make_shared<Tokens>(4), {.batch_size = 4, .workers = 1});
    EXPECT_EQ(job.train_step(*loader.next()).step, 1U);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PipelineLoaderTest, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace sluice::testing
