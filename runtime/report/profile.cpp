#include "runtime/report/profile.hpp"

#include <span>
#include <type_traits>

#include "runtime/engine/engine.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

double mean(const ActionSeconds::Sum& sum) {
  return sum.count == 0 ? 0 : sum.seconds / static_cast<double>(sum.count);
}

// Of I, and of whole backwards without their weight half.
double mean_input(const ActionSeconds& sums) {
  const std::int64_t count = sums.backward.count + sums.backward_input.count;
  if (count == 0) return 0;
  const double weight_halves =
      mean(sums.backward_weight) * static_cast<double>(sums.backward.count);
  return (sums.backward.seconds - weight_halves + sums.backward_input.seconds) /
         static_cast<double>(count);
}

void accumulate(ActionSeconds::Sum& into, const ActionSeconds::Sum& from) {
  into.seconds += from.seconds;
  into.count += from.count;
}

}  // namespace

StageTimes mean_times(const ActionSeconds& sums) {
  return {.forward = mean(sums.forward),
          .backward_input = mean_input(sums),
          .backward_weight = mean(sums.backward_weight)};
}

void Profile::add(const StepOutcome& outcome) {
  if (sums_.empty()) {
    sums_ = outcome.actions;
    return;
  }
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    accumulate(sums_[i].forward, outcome.actions[i].forward);
    accumulate(sums_[i].backward, outcome.actions[i].backward);
    accumulate(sums_[i].backward_input, outcome.actions[i].backward_input);
    accumulate(sums_[i].backward_weight, outcome.actions[i].backward_weight);
  }
}

std::vector<StageTimes> Profile::gather(Pipeline& pipeline) const {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  const auto stages = static_cast<std::size_t>(layout.plans.num_stages());
  std::vector<StageTimes> times(stages, {0, 0, 0});
  for (const ActionSeconds& sum : sums_) {
    times[static_cast<std::size_t>(sum.stage)] = mean_times(sum);
  }
  static_assert(std::is_trivially_copyable_v<StageTimes>);
  std::vector<StageTimes> all(stages * static_cast<std::size_t>(layout.place.topology.ranks()));
  PipelineAccess::guarded(pipeline, [&] {
    PipelineAccess::world(pipeline).all_gather(std::as_bytes(std::span(times)),
                                               std::as_writable_bytes(std::span(all)));
  });
  for (std::size_t s = 0; s < stages; ++s) {
    const int rank = layout.plans.placement().rank_of(static_cast<int>(s));
    times[s] = all[static_cast<std::size_t>(layout.place.topology.rank_of(0, rank)) * stages + s];
  }
  return times;
}

}  // namespace sluice
