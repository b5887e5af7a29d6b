// Pipeline efficiency: the measured step over the simulated makespan, fed with the run's own action
// times; with stages that sleep, and (on two ranks) with real compute.
//   mpirun -n 4 pipeline_benchmark [--json FILE] [--steps N]
#include <chrono>
#include <cstdlib>
#include <thread>

#include "runtime/array_source.hpp"
#include "runtime/pipeline.hpp"
#include "runtime/profile.hpp"
#include "runtime/program.hpp"
#include "schedules/simulate.hpp"
#include "stages/transformer.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/token_source.hpp"

namespace sluice::benchmarks {
namespace {

using std::chrono::milliseconds;

// Forward and each half of backward take 5 ms and compute nothing.
class SleepingStage : public Stage, public LossStage {
 public:
  StageDescription describe(std::span<const TensorSpec> inputs) const override {
    return {{inputs[0]}};
  }
  void prepare(const StageSetup&) override {}
  void forward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {
    std::this_thread::sleep_for(milliseconds(5));
  }
  void backward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {
    std::this_thread::sleep_for(milliseconds(10));
  }
  LossResult loss(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {
    return {0, 1};
  }
  double target_weight(std::span<const Tensor>) const override { return 1; }
};

struct Measured {
  double pipeline = 0, step = 0, simulated = 0, ideal = 0;  // seconds
};

// Medians over `steps` steps after two that do not count. `ideal`: the bubble-limited step of a
// perfectly balanced pipeline with the same total work.
Measured measure(Pipeline& pipeline, const PipelineOptions& options, int steps) {
  for (int i = 0; i < 2; ++i) pipeline.train_step();
  std::vector<double> pipeline_seconds, step_seconds;
  Profile profile;
  for (int i = 0; i < steps; ++i) {
    const StepReport report = pipeline.train_step();
    pipeline_seconds.push_back(report.pipeline_seconds);
    step_seconds.push_back(report.seconds);
    profile.add(pipeline.last_outcome());
  }
  const std::vector<StageTimes> times = profile.gather(pipeline);
  const int ranks = pipeline.layout().topology.pipeline;
  const Schedule schedule =
      generate(options.schedule, {ranks, options.micro_batches, options.chunks});
  double work = 0;
  for (const StageTimes& time : times) {
    work += time.forward + time.backward_input + time.backward_weight;
  }
  return {.pipeline = median(pipeline_seconds),
          .step = median(step_seconds),
          .simulated = simulate(schedule, {.stages = times, .message = 0}).makespan,
          .ideal = work / ranks * (options.micro_batches + ranks - 1)};
}

void add_row(Report& report, const char* stages, int ranks, const PipelineOptions& options,
             const Measured& result) {
  report.row({stages, ranks, options.schedule, options.micro_batches, result.pipeline * 1e3,
              result.simulated * 1e3, result.pipeline / result.simulated,
              result.simulated / result.pipeline, result.ideal / result.pipeline,
              result.simulated / result.step});
}

void run(Communicator& world, int steps, Report& report) {
  for (const char* schedule : {"gpipe", "1f1b"}) {
    PipelineOptions options;
    options.schedule = schedule;
    options.micro_batches = 16;
    const auto source =
        make_array_source(std::vector<float>(16, 1), 1, std::vector<float>(16, 1), 1, 16);
    const StageFactory factory = [](int, int) { return std::make_unique<SleepingStage>(); };
    Pipeline pipeline(world, options, factory, *source);
    add_row(report, "sleep", world.size(), options, measure(pipeline, options, steps));
  }
  if (world.size() != 2) return;
  TransformerConfig model;
  const RandomTokens source(model.context, model.vocabulary);
  for (const int micro_batches : {8, 16}) {
    PipelineOptions options;
    options.micro_batches = micro_batches;
    options.micro_batch_size = 4;
    options.learning_rate = {.peak = 1e-4, .constant = true};
    const std::vector<double> costs = layer_costs(model);
    const StageFactory factory = [&](int stage, int stages) {
      return make_transformer_stage(model, partition_by_cost(costs, stages), stage);
    };
    Pipeline pipeline(world, options, factory, source);
    add_row(report, "gpt2, 4 x 256", 2, options, measure(pipeline, options, steps));
  }
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) {
  using namespace sluice;
  using namespace sluice::benchmarks;
  return run_main(argc, argv, [&](MpiSession&, Communicator& world) {
    Report report("Pipeline efficiency: measured step against its simulation",
                  {"stages", "ranks", "schedule", "micro-batches", "measured ms", "simulated ms",
                   "measured/simulated", "of simulated", "of balanced ideal", "whole step"});
    run(world, std::atoi(argument(argc, argv, "--steps", "9").c_str()), report);
    if (world.rank() != 0) return;
    report.print();
    report.save(argument(argc, argv, "--json", ""));
  });
}
