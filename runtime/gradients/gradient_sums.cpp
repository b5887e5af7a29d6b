#include "runtime/gradients/gradient_sums.hpp"

#include <algorithm>
#include <utility>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

std::size_t bucket_floats(std::size_t bucket_bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 60;  // one bucket for everything
  return round_up(std::clamp(bucket_bytes, std::size_t{1}, kMost), kBufferAlignment) /
         sizeof(float);
}

std::size_t floats_of(const StageEntry& stage) {
  std::size_t bytes = 0;
  for (const ParameterEntry& each : stage.parameters) {
    add_bytes(bytes, parameter_bytes(each.elements));
  }
  return bytes / sizeof(float);
}

// Empty where no parameter is updated in parts.
std::vector<CutRange> ranges_in(const JobLayout& layout, int stage) {
  const StageEntry& entry = layout.parameters.stages[at(stage)];
  const bool cut = layout.place.topology.size.replica > 1 && !entry.parameters.empty() &&
                   !entry.parameters.front().ends.empty();
  return cut ? ranges_of(entry) : std::vector<CutRange>{};
}

// Of `floats` gradients, from their end on: each ends where the one before it begins. Those of no
// `ranges` have no ends, others lie in a range each.
std::vector<CutRange> buckets_of(std::size_t floats, std::size_t bucket,
                                 std::span<const CutRange> ranges) {
  std::vector<CutRange> buckets;
  for (std::size_t left = floats; left > 0; left = buckets.back().begin) {
    while (!ranges.empty() && ranges.back().begin >= left) {
      ranges = ranges.first(ranges.size() - 1);
    }
    const std::size_t first = ranges.empty() ? 0 : ranges.back().begin;
    const std::size_t begin = left - std::min(left - first, bucket);
    std::vector<std::size_t> ends =
        ranges.empty() ? std::vector<std::size_t>() : ranges.back().ends;
    for (std::size_t& end : ends) end = std::clamp(first + end, begin, left) - begin;
    buckets.push_back({begin, std::move(ends)});
  }
  return buckets;
}

}  // namespace

GradientSums::GradientSums(JobContext& job, const JobLayout& layout, NcclRoutes* nccl,
                           ComputeContext& compute, HostMirror& mirror,
                           std::span<const StageBinding> stages, std::size_t bucket_bytes)
    : replicas_(*job.group(Axis::kReplica).collectives),
      nccl_(nccl),
      compute_(compute),
      mirror_(mirror),
      bucket_(bucket_floats(bucket_bytes)) {
  for (const StageBinding& binding : stages) {
    stages_.emplace_back(*this, layout, binding);
    if (nccl_ == nullptr) replicas_.reserve_sum(binding.parameters->flat_grads().size());
  }
  if (nccl_ != nullptr)
    open_.reserve(load_of(layout, layout.place.here.pipeline, bucket_bytes).count);
}

// A step makes whole sums, or those of parts and then as many gathers or fewer.
SumLoad GradientSums::load_of(const JobLayout& layout, int rank, std::size_t bucket_bytes) {
  const std::size_t bucket = bucket_floats(bucket_bytes);
  SumLoad load;
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    const std::size_t count = floats_of(layout.parameters.stages[at(stage)]);
    load.largest = std::max(load.largest, std::min(bucket, count));
    if (count >= bucket) load.sizes.push_back(bucket);
    if (count % bucket > 0) load.sizes.push_back(count % bucket);
    const std::vector<CutRange> parts = buckets_of(count, bucket, ranges_in(layout, stage));
    load.count += parts.size();
    for (const CutRange& each : parts) {
      for (std::size_t r = 0, begin = 0; r < each.ends.size(); begin = each.ends[r++]) {
        load.largest_part = std::max(load.largest_part, each.ends[r] - begin);
      }
    }
  }
  std::sort(load.sizes.begin(), load.sizes.end());
  load.sizes.erase(std::unique(load.sizes.begin(), load.sizes.end()), load.sizes.end());
  return load;
}

