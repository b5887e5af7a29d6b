#include "runtime/gradients/micro_batch_sums.hpp"

#include <algorithm>
#include <utility>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "comm/device/host_pages.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

Tensor tensor_of(std::span<float> floats) {
  return {floats.data(), {DType::kF32, Shape{std::ssize(floats)}}};
}

void give_back(std::span<float> floats) { give_back_pages(std::as_writable_bytes(floats)); }

}  // namespace

MicroBatchSums::MicroBatchSums(HostSums& sums, const JobLayout& layout, ComputeContext& compute,
                               std::span<const StageBinding> stages)
    : host_(sums), compute_(compute) {
  for (const StageBinding& each : stages) stages_.emplace_back(*this, layout, each);
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
                                     const StageBinding& binding)
    : sums_(sums), stage_(binding.index), parameters_(*binding.parameters) {
  const std::span<float> flat = parameters_.flat_grads();
  std::size_t floats = 0;
  for (CutRange& range : ranges_of(layout.parameters.stages[at(stage_)])) {
    const CutRange own = range.of(layout.place.here.replica);
    floats += own.ends.back();
    parts_.push_back({.range = flat.subspan(range.begin, range.ends.back()),
                      .ends = std::move(range.ends),
                      .own = flat.subspan(own.begin, own.ends.back()),
                      .sum = {}});
  }
  memory_ = sums.compute_.memory().allocate(floats * sizeof(float));
  auto* next = reinterpret_cast<float*>(memory_.data());
  for (Part& each : parts_) {
    each.sum = {next, each.own.size()};
    next += each.own.size();
  }
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
  const HostSums::Ticket earlier = ticket_;
  for (; next_ > 0 && parts_[next_ - 1].range.data() >= place; --next_) {
    const Part& part = parts_[next_ - 1];
    ticket_ = sums_.host_.start_reduce_scatter(part.range, part.ends, parameters_.memory());
  }
  sums_.host_.wait(earlier);
  take(before);
}

void MicroBatchSums::StageSums::take() {
  sums_.host_.wait(ticket_);
  take(next_);
}

void MicroBatchSums::StageSums::take(std::size_t first) {
  for (; taken_ > first; --taken_) {
    const Part& part = parts_[taken_ - 1];
    if (first_) {
      copy_async(part.sum.data(), part.own.data(), part.own.size_bytes(), sums_.compute_.stream());
    } else {
      add(sums_.compute_, tensor_of(part.own), tensor_of(part.sum));
    }
    give_back(part.range);
  }
}

// What is written may bring back a huge page, which has more than the own part.
void MicroBatchSums::StageSums::end_sum() {
  if (!std::exchange(reduces_, false)) return;
  take();
  const auto give_back_others = [](const Part& part) {
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
}

void MicroBatchSums::StageSums::clear() {
  take();
  begun_ = reduces_ = false;
  for (const Part& part : parts_) give_back(part.range);
}

}  // namespace sluice
