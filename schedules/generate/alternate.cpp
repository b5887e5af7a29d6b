#include "schedules/generate/alternate.hpp"

#include <algorithm>

#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {

void append_alternating(Schedule& schedule, const AlternatingRank& rank) {
  const auto add = [&](ActionKind kind, const StageMicroBatch& of) {
    append(schedule, kind, of.stage, of.micro_batch);
  };
  const std::size_t count = rank.forwards.size();
  const std::size_t ahead = std::min(at(rank.ahead), count);
  const std::size_t trail = std::min(at(rank.trail), count);
  for (std::size_t i = 0; i < ahead; ++i) add(ActionKind::kForward, rank.forwards[i]);
  for (std::size_t i = 0; i < count; ++i) {
    if (ahead + i < count) add(ActionKind::kForward, rank.forwards[ahead + i]);
    if (!rank.split) {
      add(ActionKind::kBackward, rank.backwards[i]);
      continue;
    }
    add(ActionKind::kBackwardInput, rank.backwards[i]);
    if (i >= trail) add(ActionKind::kBackwardWeight, rank.backwards[i - trail]);
  }
  if (!rank.split) return;
  for (std::size_t i = count - trail; i < count; ++i) {
    add(ActionKind::kBackwardWeight, rank.backwards[i]);
  }
}

std::vector<StageMicroBatch> ascending(int stage, int micro_batches) {
  std::vector<StageMicroBatch> order;
  order.reserve(at(micro_batches));
  for (int i = 0; i < micro_batches; ++i) order.push_back({stage, i});
  return order;
}

AlternatingRank interleaved_rank(const ScheduleShape& shape, int rank) {
  AlternatingRank result;
  const auto size = at(shape.chunks) * at(shape.micro_batches);
  result.forwards.reserve(size);
  result.backwards.reserve(size);
  for (const MicroBatchGroup& group : groups_of(shape.micro_batches, shape.ranks)) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      for (int i = group.begin; i < group.end; ++i) {
        result.forwards.push_back({chunk * shape.ranks + rank, i});
        result.backwards.push_back({(shape.chunks - 1 - chunk) * shape.ranks + rank, i});
      }
    }
  }
  return result;
}

void drop_from(Schedule& schedule, int micro_batches) {
  schedule.micro_batches = micro_batches;
  for (std::vector<Step>& steps : schedule.ranks) {
    std::erase_if(steps,
                  [&](const Step& step) { return step.action.micro_batch >= micro_batches; });
  }
}

}  // namespace sluice::generators
