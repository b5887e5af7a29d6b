// The memory of micro-batches in flight: what a stage gets of the bytes that it describes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

using Bytes = std::span<std::byte>;

constexpr std::size_t kUntilInput = 1000, kUntilWeight = 300, kGradients = 77;

bool overlap(Bytes a, Bytes b) {
  return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

// Keeps a number in each byte of its memory, looks for it in each call that follows, and spoils
// what is of no use any more.
class KeepingStage : public ArithmeticStage {
 public:
  // Raises *most to the number of micro-batches in flight.
  KeepingStage(int stage, std::size_t* most) : ArithmeticStage(stage), most_(most) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {.outputs = {inputs[0]},
            .state_bytes_until_input = kUntilInput,
            .state_bytes_until_weight = kUntilWeight,
            .gradient_bytes_until_weight = kGradients};
  }
  void prepare(const StageSetup& setup) override {
    ArithmeticStage::prepare(setup);
    slots_ = setup.slots;
    splits_ = setup.split_backward;
    look_at(setup.state);
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    look_at(ctx.state);
    for (const auto& [number, other] : in_flight_) {
      for (const Bytes mine : moves() ? std::vector<Bytes>() : parts(ctx.state)) {
        for (const Bytes theirs : parts(other)) EXPECT_FALSE(overlap(mine, theirs)) << number;
      }
    }
    fill(ctx.state.until_input, number_of(ctx));
    fill(ctx.state.until_weight, number_of(ctx));
    addresses_.insert(ctx.state.until_input.data());
    EXPECT_LE(addresses_.size(), static_cast<std::size_t>(slots_));
    if (ctx.phase == Phase::kTrain) in_flight_[ctx.micro_batch] = ctx.state;
    *most_ = std::max(*most_, in_flight_.size());
    ArithmeticStage::forward(ctx, x, y);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor> dy,
                      std::span<const Tensor> dx) override {
    expect_same_memory(ctx);
    expect_kept(ctx.state.until_input, number_of(ctx));
    expect_kept(ctx.state.until_weight, number_of(ctx));
    fill(ctx.state.until_input, 255);
    fill(ctx.state.gradients, number_of(ctx) + 100);
    ArithmeticStage::backward_input(ctx, dy, dx);
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> dy) override {
    expect_same_memory(ctx);
    expect_kept(ctx.state.until_weight, number_of(ctx));
    expect_kept(ctx.state.gradients, number_of(ctx) + 100);
    for (const Bytes part : parts(ctx.state)) fill(part, 255);
    in_flight_.erase(ctx.micro_batch);
    ArithmeticStage::backward_weight(ctx, dy);
  }

 private:
  static std::vector<Bytes> parts(const StageContext::State& state) {
    return {state.until_input, state.until_weight, state.gradients};
  }
  static int number_of(const StageContext& ctx) {
    return static_cast<int>(10 * (ctx.step % 3)) + ctx.micro_batch;
  }
  static void fill(Bytes part, int number) {
    std::fill(part.begin(), part.end(), static_cast<std::byte>(number));
  }
  static void expect_kept(Bytes part, int number) {
    EXPECT_EQ(std::count(part.begin(), part.end(), static_cast<std::byte>(number)),
              static_cast<std::ptrdiff_t>(part.size()));
  }
  void look_at(const StageContext::State& state) const {
    EXPECT_EQ(state.until_input.size(), kUntilInput);
    EXPECT_EQ(state.until_weight.size(), kUntilWeight);
    EXPECT_EQ(state.gradients.size(), splits_ ? kGradients : 0);
    for (const Bytes part : parts(state)) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(part.data()) % kBufferAlignment, 0U);
    }
  }
  // Whether its memory may lie elsewhere in backward.
  [[nodiscard]] virtual bool moves() const { return false; }
  void expect_same_memory(const StageContext& ctx) {
    if (moves()) return;
    const StageContext::State& then = in_flight_[ctx.micro_batch];
    EXPECT_EQ(ctx.state.until_input.data(), then.until_input.data());
    EXPECT_EQ(ctx.state.until_weight.data(), then.until_weight.data());
    EXPECT_EQ(ctx.state.gradients.data(), then.gradients.data());
  }

  std::size_t* most_;
  int slots_ = 0;
  bool splits_ = false;
  std::map<int, StageContext::State> in_flight_;  // [micro-batch]
  std::set<const std::byte*> addresses_;          // of all calls so far
};

