// An embedding program with a watchdog, for hangs.py: watched_program <how> <timeout> [<number>]
//   train     <number> steps
//   slow      in step 3 the last stage takes <number> seconds for a micro-batch
//   loading   in step 3 the data source takes <number> seconds
//   deadlock  the engine executes a plan that no proof has seen: each of two ranks waits for the
//             other
//   leave     the last rank but one destroys its pipeline after step 3, the others go on
//   embedded  as train; a lost rank is an Error that the program catches; prints it, and how long
//             the end of the pipeline takes
//   many      makes and destroys <number> pipelines; prints threads and descriptors
//   segv, bus, fpe, abort, terminate, bad_alloc   in step 3 the last stage fails so
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/plan.hpp>
#include <sluice/program.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/host.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/control.hpp"
#include "runtime/engine/engine.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/watchdog/watchdog.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/stages/prepared.hpp"

namespace sluice {
namespace {

using testing::ArithmeticStage;

struct Arguments {
  std::string how;
  double timeout = 3;
  long number = 1'000'000;
};

constexpr int kMicroBatches = 4;
constexpr std::uint64_t kStep = 3;

void sleep_for(long seconds) { std::this_thread::sleep_for(std::chrono::seconds(seconds)); }

// What the last stage does in the middle of step 3.
void fail(const Arguments& arguments) {
  const std::string& how = arguments.how;
  if (how == "slow") return sleep_for(arguments.number);
  if (how == "segv") {
    auto* page = static_cast<volatile int*>(
        ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    *page = 1;
  }
  if (how == "bus") ::raise(SIGBUS);
  if (how == "fpe") ::raise(SIGFPE);
  if (how == "abort") std::abort();
  if (how == "terminate") std::terminate();
  if (how == "bad_alloc") throw std::bad_alloc();
}

// Waits once while it loads step 3.
class SlowSource final : public DataSource {
 public:
  SlowSource(std::unique_ptr<DataSource> source, long seconds)
      : source_(std::move(source)), seconds_(seconds) {}
  [[nodiscard]] std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return source_->input_specs(samples);
  }
  [[nodiscard]] std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return source_->target_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    if (step == kStep && range.first == 0) sleep_for(seconds_);
    source_->inputs(phase, step, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    source_->targets(phase, step, range, into);
  }

 private:
  std::unique_ptr<DataSource> source_;
  long seconds_;
};

std::unique_ptr<DataSource> samples() {
  std::vector<float> values(kMicroBatches);
  std::iota(values.begin(), values.end(), 1.0F);
  return make_array_source(values, 1, std::vector<float>(kMicroBatches, 1), 1, kMicroBatches);
}

PipelineOptions options_of(const Arguments& arguments) {
  PipelineOptions options;
  options.shape.micro_batches = kMicroBatches;
  options.training.optimizer = OptimizerConfig::sgd();
  options.training.learning_rate = {.peak = 0};
  const char* directory = std::getenv("WATCHED_DIRECTORY");
  options.watch = {.on = arguments.timeout > 0,
                   .timeout = arguments.timeout,
                   .directory = directory == nullptr ? "" : directory,
                   .ends_process = arguments.how != "embedded"};
  return options;
}

std::unique_ptr<Pipeline> make_pipeline(Communicator& world, const Arguments& arguments,
                                        const DataSource& source) {
  return std::make_unique<Pipeline>(
      world,
      [&](int stage, int stages) {
        testing::PlannedFailure failure;
        if (stage + 1 == stages) failure = {kStep, 1, [&] { fail(arguments); }};
        return std::make_unique<ArithmeticStage>(stage, failure);
      },
      source, options_of(arguments));
}

void train(Communicator& world, const Arguments& arguments) {
  std::unique_ptr<DataSource> source = samples();
  if (arguments.how == "loading") {
    source = std::make_unique<SlowSource>(std::move(source), arguments.number);
  }
  auto pipeline = make_pipeline(world, arguments, *source);
  const long steps = arguments.how == "train" ? arguments.number : 6;
  for (long step = 1; step <= steps; ++step) {
    if (world.rank() == world.size() - 2 && arguments.how == "leave" &&
        step > static_cast<long>(kStep)) {
      pipeline.reset();
      sleep_for(1000);
    }
    (void)pipeline->train_step();
    if (world.rank() == 0) {
      std::printf("step %ld\n", step);
      std::fflush(stdout);
    }
  }
  pipeline->close();
}

void train_embedded(Communicator& world, const Arguments& arguments) {
  const auto source = samples();
  auto pipeline = make_pipeline(world, arguments, *source);
  try {
    for (long step = 1;; ++step) {
      (void)pipeline->train_step();
      if (world.rank() == 0) fmt::print("step {}\n", step);
      std::fflush(stdout);
    }
  } catch (const Error& error) {
    fmt::print("rank {} caught {} of rank {}: {}\n", world.rank(), exit_code(error.code()),
               error.rank(), error.what());
  }
  const auto begun = std::chrono::steady_clock::now();
  pipeline.reset();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  fmt::print("rank {} destroyed its pipeline in {:.1f} s\n", world.rank(), took.count());
  std::fflush(stdout);
  // One rank is gone: MPI cannot end in order.
  sleep_for(2);
  ::_exit(exit_code(ErrorCode::kPeer));
}

std::size_t entries(const char* directory) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& each : std::filesystem::directory_iterator(directory)) ++count;
  return count;
}

