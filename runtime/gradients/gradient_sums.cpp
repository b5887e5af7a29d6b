#include "runtime/gradients/gradient_sums.hpp"

#include <algorithm>
#include <utility>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/device/host_pages.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 60;  // one bucket for everything

// On the host: small enough that the sum of the first is under way soon, large enough that its
// messages' latency is a small part of it.
constexpr std::size_t kMostHostBytes = std::size_t{1} << 20;

std::size_t floats_of(const StageEntry& stage) {
  std::size_t bytes = 0;
  for (const ParameterEntry& each : stage.parameters) {
    add_bytes(bytes, parameter_bytes(each.elements));
  }
  return bytes / sizeof(float);
}

// Empty where no parameter is updated in parts.
std::vector<CutRange> ranges_in(const JobLayout& layout, int stage) {
  if (layout.place.topology.size.replica == 1) return {};
  return ranges_of(layout.parameters.stages[at(stage)]);
}

// Of `floats` gradients, from their end on.
std::vector<GradientBucket> whole_buckets(std::size_t floats, std::size_t bucket) {
  std::vector<GradientBucket> buckets;
  for (std::size_t end = floats; end > 0; end = buckets.back().begin) {
    const std::size_t size = std::min(end, bucket);
    buckets.push_back({end - size, {{end - size, size}}});
  }
  return buckets;
}

// As replicas add them.
std::vector<GradientBucket> part_buckets_in(const JobLayout& layout, int stage,
                                            std::size_t bucket) {
  if (!layout.parameters.sums_each_micro_batch) {
    return part_buckets(ranges_in(layout, stage), bucket);
  }
  std::vector<GradientBucket> all;
  for (const auto& unit : unit_ranges_of(layout.parameters.stages[at(stage)])) {
    for (GradientBucket& each : part_buckets(unit, bucket)) all.push_back(std::move(each));
  }
  return all;
}

}  // namespace

std::size_t bucket_floats(std::size_t bucket_bytes) {
  return round_up(std::clamp(bucket_bytes, std::size_t{1}, kMost), kBufferAlignment) /
         sizeof(float);
}

std::vector<GradientBucket> part_buckets(std::span<const CutRange> ranges, std::size_t bucket) {
  std::vector<GradientBucket> buckets;
  for (; !ranges.empty(); ranges = ranges.first(ranges.size() - 1)) {
    const CutRange& range = ranges.back();
    const std::size_t count = (range.size() + bucket - 1) / bucket;
    for (std::size_t i = 0; i < count; ++i) {
      GradientBucket& made = buckets.emplace_back(GradientBucket{range.begin, {}});
      for (int replica = 0; replica < std::ssize(range.ends); ++replica) {
        const CutRange own = range.of(replica);
        const std::size_t most =
            round_up((own.size() + count - 1) / count, NcclSums::kPieceMultiple);
        const std::size_t from = std::min(own.begin + i * most, own.end());
        made.pieces.push_back({from, std::min(most, own.end() - from)});
      }
    }
  }
  return buckets;
}

GradientSums::GradientSums(JobContext& job, const JobLayout& layout, NcclRoutes* nccl,
                           ComputeContext& compute, HostMirror& mirror,
                           std::span<const StageBinding> stages, std::size_t bucket_bytes)
    : host_(job.group(Axis::kReplica).collectives->sums()),
      at_rest_(layout.parameters.gather != Gather::kNever),
      part_of_replica_(layout.place.shard_groups.parts()),
      copies_(at_rest_ ? layout.place.shard_groups.copies_of(layout.place.here.replica)
                       : std::vector<int>()),
      gathers_(copies_.size() > 1 ? job.copies().collectives->gathers() : host_),
      nccl_(nccl),
      compute_(compute),
      mirror_(mirror),
      overlaps_(layout.wires.sums_overlap(layout.place.here.pipeline)),
      bucket_(
          bucket_floats(nccl != nullptr ? bucket_bytes : std::min(bucket_bytes, kMostHostBytes))) {
  std::size_t largest = 0, calls = 1;  // of a stage's own collectives
  for (const StageBinding& binding : stages) {
    const StageSum& sum = stages_.emplace_back(*this, layout, binding);
    largest = std::max(largest, binding.parameters->flat_grads().size());
    calls += std::max(sum.whole_buckets_.all.size(), sum.part_buckets_.all.size());
  }
  if (nccl_ == nullptr) {
    host_.reserve(largest, calls);
    gathers_.reserve(0, calls);
  } else {
    open_.reserve(load_of(layout, layout.place.here.pipeline, bucket_bytes).count);
  }
}

