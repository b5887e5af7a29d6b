#include "runtime/gradients/bucketed_sums.hpp"

#include <algorithm>

namespace sluice {
namespace {

std::size_t bucket_floats(std::size_t bucket_bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 60;  // one bucket for everything
  return round_up(std::clamp(bucket_bytes, std::size_t{1}, kMost), kBufferAlignment) /
         sizeof(float);
}

std::span<float> gradients_of(const StageBinding& binding) {
  const ParameterSet* set = binding.parameters;
  return set == nullptr ? std::span<float>() : set->flat_grads();
}

}  // namespace

BucketedSums::BucketedSums(NcclRoutes& nccl, ComputeContext& compute,
                           std::span<const StageBinding> stages, std::size_t bucket_bytes)
    : nccl_(nccl), compute_(compute), bucket_(bucket_floats(bucket_bytes)) {
  for (const StageBinding& binding : stages) {
    stages_.emplace_back(*this, binding.index, binding.parameters);
  }
  open_.reserve(load_of(stages, bucket_bytes).count);
}

SumLoad BucketedSums::load_of(std::span<const StageBinding> stages, std::size_t bucket_bytes) {
  std::vector<std::size_t> floats;
  for (const StageBinding& binding : stages) floats.push_back(gradients_of(binding).size());
  return load_of(floats, bucket_bytes);
}

SumLoad BucketedSums::load_of(std::span<const std::size_t> floats, std::size_t bucket_bytes) {
  const std::size_t bucket = bucket_floats(bucket_bytes);
  SumLoad load;
  for (const std::size_t count : floats) {
    load.largest = std::max(load.largest, std::min(bucket, count));
    load.count += (count + bucket - 1) / bucket;
    if (count >= bucket) load.sizes.push_back(bucket);
    if (count % bucket > 0) load.sizes.push_back(count % bucket);
  }
  std::sort(load.sizes.begin(), load.sizes.end());
  load.sizes.erase(std::unique(load.sizes.begin(), load.sizes.end()), load.sizes.end());
  return load;
}

FinalGradients* BucketedSums::final_gradients(int stage) {
  const auto found = std::find_if(stages_.begin(), stages_.end(),
                                  [&](const StageSum& sum) { return sum.stage() == stage; });
  return found == stages_.end() ? nullptr : &*found;
}

void BucketedSums::finish(int stage) {
  if (FinalGradients* sum = final_gradients(stage)) sum->from(0);
}

void BucketedSums::wait_all_on_stream() {
  for (NcclTicket& ticket : open_) nccl_.wait_on_stream(ticket);
  open_.clear();
  for (StageSum& sum : stages_) sum.begin_step();
}

BucketedSums::StageSum::StageSum(BucketedSums& sums, int stage, ParameterSet* parameters)
    : sums_(sums), stage_(stage), parameters_(parameters) {
  if (parameters != nullptr) gradients_ = parameters->flat_grads();
  begin_step();
}

void BucketedSums::StageSum::from(std::size_t begin) {
  if (parameters_ != nullptr) parameters_->settle_grads(sums_.compute_.stream(), begin);
  while (left_ > 0) {
    const std::size_t next = left_ - std::min(left_, sums_.bucket_);
    if (next < begin) break;
    sums_.open_.push_back(sums_.nccl_.sum(gradients_.subspan(next, left_ - next)));
    left_ = next;
  }
  sums_.nccl_.progress();
}

}  // namespace sluice