void make_many(Communicator& world, const Arguments& arguments) {
  const auto source = samples();
  const auto count = [&](const char* when) {
    sleep_for(1);  // a thread that has said goodbye may take a moment to go
    fmt::print("rank {} {}: {} threads, {} descriptors\n", world.rank(), when,
               entries("/proc/self/task"), entries("/proc/self/fd"));
  };
  make_pipeline(world, arguments, *source).reset();
  count("before");
  for (long i = 0; i < arguments.number; ++i) {
    auto pipeline = make_pipeline(world, arguments, *source);
    (void)pipeline->train_step();
  }
  count("after");
}

// The gradient's receive comes before the activation's send: rank 0 waits for rank 1, and rank 1
// for rank 0.
Plan deadlocked_plan() {
  Plan plan =
      assemble_plan(lower(generate("1f1b", {2, 1, 1}), {.reduce_grad = false, .tied = {}}), {}, {});
  std::vector<PlanOp>& ops = plan.ranks[0].ops;
  const auto find = [&](OpKind kind) {
    return std::find_if(ops.begin(), ops.end(), [&](const PlanOp& op) { return op.kind == kind; });
  };
  const PlanOp send = *find(OpKind::kStartSend);
  ops.erase(find(OpKind::kStartSend));
  ops.insert(find(OpKind::kWaitRecv) + 1, send);
  return plan;
}

void deadlock(Communicator& world, const Arguments& arguments) {
  PipelineOptions options = options_of(arguments);
  options.shape = {.pipeline = 2, .micro_batches = 1};
  JobContext job(world, options);
  WatchedJob watched{
      .activity = job.activity.get(), .abort = [&](int code) { world.abort(code); }, .ranks = {}};
  for (int rank = 0; rank < 2; ++rank) {
    watched.ranks.push_back({job.hosts[static_cast<std::size_t>(rank)], {rank}, 0});
  }
  const Watchdog watchdog(*job.world.collectives, watched, options.watch);
  const Plan plan = deadlocked_plan();
  const EdgeTable edges({{.samples = 1}}, {std::vector<std::vector<EdgeTensor>>(
                                              3, {{{DType::kF32, Shape{1, 1}}, true}})});
  ComputeContext compute(Device{}, 1);
  ArithmeticStage stage(world.rank());
  prepare(stage, {.compute = &compute, .slots = 1});
  const auto source = make_array_source({1}, 1, {1}, 1, 1);
  const std::vector<SampleRange> ranges = {{0, 1}};
  const bool last = world.rank() == 1;
  BatchLoader loader(*source, Phase::kTrain, ranges, !last, last);
  EngineConfig config;
  config.plan = &plan;
  config.rank = world.rank();
  config.edges = &edges;
  config.stages = {{world.rank(), &stage, &stage, last ? &stage : nullptr}};
  config.compute = &compute;
  config.communicator = job.messages.get();
  config.interrupt = job.engine_watch.get();
  config.activity = job.activity.get();
  Engine engine(config);
  (void)engine.run(
      {.phase = Phase::kTrain, .step = 1, .micro_batches = ranges, .batch = &loader.load(1)},
      nullptr);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  sluice::Arguments arguments;
  arguments.how = argc > 1 ? argv[1] : "train";
  if (argc > 2) arguments.timeout = std::atof(argv[2]);
  if (argc > 3) arguments.number = std::atol(argv[3]);
  return sluice::run_main(argc, argv, [&](sluice::World& ranks) {
    sluice::Communicator& world = sluice::communicator_of(ranks);
    const sluice::PlaceSignals place;
    if (arguments.how == "deadlock") return sluice::deadlock(world, arguments);
    if (arguments.how == "many") return sluice::make_many(world, arguments);
    if (arguments.how == "embedded") return sluice::train_embedded(world, arguments);
    sluice::train(world, arguments);
  });
}
