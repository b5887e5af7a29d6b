#include "runtime/train/last_steps.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/operator_report.hpp"

namespace sluice {
namespace {

constexpr std::uint64_t kLastSteps = 4;

}  // namespace

ProductPrecision products_of(const TrainOptions& options) {
  if (options.model.precision == DType::kBf16) return ProductPrecision::kBf16;
  return options.pipeline.devices.tf32 ? ProductPrecision::kTf32 : ProductPrecision::kF32;
}

LastSteps::LastSteps(Pipeline& pipeline, const TrainOptions& options)
    : pipeline_(pipeline),
      options_(options),
      first_(std::max(pipeline.step(), options.steps - std::min(options.steps, kLastSteps)) + 1) {}

void LastSteps::before_step() {
  if (pipeline_.step() + 1 != first_) return;
  if (!options_.trace.empty()) timeline_.begin(pipeline_);
  if (options_.profile_operators) pipeline_.compute().profile_operators(true);
}

void LastSteps::after_step(const StepReport& step) {
  if (step.step < first_) return;
  if (!options_.trace.empty()) timeline_.add(pipeline_);
  if (!options_.profile_operators) return;
  ++profiled_steps_;
  profiled_seconds_ += step.seconds;
}

void LastSteps::sum_operators() {
  if (!options_.profile_operators) return;
  PipelineAccess::guarded(pipeline_, [&] {
    operators_ =
        sum_operator_times(PipelineAccess::world(pipeline_), pipeline_.compute().operator_times());
    pipeline_.compute().profile_operators(false);
  });
}

void LastSteps::write_timeline(const LayerTable& layers) {
  if (options_.trace.empty()) return;
  clock_error_ = timeline_.write(pipeline_, options_.trace, layers);
}

std::string LastSteps::operators(std::optional<CardPeaks> card) const {
  if (profiled_steps_ == 0) return "";
  const int ranks = PipelineAccess::layout(pipeline_).place.topology.ranks();
  return fmt::format("\nOperators (ranks: {}, last steps: {})\n{}", ranks, profiled_steps_,
                     operator_table(operators_, {.steps = profiled_steps_,
                                                 .rank_seconds = profiled_seconds_ * ranks,
                                                 .precision = products_of(options_),
                                                 .card = card}));
}

}  // namespace sluice
