#include "runtime/gradients/step_record.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "stages/compute/call_arguments.hpp"

namespace sluice {
namespace {

constexpr std::size_t kFirstLoss = 5;  // index in a record

// Doubles in a record for a part of a shard: one where all its blocks are here, which the rank adds
// as rank 0 would.
std::size_t doubles_of(const ElementRange& part, const ElementRange& shard) {
  const auto blocks = static_cast<std::size_t>(sum_blocks(part.count));
  return part.count == shard.count ? std::min(blocks, std::size_t{1}) : blocks;
}

void check(StepTotals& totals, double value, double index, double is_loss) {
  if (std::isfinite(value) || totals.finite == 0) return;
  totals.finite = 0;
  totals.first_nonfinite_index = index;
  totals.nonfinite_is_loss = is_loss;
}

}  // namespace

Error StepState::refusal(const JobLayout& layout) const {
  if (totals.other_rate_rank >= 0) {
    return {ErrorCode::kMismatch,
            fmt::format("ranks disagree about the learning rate of step {}: rank 0 has {}, rank {} "
                        "has {}; no parameter was changed",
                        number, totals.rate, totals.other_rate_rank, totals.other_rate),
            static_cast<int>(totals.other_rate_rank)};
  }
  if (totals.finite != 0) {
    return {ErrorCode::kData, fmt::format("step {} has no target that counts", number), 0};
  }
  auto index = static_cast<std::size_t>(std::max(totals.first_nonfinite_index, 0.0));
  std::string what;
  if (totals.first_nonfinite_index < 0) {
    what = fmt::format("the {} of step {} over {} targets is not finite",
                       totals.nonfinite_is_loss != 0 ? "mean loss" : "norm of the mean gradient",
                       number, totals.targets);
  } else if (totals.nonfinite_is_loss != 0) {
    const std::size_t each = at(micro_batches / layout.place.shares);
    what = fmt::format("the loss of step {} is not finite, first in micro-batch {} of {} {}",
                       number, index % each, layout.place.name_of_part(), index / each);
  } else {
    auto stage = layout.parameters.stages.begin();
    for (; index >= stage->parameters.size(); ++stage) index -= stage->parameters.size();
    what = fmt::format("the gradient of step {} is not finite, first in parameter '{}'", number,
                       stage->parameters[index].name);
  }
  return {ErrorCode::kNumeric,
          what +
              "; no parameter was changed (a smaller learning rate or a bound on the "
              "gradient's norm may help, where the data has no such number)",
          0};
}

std::vector<ElementRange> RecordExchange::squared_parts(const ParameterEntry& entry, int replica) {
  std::vector<ElementRange> parts = entry.shards();
  const bool none = entry.ends.empty() && replica > 0;
  for (ElementRange& part : parts) {
    part = none ? ElementRange{} : common_part(part, entry.part(replica));
  }
  return parts;
}

RecordExchange::RecordExchange(JobContext& job, const JobLayout& layout,
                               const PipelineOptions& options)
    : job_(job),
      layout_(layout),
      rate_(options.training.learning_rate),
      losses_(2 * at(options.shape.micro_batches) * at(layout.place.shares)) {
  const Topology& topology = layout_.place.topology;
  std::vector<std::size_t> sizes(at(topology.ranks()));  // of records
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    sizes[at(rank)] = first_square(topology.place_of(rank).pipeline);
  }
  list_squares();
  for (ShardSquares& shard : shards_) {
    for (shard.place.replica = 0; const std::size_t doubles : shard.doubles) {
      sizes[at(topology.rank_of(shard.place))] += doubles;
      ++shard.place.replica;
    }
  }
  std::size_t end = 0;
  for (const std::size_t size : sizes) ends_.push_back(end += size * sizeof(double));
  mine_.resize(sizes[at(job_.world.ranks->rank())]);
  if (job_.world.ranks->rank() != 0) return;
  all_.resize(end / sizeof(double));
  peaks_.resize(at(topology.size.pipeline));
  next_.resize(sizes.size());
  busy_.resize(sizes.size());
}

void RecordExchange::list_squares() {
  const Place& here = layout_.place.here;
  const AxisSizes& size = layout_.place.topology.size;
  double number = 0;
  for (int s = 0; s < layout_.plans.num_stages(); ++s) {
    const int rank = layout_.plans.placement().rank_of(s);
    for (std::size_t i = 0; i < layout_.parameters.stages[at(s)].parameters.size(); ++i, ++number) {
      if (!layout_.parameters.is_owner(s, static_cast<int>(i))) continue;
      for (int t = 0; t < size.tensor; ++t) {
        const ParameterEntry& entry = layout_.parameters_at(t).stages[at(s)].parameters[i];
        const std::vector<ElementRange> shards = entry.shards();
        for (std::size_t shard = 0; shard < shards.size(); ++shard) {
          ShardSquares& added = shards_.emplace_back(
              ShardSquares{.place = {.pipeline = rank, .tensor = t},
                           .parameter = number,
                           .counts = t == 0 || !entry.slice.all(),
                           .last = t + 1 == size.tensor && shard + 1 == shards.size()});
          for (int r = 0; r < size.replica; ++r) {
            const ElementRange part = squared_parts(entry, r)[shard];
            added.doubles.push_back(doubles_of(part, shards[shard]));
            if (here.pipeline != rank || here.tensor != t || here.replica != r) continue;
            packed_.push_back({sum_blocks(part.count), part.count == shards[shard].count});
          }
        }
      }
    }
  }
}