GradientSums::StageSum* GradientSums::find(int stage) {
  const auto found = std::find_if(stages_.begin(), stages_.end(),
                                  [&](const StageSum& sum) { return sum.stage() == stage; });
  return found == stages_.end() ? nullptr : &*found;
}

FinalGradients* GradientSums::final_gradients(int stage, bool whole) {
  StageSum* const sum = nccl_ != nullptr ? find(stage) : nullptr;
  return sum != nullptr ? &sum->with(whole) : nullptr;
}

void GradientSums::finish(int stage, bool whole) {
  StageSum* const sum = find(stage);
  if (sum == nullptr) return;
  nccl_ != nullptr ? sum->with(whole).from(0) : sum->with(whole).sum_on_host();
}

void GradientSums::wait_all_on_stream() {
  for (NcclTicket& ticket : open_) nccl_->wait_on_stream(ticket);
  open_.clear();
  for (StageSum& sum : stages_) sum.begin_step();
}

void GradientSums::gather_values() {
  for (StageSum& sum : stages_) sum.gather_values();
  wait_all_on_stream();
}

GradientSums::StageSum::StageSum(GradientSums& sums, const JobLayout& layout,
                                 const StageBinding& binding)
    : sums_(sums),
      stage_(binding.index),
      parameters_(*binding.parameters),
      ranges_(ranges_in(layout, stage_)),
      whole_buckets_(buckets_of(parameters_.flat_grads().size(), sums.bucket_, {})),
      buckets_(buckets_of(parameters_.flat_grads().size(), sums.bucket_, ranges_)) {}

void GradientSums::StageSum::from(std::size_t begin) {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream(), begin);
  const std::span<float> grads = parameters_.flat_grads();
  const std::vector<CutRange>& buckets = whole_ ? whole_buckets_ : buckets_;
  for (; next_ < buckets.size() && buckets[next_].begin >= begin; ++next_) {
    const CutRange& bucket = buckets[next_];
    const std::size_t end = next_ == 0 ? grads.size() : buckets[next_ - 1].begin;
    const std::span<float> range = grads.subspan(bucket.begin, end - bucket.begin);
    sums_.open_.push_back(whole_ ? sums_.nccl_->sum(range)
                                 : sums_.nccl_->reduce_scatter(range, bucket.ends));
  }
  sums_.nccl_->progress();
}

void GradientSums::StageSum::sum_on_host() {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream());
  const std::span<float> sum = sums_.mirror_.read_back(parameters_.flat_grads());
  const KeepAlive owner = sums_.mirror_.owner(parameters_.memory());
  if (whole_) {
    sums_.replicas_.ordered_sum(sum, owner);
  } else {
    for (const CutRange& range : ranges_) {
      sums_.replicas_.ordered_reduce_scatter(sum.subspan(range.begin, range.ends.back()),
                                             range.ends, owner);
    }
  }
  sums_.mirror_.write_back();
}

// An optimizer writes its part of the copies in bf16. They are not gathered but made again from the
// values, at the memory's speed; the values have to come anyway.
void GradientSums::StageSum::gather_values() {
  if (ranges_.empty()) return;
  const std::span<float> values = parameters_.flat_values();
  if (sums_.nccl_ != nullptr) {
    for (const CutRange& range : ranges_) {
      sums_.open_.push_back(
          sums_.nccl_->gather(values.subspan(range.begin, range.ends.back()), range.ends));
    }
  } else {
    const std::span<float> host = sums_.mirror_.read_back(values);
    for (const CutRange& range : ranges_) {
      sums_.replicas_.all_gather_parts(host.subspan(range.begin, range.ends.back()), range.ends,
                                       sums_.mirror_.owner(parameters_.memory()));
    }
    sums_.mirror_.write_back();
  }
  parameters_.mark_values_changed();
}

}  // namespace sluice
