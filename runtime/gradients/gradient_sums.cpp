#include "runtime/gradients/gradient_sums.hpp"

#include <algorithm>

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
    stages_.emplace_back(*this, binding.index, *binding.parameters);
    if (nccl_ == nullptr) replicas_.reserve_sum(binding.parameters->flat_grads().size());
  }
  if (nccl_ != nullptr)
    open_.reserve(load_of(layout, layout.place.here.pipeline, bucket_bytes).count);
}

SumLoad GradientSums::load_of(const JobLayout& layout, int rank, std::size_t bucket_bytes) {
  const std::size_t bucket = bucket_floats(bucket_bytes);
  SumLoad load;
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    std::size_t bytes = 0;
    for (const ParameterEntry& each : layout.parameters.stages[at(stage)].parameters) {
      add_bytes(bytes, parameter_bytes(each.elements));
    }
    const std::size_t count = bytes / sizeof(float);
    load.largest = std::max(load.largest, std::min(bucket, count));
    load.count += (count + bucket - 1) / bucket;
    if (count >= bucket) load.sizes.push_back(bucket);
    if (count % bucket > 0) load.sizes.push_back(count % bucket);
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

FinalGradients* GradientSums::final_gradients(int stage) {
  return nccl_ != nullptr ? find(stage) : nullptr;
}

void GradientSums::finish(int stage) {
  StageSum* const sum = find(stage);
  if (sum == nullptr) return;
  nccl_ != nullptr ? sum->from(0) : sum->sum_on_host();
}

void GradientSums::wait_all_on_stream() {
  for (NcclTicket& ticket : open_) nccl_->wait_on_stream(ticket);
  open_.clear();
  for (StageSum& sum : stages_) sum.begin_step();
}

void GradientSums::StageSum::from(std::size_t begin) {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream(), begin);
  while (left_ > 0) {
    const std::size_t next = left_ - std::min(left_, sums_.bucket_);
    if (next < begin) break;
    sums_.open_.push_back(sums_.nccl_->sum(parameters_.flat_grads().subspan(next, left_ - next)));
    left_ = next;
  }
  sums_.nccl_->progress();
}

void GradientSums::StageSum::sum_on_host() {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream());
  const std::span<float> sum = sums_.mirror_.read_back(parameters_.flat_grads());
  sums_.replicas_.ordered_sum(sum, sums_.mirror_.owner(parameters_.memory()));
  sums_.mirror_.write_back();
}

}  // namespace sluice