void RecordExchange::exchange(StepState& step, const StepOutcome& outcome,
                              std::span<const double> squares) {
  pack(step, outcome, squares);
  job_.world.collectives->gather(std::as_bytes(std::span(mine_)), ends_,
                                 std::as_writable_bytes(std::span(all_)), 0);
  if (job_.world.ranks->rank() == 0) reduce(step);
  job_.world.collectives->broadcast(object_bytes(step.totals), 0);
}

void RecordExchange::pack(const StepState& step, const StepOutcome& outcome,
                          std::span<const double> squares) {
  std::fill(mine_.begin(), mine_.end(), 0.0);
  for (std::size_t i = 0; i < outcome.losses.size(); ++i) {
    mine_[kFirstLoss + 2 * i] = outcome.losses[i].sum;
    mine_[kFirstLoss + 2 * i + 1] = outcome.losses[i].weight;
  }
  if (!squares.empty()) pack_squares(squares.data());
  mine_[0] = steady_seconds() - step.started;
  mine_[1] = outcome.busy_seconds;
  mine_[2] = outcome.peak_in_flight;
  mine_[3] = flags_ ? flags_() : 0;
  mine_[4] = rate_.at(step.number);
}

void RecordExchange::pack_squares(const double* from) {
  double* to = &mine_[first_square(layout_.place.here.pipeline)];
  for (const auto& [blocks, whole] : packed_) {
    const double* const end = from + blocks;
    if (whole && blocks > 0) {
      *to++ = std::accumulate(from, end, 0.0);
    } else {
      to = std::copy(from, end, to);
    }
    from = end;
  }
}

const double* RecordExchange::record(int rank) const {
  return &all_[rank == 0 ? 0 : ends_[at(rank) - 1] / sizeof(double)];
}

const double* RecordExchange::record(int replica, int pipeline_rank) const {
  return record(layout_.place.topology.rank_of({.pipeline = pipeline_rank, .replica = replica}));
}

std::size_t RecordExchange::first_square(int pipeline_rank) const {
  return kFirstLoss + (pipeline_rank == layout_.plans.last_rank() ? losses_ : 0);
}

// On rank 0. Losses are added in order of batch, virtual replica and micro-batch, whatever the
// number of the step's batches, squares in order of blocks within a slice or a shard, then of these
// within a parameter, then of stage and parameter: neither order depends on the placement or the
// replicas' parts.
void RecordExchange::reduce(StepState& step) {
  reduce_losses(step);
  reduce_squares(step.totals);
  reduce_ranks(step.totals);
}

void RecordExchange::reduce_losses(StepState& step) const {
  StepTotals& totals = step.totals;
  totals.loss_sum = step.earlier.loss_sum;
  totals.targets = step.earlier.targets;
  for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
    const double* const losses = record(r, layout_.plans.last_rank()) + kFirstLoss;
    for (int m = 0; m < step.micro_batches; ++m) {
      check(totals, losses[2 * m], r * step.micro_batches + m, 1);
      totals.loss_sum += losses[2 * m];
      totals.targets += losses[2 * m + 1];
    }
  }
}

void RecordExchange::reduce_squares(StepTotals& totals) {
  const Topology& topology = layout_.place.topology;
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    next_[at(rank)] = record(rank) + first_square(topology.place_of(rank).pipeline);
  }
  double squares = 0, square = 0;
  for (const ShardSquares& shard : shards_) {
    Place place = shard.place;
    double sum = 0;
    for (int part = 0; part < topology.size.replica; ++part) {
      place.replica = layout_.place.shard_groups.replica_of(part);
      const double*& next = next_[at(topology.rank_of(place))];
      const double* const end = next + shard.doubles[at(place.replica)];
      sum = std::accumulate(next, end, sum);
      next = end;
    }
    check(totals, sum, shard.parameter, 0);
    if (shard.counts) square += sum;
    if (shard.last) squares += std::exchange(square, 0);
  }
  totals.grad_norm = std::sqrt(squares);
}

void RecordExchange::reduce_ranks(StepTotals& totals) {
  std::uint32_t flags = 0;
  for (int rank = 0; rank < job_.world.ranks->size(); ++rank) {
    const double* const values = record(rank);
    totals.window_seconds = std::max(totals.window_seconds, values[0]);
    totals.busy_seconds += values[1];
    busy_[at(rank)] = values[1];
    flags |= static_cast<std::uint32_t>(values[3]);
    if (values[4] == all_[4] || totals.other_rate_rank >= 0) continue;
    totals.other_rate_rank = rank;
    totals.rate = all_[4];
    totals.other_rate = values[4];
  }
  totals.flags = flags;
  for (int rank = 0; rank < layout_.place.topology.size.pipeline; ++rank) {
    peaks_[at(rank)] = static_cast<int>(record(0, rank)[2]);
  }
}

}  // namespace sluice
