#include "runtime/train/run_summary.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "comm/base/cores.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

void print_row(const char* name, const std::string& text) {
  fmt::print("  {:<18} {}\n", name, text);
}

void print_head(const RunEnd& run) {
  const TrainOptions& options = run.options;
  if (!run.stopped) {
    fmt::print("\nDone: {} step{}\n", options.steps, options.steps == 1 ? "" : "s");
    return;
  }
  std::string saved;
  if (!run.save) {
    saved = "; nothing is saved";
  } else if (!options.checkpoint.weights_only) {
    saved = fmt::format("; resume with --resume {} (or auto)", options.save);
  }
  fmt::print("\nstopped as asked after step {}{}\n", run.pipeline.step(), saved);
}

void print_losses(const RunEnd& run) {
  const char* unit = run.data.file->format() == TokenFormat::kText ? "byte" : "token";
  const auto in_units = [&](double nats) {
    return fmt::format("{:.4f} nats, {:.4f} bits per {}", nats, nats / std::log(2.0), unit);
  };
  const StepReports& reports = run.reports;
  if (reports.sums().steps > 0) print_row("training loss", in_units(reports.train_loss()));
  if (reports.validation_loss() && !run.stopped) {
    const std::int64_t samples = run.data.last_validation, windows = run.data.windows;
    print_row("validation loss",
              in_units(*reports.validation_loss()) +
                  (samples < windows ? fmt::format(" ({} of {} windows)", samples, windows) : ""));
  }
  if (!reports.skipped().empty()) {
    print_row("skipped steps",
              fmt::format("{}: the loss or a gradient was not finite", reports.skipped().size()));
  }
}

// Beside what the run measured.
void print_promise(const StepPromise& promise, const StepReports::Sums& sums) {
  const auto steps = static_cast<double>(sums.steps);
  std::string text = fmt::format("bubble {:.1f} % promised by {}, {:.1f} % measured",
                                 100 * promise.bubble, promise.source, 100 * sums.bubble / steps);
  if (promise.milliseconds > 0) {
    text += fmt::format("; step {:.4g} ms promised, {:.4g} ms measured", promise.milliseconds,
                        1000 * sums.seconds / steps);
  }
  print_row("schedule", text);
}

void print_speed(const RunEnd& run) {
  const StepReports::Sums& sums = run.reports.sums();
  if (sums.steps == 0) return;
  print_row("speed", fmt::format("{:.0f} tokens/s", sums.tokens / sums.seconds));
  const int ranks = run.world.local_size(), cores = host_cores();
  const bool sliced = ranks > cores;
  print_row("bubble",
            fmt::format("{:.1f} % measured, {:.1f} % ideal{}",
                        100 * sums.bubble / static_cast<double>(sums.steps),
                        100 * PipelineAccess::layout(run.pipeline).plans.bubble_ideal,
                        sliced ? fmt::format(" (measured includes time-slicing: {} ranks share {} "
                                             "cores)",
                                             ranks, cores)
                               : ""));
  if (run.choice.promise) print_promise(*run.choice.promise, sums);
}

void print_files(const RunEnd& run) {
  const TrainOptions& options = run.options;
  if (run.save) {
    print_row("weights", (std::filesystem::path(options.save) / run.save->filename()).string());
    if (!options.checkpoint.weights_only && !run.stopped) {
      print_row("to go on", fmt::format("train --resume {} --steps N (N above {})", options.save,
                                        options.steps));
    }
  }
  if (!options.metrics.empty()) print_row("metrics", options.metrics);
  if (run.stopped || options.trace.empty()) return;
  print_row("trace", options.trace + " (open it at ui.perfetto.dev)");
  if (run.world.size() == 1) return;
  print_row("trace clock", fmt::format("ranks agree with rank 0 within {:.0f} us",
                                       std::ceil(run.last_steps.clock_error() * 1e6)));
}

}  // namespace

void print_summary(const RunEnd& run) {
  print_head(run);
  print_losses(run);
  print_speed(run);
  print_files(run);
  if (run.stopped) return;
  fmt::print("{}", run.last_steps.operators(run.reports.card()));
}

}  // namespace sluice
