// Rows that train: whole steps, chunks, waiting for the host, and the engine alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>

#include "comm/base/steady_seconds.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/benchmarks/gpu/activity.hpp"
#include "tests/benchmarks/gpu/rows.hpp"
#include "tests/benchmarks/idle_engine.hpp"
#include "tests/benchmarks/token_source.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice::benchmarks {

namespace {

constexpr double kPeakFlops = 989e12;  // dense bf16 of an H100 or H200, by NVIDIA's data sheet

double flops_per_token(const TransformerConfig& model) {
  return training_flops(model) / model.context;
}

// How a model is trained on one rank on the GPU.
struct How {
  double share = 0.85;  // of the GPU's free memory that the run may plan for
  int chunks = 1;
  bool trace = false, cuda_graphs = false;
  void (*change)(GpuOptions& options) = nullptr;  // of the model, the optimizer
};

class Run {
 public:
  Run(Communicator& comm, const GpuOptions& options, const How& how)
      : options_(options), source_(options.model.context, options.tokens) {
    settings_.devices.choices = parse_devices("cuda");
    settings_.order.schedule = how.chunks == 1 ? "1f1b" : "interleaved";
    settings_.order.chunks = how.chunks;
    settings_.devices.cuda_graphs = how.cuda_graphs;
    settings_.training.learning_rate = {.peak = 1e-5};
    settings_.checks.trace = how.trace;
    if (how.change != nullptr) how.change(options_);
    settings_.training.optimizer.moments = options_.moments;
    factory_ = Transformer(options_.model);
    choose_micro_batch(comm, how.share);
    pipeline_ = std::make_unique<Pipeline>(comm, factory_, source_, settings_);
  }

  // Wall seconds per step, with the stream drained before and after.
  double seconds_per_step() {
    drain();
    const GpuSampler::Measuring measuring(*options_.sampler);
    const double start = steady_seconds();
    for (int i = 0; i < options_.steps; ++i) loss_ = pipeline_->train_step().loss;
    drain();
    return (steady_seconds() - start) / options_.steps;
  }

  // Until matmuls, attention graphs and slots have been made and actions recorded.
  void warm_up() {
    for (int i = 0; i < 2; ++i) (void)pipeline_->train_step();
  }

  void drain() { pipeline_->compute().stream().synchronize(); }

  // Of the GPU's memory, since before the pipeline was made.
  [[nodiscard]] double used_gib() const {
    const std::size_t free = properties_of(kBenchmarkGpu).free_memory;
    return (static_cast<double>(free_before_) - static_cast<double>(free)) / kGib;
  }

  Pipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] std::int64_t micro_batch() const { return settings_.shape.micro_batch_size; }
  [[nodiscard]] int micro_batches() const { return settings_.shape.micro_batches; }
  [[nodiscard]] double loss() const { return loss_; }
  [[nodiscard]] double planned_gib() const {
    return static_cast<double>(PipelineAccess::layout(*pipeline_).memory.ranks[0].total()) / kGib;
  }

 private:
  // The most samples that divide the batch, fit, and whose logits that are made at once a 32-bit
  // index can count: no matmul of more has run on a card.
  void choose_micro_batch(Communicator& comm, double share) {
    const auto free = static_cast<double>(properties_of(kBenchmarkGpu).free_memory);
    for (std::int64_t samples = options_.batch; samples >= 1; --samples) {
      if (options_.micro_batch != 0) samples = options_.micro_batch;
      if (options_.batch % samples != 0) continue;
      settings_.shape.micro_batch_size = samples;
      settings_.shape.micro_batches = static_cast<int>(options_.batch / samples);
      if (options_.micro_batch != 0) return;
      const std::int64_t logits = samples * options_.model.context * options_.model.vocabulary;
      if (logits / options_.model.logit_chunks > INT32_MAX) continue;
      try {
        const JobLayout layout = PipelineAccess::plan_layout(comm, settings_, factory_, source_);
        if (static_cast<double>(layout.memory.ranks[0].total()) <= share * free) return;
      } catch (const Error& error) {  // more than there is
        if (error.code() != ErrorCode::kDevice || samples == 1) throw;
      }
    }
  }

  static constexpr double kGib = 1073741824.0;

  std::size_t free_before_ = properties_of(kBenchmarkGpu).free_memory;
  GpuOptions options_;
  RandomTokens source_;
  PipelineOptions settings_;
  StageFactory factory_;
  std::unique_ptr<Pipeline> pipeline_;
  double loss_ = 0;
};

const char* precision_name(DType dtype) { return dtype == DType::kBf16 ? "bf16" : "fp32"; }

double tokens_per_second(const GpuOptions& options, double seconds) {
  return static_cast<double>(options.rows()) / seconds;
}

}  // namespace

