#include "runtime/gradients/micro_batch_sums.hpp"

#include <algorithm>
#include <utility>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/device/host_pages.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

Tensor tensor_of(std::span<float> floats) {
  return {floats.data(), {DType::kF32, Shape{std::ssize(floats)}}};
}

}  // namespace

MicroBatchSums::MicroBatchSums(HostSums& sums, const JobLayout& layout, NcclRoutes* nccl,
                               ComputeContext& compute, HostMirror& mirror,
                               std::span<const StageBinding> stages, std::size_t bucket_bytes)
    : host_(sums),
      nccl_(nccl),
      compute_(compute),
      mirror_(mirror),
      part_of_replica_(layout.place.shard_groups.parts()) {
  std::size_t most = 0;
  for (const StageBinding& each : stages) {
    most = std::max(most, stages_.emplace_back(*this, layout, each, bucket_bytes).most_floats());
  }
  if (on_gpu() && nccl == nullptr) mirror_.reserve(most * sizeof(float));
}

MicroBatchSums::StageSums* MicroBatchSums::find(int stage) {
  const auto found = std::ranges::find(stages_, stage, &StageSums::stage);
  return found == stages_.end() ? nullptr : &*found;
}

FinalGradients* MicroBatchSums::begin(int stage) {
  for (StageSums& each : stages_) each.take();
  StageSums* const sums = find(stage);
  if (sums != nullptr) sums->begin();
  return sums;
}

void MicroBatchSums::end(int stage) {
  if (StageSums* const sums = find(stage)) sums->from(0);
}

void MicroBatchSums::reduce(int stage) {
  if (StageSums* const sums = find(stage)) sums->reduce();
}

void MicroBatchSums::end_sum(int stage) {
  if (StageSums* const sums = find(stage)) sums->end_sum();
}

void MicroBatchSums::clear() {
  for (StageSums& each : stages_) each.clear();
}

MicroBatchSums::StageSums::StageSums(MicroBatchSums& sums, const JobLayout& layout,
                                     const StageBinding& binding, std::size_t bucket_bytes)
    : sums_(sums), stage_(binding.index), parameters_(*binding.parameters) {
  const std::span<float> flat = parameters_.flat_grads();
  std::size_t floats = 0;
  int unit = 0;
  for (std::vector<CutRange>& ranges : unit_ranges_of(layout.parameters.stages[at(stage_)])) {
    for (CutRange& range : ranges) {
      const CutRange own = range.of(layout.place.here.replica);
      floats += own.size();
      Part& part = parts_.emplace_back(Part{.unit = unit,
                                            .range = flat.subspan(range.begin, range.size()),
                                            .ends = {},
                                            .own = flat.subspan(own.begin, own.size()),
                                            .sum = {},
                                            .buckets = {}});
      if (sums.nccl_ != nullptr)
        part.buckets = part_buckets({&range, 1}, bucket_floats(bucket_bytes));
      part.nccl_tickets.reserve(part.buckets.size());
      part.ends = std::move(range.ends);
    }
    ++unit;
  }
  memory_ = sums.compute_.memory().allocate(floats * sizeof(float));
  auto* next = reinterpret_cast<float*>(memory_.data());
  for (Part& each : parts_) {
    each.sum = {next, each.own.size()};
    next += each.own.size();
  }
  if (sums.on_gpu()) find_padding();
}

// On a GPU other replicas' parts have there what another unit left.
void MicroBatchSums::StageSums::find_padding() {
  for (const Parameter* each : parameters_.all()) {
    float* const begin = each->grad.as<float>();
    const auto elements = static_cast<std::size_t>(each->shape.elements());
    const std::size_t padded = parameter_bytes(each->shape.elements()) / sizeof(float);
    for (const Part& part : parts_) {
      float* const from = std::max(begin + elements, part.own.data());
      float* const to = std::min(begin + padded, part.own.data() + part.own.size());
      if (from < to) padding_.emplace_back(from, to);
    }
  }
}

std::size_t MicroBatchSums::StageSums::most_floats() const {
  std::size_t most = 0;
  for (const Part& each : parts_) most = std::max(most, each.range.size());
  return most;
}

void MicroBatchSums::StageSums::begin() {
  GradientAccess::set_stale(parameters_, true);
  next_ = taken_ = parts_.size();
  first_ = !std::exchange(begun_, true);
}

void MicroBatchSums::StageSums::from(std::size_t begin) {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream(), begin);
  const float* const place = parameters_.flat_grads().data() + begin;
  const std::size_t before = next_;
  for (; next_ > 0 && parts_[next_ - 1].range.data() >= place; --next_) {
    const int unit = parts_[next_ - 1].unit;
    if (sums_.on_gpu() && unit != parts_[before - 1].unit) {  // a third one has overwritten it
      throw_usage(
          "stage {} tells of the gradients of two of its units at once; legal: of each, before it "
          "writes those of the next (StageDescription::uses_units)",
          stage_);
    }
    start(parts_[next_ - 1]);
  }
  take(before);
}

void MicroBatchSums::StageSums::start(Part& part) {
  if (sums_.nccl_ != nullptr) {
    const std::span<float> flat = parameters_.flat_grads();
    for (const GradientBucket& each : part.buckets) {
      part.nccl_tickets.push_back(sums_.nccl_->reduce_scatter(flat, each.pieces));
    }
    return;
  }
  const std::span<float> host = sums_.mirror_.read_back(part.range);
  part.ticket =
      sums_.host_.start_reduce_scatter(host, part.ends, sums_.mirror_.owner(parameters_.memory()),
                                       /*ended=*/nullptr, sums_.part_of_replica_);
  if (!sums_.on_gpu()) return;
  sums_.host_.wait(part.ticket);
  sums_.mirror_.write_back();
}

void MicroBatchSums::StageSums::wait(Part& part) {
  for (NcclTicket& each : part.nccl_tickets) sums_.nccl_->wait_on_stream(each);
  part.nccl_tickets.clear();
  sums_.host_.wait(part.ticket);
}

void MicroBatchSums::StageSums::take() { take(next_); }

void MicroBatchSums::StageSums::take(std::size_t first) {
  for (; taken_ > first; --taken_) {
    Part& part = parts_[taken_ - 1];
    wait(part);
    if (first_) {
      copy_async(part.sum.data(), part.own.data(), part.own.size_bytes(), sums_.compute_.stream());
    } else {
      add(sums_.compute_, tensor_of(part.own), tensor_of(part.sum));
    }
    give_back(part.range);
  }
}

void MicroBatchSums::StageSums::give_back(std::span<float> floats) const {
  if (!sums_.on_gpu()) give_back_pages(std::as_writable_bytes(floats));
}

// What is written may bring back a huge page, which has more than the own part.
void MicroBatchSums::StageSums::end_sum() {
  if (!std::exchange(reduces_, false)) return;
  take();
  const auto give_back_others = [&](const Part& part) {
    const auto before = static_cast<std::size_t>(part.own.data() - part.range.data());
    give_back(part.range.first(before));
    give_back(part.range.subspan(before + part.own.size()));
  };
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    copy_async(part.own.data(), part.sum.data(), part.own.size_bytes(), sums_.compute_.stream());
    give_back(part.sum);
    if (i > 0) give_back_others(parts_[i - 1]);
    give_back_others(part);
  }
  for (const std::span<float> each : padding_) {
    fill_zero_async(each.data(), each.size_bytes(), sums_.compute_.stream());
  }
}

void MicroBatchSums::StageSums::clear() {
  take();
  begun_ = reduces_ = false;
  for (const Part& part : parts_) give_back(part.range);
}

}  // namespace sluice