BatchSpec numbers() { return {.inputs = {{DType::kF32, {1}}}, .targets = {{DType::kF32, {1}}}}; }

// `count` samples of the numbers 1, 2 and so on.
struct Samples {
  std::vector<float> x, y;
  explicit Samples(int count) : y(static_cast<std::size_t>(count), 1) {
    for (int i = 0; i < count; ++i) x.push_back(static_cast<float>(i + 1));
  }
  [[nodiscard]] Batch batch() const {
    const auto count = static_cast<std::int64_t>(x.size());
    return {.inputs = {view(x, {count, 1})}, .targets = {view(y, {count, 1})}};
  }
};

TEST(StateMemoryTest, IsAMicroBatchsOwnFromForwardToTheWeightGradient) {
  const Samples whole(6), few(2), many(11);
  for (const std::string schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"}) {
    SCOPED_TRACE(schedule);
    PipelineOptions options;
    options.shape = {.pipeline = 2, .micro_batches = 6, .micro_batch_size = 1};
    options.order = {.schedule = schedule, .chunks = schedule == "zb-v" ? 2 : 1};
    run_loopback(2, [&](Communicator& comm) {
      std::size_t most = 0;
      const StageFactory factory = [&](int stage, int) -> std::unique_ptr<Stage> {
        return std::make_unique<KeepingStage>(stage, &most);
      };
      Pipeline pipeline(comm, factory, numbers(), options);
      for (int step = 0; step < 3; ++step) {
        (void)pipeline.accumulate(whole.batch());
        (void)pipeline.evaluate(many.batch());
        (void)pipeline.accumulate(few.batch());  // a plan of its own
        (void)pipeline.evaluate(few.batch());
        (void)pipeline.train_step(whole.batch());
      }
      EXPECT_GE(most, schedule == "gpipe" ? 6U : comm.rank() == 0 ? 2U : 1U);
    });
  }
}

// What it describes is in the table, but it gets none of it.
class ApartStage : public ArithmeticStage {
 public:
  using ArithmeticStage::ArithmeticStage;
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {.outputs = {inputs[0]},
            .state_bytes_until_input = kUntilInput,
            .state_bytes_until_weight = kUntilWeight,
            .own_memory = true};
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    EXPECT_TRUE(ctx.state.until_input.empty() && ctx.state.until_weight.empty());
    ArithmeticStage::forward(ctx, x, y);
  }
};

TEST(StateMemoryTest, IsCountedAsItIsAllocated) {
  PipelineOptions options;
  options.shape = {.pipeline = 1, .micro_batches = 3, .micro_batch_size = 1};
  options.order.schedule = "gpipe";
  const auto planned = [&](const StageFactory& factory) {
    RankMemory memory;
    run_loopback(1, [&](Communicator& comm) {
      Pipeline pipeline(comm, factory, numbers(), options);
      (void)pipeline.train_step(Samples(3).batch());
      const auto source = counting_source(3);
      memory = PipelineAccess::plan_layout(comm, options, factory, *source).memory.ranks[0];
    });
    return memory;
  };
  constexpr std::size_t kSlot = 4 * kBufferAlignment + 2 * kBufferAlignment;
  std::size_t most = 0;
  const RankMemory kept =
      planned([&](int stage, int) { return std::make_unique<KeepingStage>(stage, &most); });
  EXPECT_EQ(kept.activations, 3 * kSlot);
  const RankMemory apart =
      planned([](int stage, int) { return std::make_unique<ApartStage>(stage); });
  EXPECT_EQ(apart.activations, 3 * kSlot);
  EXPECT_EQ(apart.arena() + 3 * kSlot, kept.arena());
}

// Its memory may lie elsewhere in backward: looks for the numbers alone.
class MovingStage : public KeepingStage {
 public:
  using KeepingStage::KeepingStage;
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = KeepingStage::describe(inputs, compute);
    description.state_moves = true;
    return description;
  }
  bool moves() const override { return true; }
};

PipelineOptions offloading(const std::string& directory, int micro_batches) {
  PipelineOptions options;
  options.shape = {.pipeline = 1, .micro_batches = micro_batches, .micro_batch_size = 1};
  options.order.schedule = "gpipe";
  options.offload = {.activations = PipelineOptions::Offload::To::kDisk, .directory = directory};
  return options;
}