void training_row(const GpuOptions& options) {
  run_loopback(1, [&](Communicator& comm) {
    Run run(comm, options, {});
    run.warm_up();
    std::vector<double> turns;
    for (int i = 0; i < options.rounds; ++i) turns.push_back(run.seconds_per_step());
    const double seconds = median(turns), speed = tokens_per_second(options, seconds);
    Report report = gpu_report(
        "GPU: training", {"model", "parameters", "samples", "micro-batch", "stream", "moments",
                          "logit chunks", "tokens/s", "share of 989 TFLOP/s", "ms per step",
                          "planned GiB", "used GiB", "used / planned", "loss"});
    report.row({options.model_name, parameter_count(options.model), options.batch,
                run.micro_batch(), precision_name(options.model.stream_precision),
                precision_name(options.moments), options.model.logit_chunks, speed,
                speed * flops_per_token(options.model) / kPeakFlops, seconds * 1e3,
                run.planned_gib(), run.used_gib(), run.used_gib() / run.planned_gib(), run.loss()});
    publish(report, options);
  });
}

namespace {

// Tokens per second of `one` and `other` in turns, and their ratio; both are in memory at once.
void compare_runs(const GpuOptions& options, const char* title, const char* name_of_one,
                  const How& one, const char* name_of_other, const How& other) {
  run_loopback(1, [&](Communicator& comm) {
    // The first decides for the micro-batch, the second takes it.
    GpuOptions same = options;
    Run first(comm, options, one);
    same.micro_batch = first.micro_batch();
    Run second(comm, same, other);
    first.warm_up();
    second.warm_up();
    std::vector<double> firsts, seconds;
    for (int i = 0; i < options.rounds; ++i) {
      firsts.push_back(first.seconds_per_step());
      seconds.push_back(second.seconds_per_step());
    }
    const double a = tokens_per_second(options, median(firsts));
    const double b = tokens_per_second(options, median(seconds));
    Report report = gpu_report(
        title, {"model", "samples", "micro-batch", std::string(name_of_one) + " tokens/s",
                std::string(name_of_other) + " tokens/s", "ratio", "same loss"});
    report.row({options.model_name, options.batch, first.micro_batch(), a, b, a / b,
                first.loss() == second.loss()});
    publish(report, options);
  });
}

}  // namespace

void chunks_row(const GpuOptions& options) {
  compare_runs(options, "GPU: four chunks on one rank against the model unsplit", "chunks",
               {.share = 0.4, .chunks = 4}, "unsplit", {.share = 0.9});
}

void graphs_row(const GpuOptions& options) {
  compare_runs(options, "GPU: CUDA graphs against calls", "graphs",
               {.share = 0.4, .cuda_graphs = true}, "calls", {.share = 0.9});
}

// A model with dropout has dropout of the embedding, of probabilities, and after attention and MLP.
void dropout_row(const GpuOptions& options) {
  compare_runs(options, "GPU: training with dropout 0.1 against without", "dropout",
               {.share = 0.4, .change = [](GpuOptions& own) { own.model.dropout = 0.1F; }}, "none",
               {.share = 0.9});
}

// The three are for a model that was asked for without them.
void stream_row(const GpuOptions& options) {
  compare_runs(
      options, "GPU: training with a bf16 stream against fp32", "bf16 stream",
      {.share = 0.4, .change = [](GpuOptions& own) { own.model.stream_precision = DType::kBf16; }},
      "fp32 stream", {.share = 0.9});
}

void moments_row(const GpuOptions& options) {
  compare_runs(options, "GPU: training with bf16 moments against fp32", "bf16 moments",
               {.share = 0.4, .change = [](GpuOptions& own) { own.moments = DType::kBf16; }},
               "fp32 moments", {.share = 0.9});
}

void logits_row(const GpuOptions& options) {
  compare_runs(options, "GPU: training with logits in 8 chunks against whole", "chunks",
               {.share = 0.4, .change = [](GpuOptions& own) { own.model.logit_chunks = 8; }},
               "whole", {.share = 0.9});
}

namespace {

// Of one step's compute actions on the device.
struct StepTimes {
  double span = 0;  // first start to last end
  double busy = 0;  // sum over the actions
};

StepTimes times_of(Pipeline& pipeline) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  double first = kNever, last = -kNever;
  for (const TraceEvent& event : PipelineAccess::trace(pipeline)) {
    if (event.track != TraceTrack::kCompute) continue;
    first = std::min(first, event.start);
    last = std::max(last, event.end);
  }
  return {last - first, PipelineAccess::last_outcome(pipeline).busy_seconds};
}

// Copies that keep the stream busy for about `seconds`, so that the host gets ahead of it.
class HeadStart {
 public:
  explicit HeadStart(ComputeContext& ctx)
      : ctx_(ctx),
        bytes_(std::min(std::size_t{1} << 30, properties_of(ctx.device()).free_memory / 32)),
        from_(ctx.device(), bytes_),
        to_(ctx.device(), bytes_) {
    fill_zero_async(from_.data(), bytes_, ctx_.stream());
    copy();
    const Event start = mark();
    for (int i = 0; i < kTrial; ++i) copy();
    const Event end = mark();
    ctx_.stream().synchronize();
    seconds_ = std::max(end.seconds_since(start) / kTrial, 1e-7);
  }
  void give(double seconds) {
    const int copies = static_cast<int>(std::ceil(seconds / seconds_));
    for (int i = 0; i < copies; ++i) copy();
  }