// A step makes whole sums, or those of parts and then as many gathers.
SumLoad GradientSums::load_of(const JobLayout& layout, int rank, std::size_t bucket_bytes) {
  const std::size_t bucket = bucket_floats(bucket_bytes);
  SumLoad load;
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    const auto whole = whole_buckets(floats_of(layout.parameters.stages[at(stage)]), bucket);
    const auto parts = part_buckets_in(layout, stage, bucket);
    load.count += std::max(whole.size(), parts.size());
    for (const GradientBucket& each : whole) {
      load.sizes.push_back(each.pieces.front().size);
      load.largest = std::max(load.largest, load.sizes.back());
    }
    for (const GradientBucket& each : parts) {
      for (const NcclSums::Piece& piece : each.pieces) {
        load.largest_piece = std::max(load.largest_piece, piece.size);
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
  StageSum* const sum = overlaps_ ? find(stage) : nullptr;
  return sum != nullptr ? &sum->with(whole) : nullptr;
}

void GradientSums::finish(int stage, bool whole) {
  StageSum* const sum = find(stage);
  if (sum == nullptr) return;
  sum->joined_ = true;
  sum->with(whole).from(0);
  if (nccl_ != nullptr) return;
  if (overlaps_) return host_.progress();
  host_.wait(last_);
  mirror_.write_back();
}

std::optional<TimeSpan> GradientSums::end(int stage) {
  StageSum* const sum = find(stage);
  if (sum == nullptr || !sum->joined_ || sum->started_ == 0) return std::nullopt;
  host_.wait(sum->last_);
  if (sum->keeps_parts_ && !sum->whole_) sum->give_back_others();
  return TimeSpan{std::exchange(sum->started_, 0), sum->ended_};
}

void GradientSums::wait_all_on_stream() {
  for (NcclTicket& ticket : open_) nccl_->wait_on_stream(ticket);
  open_.clear();
  host_.wait(last_);
  gathers_.wait(last_gather_);
  for (StageSum& sum : stages_) sum.begin_step();
}

void GradientSums::gather_values() {
  if (at_rest_ && copies_.size() == 1) return;  // nobody else has them
  for (StageSum& sum : stages_) sum.gather_values();
  wait_all_on_stream();
}

GradientSums::StageSum::StageSum(GradientSums& sums, const JobLayout& layout,
                                 const StageBinding& binding)
    : sums_(sums),
      stage_(binding.index),
      parameters_(*binding.parameters),
      cut_(layout.parameters.cut),
      keeps_parts_(layout.parameters.gradients_in_parts),
      replica_(layout.place.here.replica),
      ranges_(ranges_in(layout, stage_)),
      whole_buckets_(in_order(whole_buckets(parameters_.flat_grads().size(), sums.bucket_))),
      part_buckets_(in_order(part_buckets(ranges_, sums.nccl_ != nullptr ? sums.bucket_ : kMost))) {
}

GradientSums::StageSum::Buckets GradientSums::StageSum::in_order(
    std::vector<GradientBucket> buckets) const {
  const float* const flat = parameters_.flat_grads().data();
  std::vector<NcclSums::Piece> shared;  // gradients that have shares
  for (const Parameter* each : parameters_.all()) {
    if (each->share_grads.empty()) continue;
    shared.push_back({static_cast<std::size_t>(each->grad.as<const float>() - flat),
                      static_cast<std::size_t>(each->shape.elements())});
  }
  const auto has_none = [&](const GradientBucket& bucket) {
    return std::ranges::none_of(bucket.pieces, [&](const NcclSums::Piece& piece) {
      return std::ranges::any_of(shared, [&](const NcclSums::Piece& each) {
        return each.begin < piece.begin + piece.size && piece.begin < each.begin + each.size;
      });
    });
  };
  const auto held = std::stable_partition(buckets.begin(), buckets.end(), has_none);
  const auto early = static_cast<std::size_t>(held - buckets.begin());
  return {std::move(buckets), early};
}

void GradientSums::StageSum::from(std::size_t begin) {
  GradientAccess::zero_stale(parameters_, sums_.compute_.stream(), begin, joined_);
  std::span<float> grads = parameters_.flat_grads();
  if (sums_.nccl_ == nullptr) grads = sums_.mirror_.read_back(grads);
  const std::vector<GradientBucket>& all = buckets().all;
  const std::size_t end = joined_ ? all.size() : buckets().early;
  for (; next_ < end && all[next_].begin >= begin; ++next_) start(all[next_], grads);
  if (sums_.nccl_ != nullptr) sums_.nccl_->progress();
}

void GradientSums::StageSum::start(const GradientBucket& bucket, std::span<float> grads) {
  const std::span<const NcclSums::Piece> pieces = bucket.pieces;
  const auto whole = [&] { return grads.subspan(pieces.front().begin, pieces.front().size); };
  if (sums_.nccl_ != nullptr) {
    sums_.open_.push_back(whole_ ? sums_.nccl_->sum(whole())
                                 : sums_.nccl_->reduce_scatter(grads, pieces));
    return;
  }
  const KeepAlive owner = sums_.mirror_.owner(parameters_.memory());
  if (next_ == 0) started_ = ended_ = steady_seconds();
  if (whole_) {
    last_ = sums_.host_.start_sum(whole(), owner, &ended_);
  } else {
    const CutRange& range = *std::ranges::find(ranges_, bucket.begin, &CutRange::begin);
    last_ = sums_.host_.start_reduce_scatter(grads.subspan(range.begin, range.size()), range.ends,
                                             owner, &ended_, sums_.part_of_replica_);
  }
  sums_.last_ = last_;
}

void GradientSums::StageSum::give_back_others() {
  const std::span<float> grads = parameters_.flat_grads();
  for (const CutRange& range : ranges_) {
    const CutRange own = range.of(replica_);
    give_back_pages(std::as_writable_bytes(grads.subspan(range.begin, own.begin - range.begin)));
    give_back_pages(std::as_writable_bytes(grads.subspan(own.end(), range.end() - own.end())));
  }
}

// An optimizer writes its part of the copies in bf16. They are not gathered but made again from the
// values, at the memory's speed; the values have to come anyway.
void GradientSums::StageSum::gather_values() {
  if (ranges_.empty()) return;
  const std::span<float> values = parameters_.flat_values();
  if (sums_.nccl_ != nullptr) {
    for (const GradientBucket& bucket : part_buckets_.all) {
      sums_.open_.push_back(sums_.nccl_->gather(values, bucket.pieces, sums_.copies_));
    }
  } else {
    const std::span<float> host = sums_.mirror_.read_back(values);
    for (const CutRange& range : ranges_) {
      const CutRange taken = sums_.at_rest_ ? range.at_rest(replica_) : range;
      sums_.last_gather_ =
          sums_.gathers_.start_gather(host.subspan(taken.begin, taken.size()), taken.ends,
                                      sums_.mirror_.owner(parameters_.memory()));
    }
    if (!sums_.overlaps_) {
      sums_.gathers_.wait(sums_.last_gather_);
      sums_.mirror_.write_back();
    }
  }
  parameters_.mark_values_changed();
}

}  // namespace sluice
