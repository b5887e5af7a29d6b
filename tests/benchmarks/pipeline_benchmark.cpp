// Pipeline efficiency: the measured step over the simulated makespan, fed with the run's own action
// times; with stages that sleep, and (on two ranks) with real compute.
//   mpirun -n 4 pipeline_benchmark [--json FILE] [--steps N] [--stages family]
// With --stages family: every schedule, over stages that sleep.
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/timeline.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/token_source.hpp"

namespace sluice::benchmarks {
namespace {

using std::chrono::milliseconds;

void write_zeros(std::span<const Tensor> tensors) {
  for (const Tensor& each : tensors)
    std::fill_n(each.as<std::byte>(), each.spec.bytes(), std::byte{});
}

// Forward and each half of backward take a time and make zeros.
class SleepingStage : public Stage, public SplitBackward, public LossStage {
 public:
  explicit SleepingStage(milliseconds time) : time_(time) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {{inputs[0]}};
  }
  void forward(StageContext&, std::span<const Tensor>, std::span<const Tensor> y) override {
    std::this_thread::sleep_for(time_);
    write_zeros(y);
  }
  void backward(StageContext&, std::span<const Tensor>, std::span<const Tensor> dx) override {
    std::this_thread::sleep_for(2 * time_);
    write_zeros(dx);
  }
  void backward_input(StageContext&, std::span<const Tensor>, std::span<const Tensor> dx) override {
    std::this_thread::sleep_for(time_);
    write_zeros(dx);
  }
  void backward_weight(StageContext&, std::span<const Tensor>) override {
    std::this_thread::sleep_for(time_);
  }
  void loss(StageContext&, std::span<const Tensor>, std::span<const Tensor>, double* sum) override {
    *sum = 0;
  }
  double target_weight(std::span<const Tensor>) const override { return 1; }

 private:
  milliseconds time_;
};

struct Measured {
  double pipeline = 0, step = 0, simulated = 0;  // seconds
  double ideal = 0;   // the bubble-limited step of a perfectly balanced 1F1B, same work
  double bubble = 0;  // idle share of `pipeline` over all ranks
  double simulated_bubble = 0;
};

// Medians over `steps` steps after two that do not count.
Measured measure(Pipeline& pipeline, const PipelineOptions& options, int steps) {
  for (int i = 0; i < 2; ++i) pipeline.train_step();
  std::vector<double> pipeline_seconds, step_seconds, bubbles;
  Profile profile;
  for (int i = 0; i < steps; ++i) {
    const StepReport report = pipeline.train_step();
    pipeline_seconds.push_back(report.pipeline_seconds);
    step_seconds.push_back(report.seconds);
    bubbles.push_back(report.bubble_measured);
    profile.add(PipelineAccess::last_outcome(pipeline));
  }
  const std::vector<StageTimes> times = profile.gather(pipeline);
  const int ranks = PipelineAccess::layout(pipeline).place.topology.size.pipeline;
  double work = 0;
  for (const StageTimes& time : times) {
    work += time.forward + time.backward_input + time.backward_weight;
  }
  const Simulation simulated =
      simulate(PipelineAccess::layout(pipeline).plans.order, {.stages = times, .message = 0});
  return {.pipeline = median(pipeline_seconds),
          .step = median(step_seconds),
          .simulated = simulated.makespan,
          .ideal = work / ranks * (options.shape.micro_batches + ranks - 1),
          .bubble = median(bubbles),
          .simulated_bubble = simulated.bubble_makespan};
}

Measured measure_sleeping(Communicator& world, const PipelineOptions& options, milliseconds time,
                          int steps) {
  const auto source =
      make_array_source(std::vector<float>(16, 1), 1, std::vector<float>(16, 1), 1, 16);
  const StageFactory factory = [time](int, int) { return std::make_unique<SleepingStage>(time); };
  Pipeline pipeline(world, factory, *source, options);
  return measure(pipeline, options, steps);
}

void add_row(Report& report, const char* stages, int ranks, const PipelineOptions& options,
             const Measured& result) {
  report.row({stages, ranks, options.order.schedule, options.shape.micro_batches,
              result.pipeline * 1e3, result.simulated * 1e3, result.pipeline / result.simulated,
              result.simulated / result.pipeline, result.ideal / result.pipeline,
              result.simulated / result.step});
}

void run(Communicator& world, int steps, Report& report) {
  for (const char* schedule : {"gpipe", "1f1b"}) {
    PipelineOptions options;
    options.order.schedule = schedule;
    options.shape.micro_batches = 16;
    add_row(report, "sleep", world.size(), options,
            measure_sleeping(world, options, milliseconds(5), steps));
  }
  if (world.size() != 2) return;
  TransformerConfig model;
  const RandomTokens source(model.context, model.vocabulary);
  for (const int micro_batches : {8, 16}) {
    PipelineOptions options;
    options.shape.micro_batches = micro_batches;
    options.shape.micro_batch_size = 4;
    options.training.learning_rate = {.peak = 1e-4};
    const StageFactory factory = Transformer(model);
    Pipeline pipeline(world, factory, source, options);
    add_row(report, "gpt2, 4 x 256", 2, options, measure(pipeline, options, steps));
  }
}

// Every schedule that trains, F = I = W = 10 ms per action, two chunks where it takes them.
void run_family(Communicator& world, int steps, Report& report) {
  for (const std::string& name : schedule_names()) {
    if (name == "forward-only") continue;
    PipelineOptions options;
    options.order.schedule = name;
    options.shape.micro_batches = 16;
    for (const int chunks : {2, 1}) {
      options.order.chunks = chunks;
      try {
        (void)stages_of(name, {world.size(), options.shape.micro_batches, chunks});
      } catch (const std::invalid_argument&) {
        continue;
      }
      const Measured result = measure_sleeping(world, options, milliseconds(10), steps);
      report.row({name, world.size(), chunks, options.shape.micro_batches, result.pipeline * 1e3,
                  result.simulated * 1e3, result.pipeline / result.simulated, result.bubble,
                  result.simulated_bubble});
      break;
    }
  }
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) {
  using namespace sluice;
  using namespace sluice::benchmarks;
  return run_main(argc, argv, [&](World& ranks) {
    Communicator& world = communicator_of(ranks);
    const int steps = std::atoi(argument(argc, argv, "--steps", "9").c_str());
    const bool family = argument(argc, argv, "--stages", "") == "family";
    Report report =
        family
            ? Report("The family of schedules, sleeping stages",
                     {"schedule", "ranks", "chunks", "micro-batches", "measured ms", "simulated ms",
                      "measured/simulated", "bubble measured", "bubble simulated"})
            : Report("Pipeline efficiency: measured step against its simulation",
                     {"stages", "ranks", "schedule", "micro-batches", "measured ms", "simulated ms",
                      "measured/simulated", "of simulated", "of balanced ideal", "whole step"});
    family ? run_family(world, steps, report) : run(world, steps, report);
    if (world.rank() != 0) return;
    report.print();
    report.save(argument(argc, argv, "--json", ""));
  });
}