 private:
  static constexpr int kTrial = 8;
  void copy() { copy_async(to_.data(), from_.data(), bytes_, ctx_.stream()); }
  Event mark() {
    Event event(ctx_.device(), /*timed=*/true);
    event.record(ctx_.stream());
    return event;
  }
  ComputeContext& ctx_;
  std::size_t bytes_;
  Buffer from_, to_;
  double seconds_ = 0;
};

}  // namespace

namespace {

// The kernels that take most of a step, and all others in one row.
void add_kernels(Report& report, const std::vector<KernelTime>& times) {
  constexpr std::size_t kMost = 40;
  KernelTime others = {"all others"}, all;
  for (const KernelTime& each : times) all.seconds += each.seconds;
  const auto add = [&](const KernelTime& each) {
    report.row({each.name, each.runs, each.seconds * 1e3, each.seconds / all.seconds,
                each.seconds / std::max(each.runs, 1) * 1e6});
  };
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (i < kMost) {
      add(times[i]);
    } else {
      others.runs += times[i].runs;
      others.seconds += times[i].seconds;
    }
  }
  if (others.runs > 0) add(others);
}

// The share of a step in which the GPU runs nothing, whatever the reason, by CUPTI's records: a
// step between two drained streams, from its first kernel, copy or fill to the end of its last.
// And what the last of these steps consisted of.
void idle_between_kernels(Run& run, const GpuOptions& options) {
  Report report = gpu_report(
      "GPU: idle between kernels within a step",
      {"model", "samples", "micro-batch", "records", "span ms", "covered ms", "idle share"});
  Report kernels = gpu_report("GPU: kernels of a step, under CUPTI",
                              {"kernel", "runs", "ms", "share of all", "us per run"});
  kernels.fact("model", options.model_name);
  try {
    ActivityRecorder recorder;
    std::vector<double> spans, covered, shares;
    std::vector<BusyInterval> intervals;
    for (int i = 0; i < options.rounds; ++i) {
      run.drain();
      static_cast<void>(recorder.take());
      (void)run.pipeline().train_step();
      run.drain();
      intervals = recorder.take();
      const Coverage coverage = coverage_of(intervals);
      spans.push_back(coverage.span * 1e3);
      covered.push_back(coverage.covered * 1e3);
      shares.push_back(coverage.idle_share());
    }
    report.row({options.model_name, options.batch, run.micro_batch(), intervals.size(),
                median(spans), median(covered), median(shares)});
    add_kernels(kernels, kernel_times(intervals));
  } catch (const Error& error) {
    report.row({options.model_name, options.batch, run.micro_batch(), 0, 0, 0,
                "not measured: " + std::string(error.what())});
  }
  publish(report, options);
  publish(kernels, options);
}

}  // namespace

// How long the GPU waits for the host, without a profiler: a step's actions are timed by events on
// the device once as they come, once behind copies that keep the stream busy until the host has
// put all of the step (or as much as the driver's queue takes) on it. What the first takes longer
// is idleness. The pause of about a microsecond that the hardware makes between two kernels that
// are both waiting in the queue is in neither and counts as work here; it is idleness in the second
// table.
void idle_row(const GpuOptions& options) {
  run_loopback(1, [&](Communicator& comm) {
    Run run(comm, options, {.share = 0.8, .trace = true});
    run.warm_up();
    HeadStart head_start(run.pipeline().compute());
    std::vector<double> spans, live, ahead;
    for (int i = 0; i < options.rounds; ++i) {
      run.drain();
      (void)run.pipeline().train_step();
      const StepTimes as_they_come = times_of(run.pipeline());
      spans.push_back(as_they_come.span);
      live.push_back(as_they_come.busy);
      run.drain();
      head_start.give(as_they_come.span);
      (void)run.pipeline().train_step();
      ahead.push_back(times_of(run.pipeline()).busy);
    }
    const double span = median(spans);
    Report report = gpu_report("GPU: waiting for the host within a step",
                               {"model", "samples", "micro-batch", "span ms", "actions ms",
                                "queued ahead ms", "idle share"});
    report.row({options.model_name, options.batch, run.micro_batch(), span * 1e3,
                median(live) * 1e3, median(ahead) * 1e3, 1 - median(ahead) / span});
    publish(report, options);
    idle_between_kernels(run, options);  // last: CUPTI stays in the process
  });
}

void issue_row(const GpuOptions& options) {
  Report report = gpu_report("GPU: host time per compute action, stages that do nothing",
                             {"schedule", "device", "host ns per action"});
  for (const Device device : {Device{}, kBenchmarkGpu}) {
    for (const char* schedule : {"1f1b", "gpipe"}) {
      run_loopback(1, [&](Communicator& comm) {
        report.row({schedule, to_string(device), engine_ns(comm, schedule, device)});
      });
    }
  }
  publish(report, options);
}

}  // namespace sluice::benchmarks