TEST(StateMemoryTest, WhatMovesIsKeptInEveryStep) {
  const TemporaryDirectory directory;
  const Samples whole(9), few(5), many(11);
  for (const std::string schedule : {"gpipe", "1f1b", "zb-h2", "zb-v"}) {
    SCOPED_TRACE(schedule);
    PipelineOptions options = offloading(directory.path(), 9);
    options.shape.pipeline = 3;
    options.order = {.schedule = schedule, .chunks = schedule == "zb-v" ? 2 : 1};
    run_loopback(3, [&](Communicator& comm) {
      std::size_t most = 0;
      const StageFactory factory = [&](int stage, int) -> std::unique_ptr<Stage> {
        return std::make_unique<MovingStage>(stage, &most);
      };
      Pipeline pipeline(comm, factory, numbers(), options);
      for (int step = 0; step < 3; ++step) {
        (void)pipeline.accumulate(whole.batch());
        (void)pipeline.evaluate(many.batch());
        (void)pipeline.accumulate(few.batch());  // a plan of its own
        (void)pipeline.train_step(whole.batch());
      }
    });
  }
}

TEST(StateMemoryTest, WhatLeavesIsCountedApart) {
  const TemporaryDirectory directory;
  constexpr std::size_t kPage = 4096;  // of which a slot and a place have multiples
  std::size_t most = 0;
  run_loopback(1, [&](Communicator& comm) {
    const auto source = counting_source(7);
    const JobLayout layout = PipelineAccess::plan_layout(
        comm, offloading(directory.path(), 7),
        [&](int stage, int) { return std::make_unique<MovingStage>(stage, &most); }, *source);
    EXPECT_EQ(layout.memory.ranks[0].activations, 4 * kPage + kPage - kBufferAlignment);
    EXPECT_EQ(layout.memory.ranks[0].offloaded_disk, 3 * kPage);
    EXPECT_EQ(layout.memory.ranks[0].offloaded_host, 0U);
  });
}

TEST(StateMemoryTest, AsManyStayAsTheOptionSays) {
  const TemporaryDirectory directory;
  std::size_t most = 0;
  for (const auto& [resident, stored] : {std::pair(2, 6), std::pair(6, 1), std::pair(0, 0)}) {
    PipelineOptions options = offloading(directory.path(), 7);
    options.offload.resident = {resident};
    run_loopback(1, [&](Communicator& comm) {
      const JobLayout layout = PipelineAccess::plan_layout(
          comm, options,
          [&](int stage, int) { return std::make_unique<MovingStage>(stage, &most); },
          *counting_source(7));
      EXPECT_EQ(layout.plans.states_of(0).slots, resident == 0 ? 7 : resident);
      EXPECT_EQ(layout.plans.states_of(0).stored, stored);
    });
  }
}

TEST(StateMemoryTest, WhatCannotLeaveIsRefused) {
  const TemporaryDirectory directory;
  using To = PipelineOptions::Offload::To;
  const auto refused = [&](const PipelineOptions& options, const StageFactory& factory,
                           const char* why) {
    expect_error(ErrorCode::kUsage, {why}, [&] {
      run_loopback(1, [&](Communicator& comm) {
        const Pipeline none(comm, factory, *counting_source(3), options);
      });
    });
  };
  std::size_t most = 0;
  const StageFactory kept = [&](int stage, int) {
    return std::make_unique<KeepingStage>(stage, &most);
  };
  const StageFactory moving = [&](int stage, int) {
    return std::make_unique<MovingStage>(stage, &most);
  };
  PipelineOptions options = offloading(directory.path(), 3);
  refused(options, kept, "stage 0 keeps what it needs of a micro-batch where it cannot be");
  refused(
      options, [](int stage, int) { return std::make_unique<ApartStage>(stage); },
      "legal: stages that say it may move (StageDescription::state_moves)");
  options.offload.resident = {2, 2};
  refused(options, moving, "options.offload.resident has 2 entries; legal are 0 and 1");
  options.offload.resident.clear();
  options.offload.directory.clear();
  refused(options, moving, "names a disk and no directory");
  options.offload = {.activations = To::kNowhere, .directory = "here"};
  refused(options, moving, "names the directory 'here' and no disk");
  options.offload = {.activations = To::kHost};
  refused(options, moving, "are there already");
}

}  // namespace
}  // namespace sluice::testing
