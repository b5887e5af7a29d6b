// The engine with stages that do nothing: what an action costs besides its work.
#pragma once

#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/steady_seconds.hpp"
#include "comm/group/communicator.hpp"
#include "runtime/engine/engine.hpp"
#include "runtime/group/activity.hpp"
#include "tests/benchmarks/benchmark_report.hpp"

namespace sluice::benchmarks {

inline constexpr int kMicroBatches = 256;
inline constexpr int kRounds = 201;

class IdleStage : public Stage, public LossStage {
 public:
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {{inputs[0]}};
  }
  // The engine looks at what the first calls write.
  void forward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor> y) override {
    if (++forwards_ == 1) write(ctx, y);
  }
  void backward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor> dx) override {
    if (++backwards_ == 1) write(ctx, dx);
  }
  void loss(StageContext&, std::span<const Tensor>, std::span<const Tensor>, double* sum) override {
    *sum = 0;
  }
  double target_weight(std::span<const Tensor>) const override { return 1; }

 private:
  static void write(StageContext& ctx, std::span<const Tensor> tensors) {
    for (const Tensor& each : tensors) {
      if (each.data == nullptr) continue;
      fill_zero_async(each.data, each.spec.bytes(), ctx.compute.stream());
    }
  }

  int forwards_ = 0, backwards_ = 0;
};

// Shows what waits wait for, as the interrupt of a pipeline does.
class ShownWaits : public Interrupt {
 public:
  explicit ShownWaits(ActivityBoard& board) : board_(board) {}
  void poll() override { board_.poll(); }
  void begin_wait(const WaitSubject& subject) noexcept override {
    board_.begin_wait(subject, Axis::kPipeline);
  }
  void end_wait() noexcept override { board_.end_wait(); }

 private:
  ActivityBoard& board_;
};

// Median nanoseconds per compute action of this rank: the host's time, a GPU included that has
// nothing to do but to record when each action began and ended. `shown`: on a board of activities,
// as with a watchdog.
inline double engine_ns(Communicator& comm, const char* schedule, Device device = {},
                        bool shown = false) {
  const int ranks = comm.size();
  const Plan plan = make_plan(
      lower(generate(schedule, {ranks, kMicroBatches, 1}), {.reduce_grad = false, .tied = {}}), {});
  const std::vector<std::vector<EdgeTensor>> edge(static_cast<std::size_t>(ranks) + 1,
                                                  {{{DType::kF32, Shape{1, 4}}, true}});
  const EdgeTable edges({{.samples = 1}}, {edge});
  ComputeContext compute(device, 1);
  IdleStage stage;
  const bool last = comm.rank() + 1 == ranks;
  std::vector<SampleRange> ranges;
  for (int m = 0; m < kMicroBatches; ++m) ranges.push_back({m, 1});
  const auto source = make_array_source(std::vector<float>(4 * kMicroBatches, 1), 4,
                                        std::vector<float>(kMicroBatches, 1), 1, kMicroBatches);
  BatchLoader loader(*source, Phase::kTrain, ranges, comm.rank() == 0, last, device);
  EngineConfig config;
  config.plan = &plan;
  config.rank = comm.rank();
  config.edges = &edges;
  config.stages = {{comm.rank(), &stage, nullptr, last ? &stage : nullptr}};
  config.compute = &compute;
  config.communicator = &comm;
  ActivityBoard board(comm.rank(), "");
  ShownWaits waits(board);
  if (shown) {
    config.activity = &board;
    config.interrupt = &waits;
  }
  Engine engine(config);
  Collectives collectives(comm, 100, nullptr);
  std::vector<double> times;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    StepRequest request;
    request.step = 1;
    request.micro_batches = ranges;
    request.batch = &loader.load(1);
    collectives.barrier();
    const double start = steady_seconds();
    engine.run(request, nullptr);
    times.push_back((steady_seconds() - start) * 1e9 / (2.0 * kMicroBatches));
  }
  return median(times);
}

}  // namespace sluice::benchmarks
