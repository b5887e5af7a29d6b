// Forward only: evaluation and inference. Nothing is kept once a micro-batch has passed a stage;
// makespan (m + p - 1)F, with v chunks (mv + p - 1)F from m = p on and (m + pv - 1)F below.
//
// forward-only, p = 3, m = 4:
//
//   rank 0 | F0 F1 F2 F3
//   rank 1 |    F0 F1 F2 F3
//   rank 2 |       F0 F1 F2 F3
//
// Any placement: time runs in steps of one forward, and each rank takes the ready forward of the
// oldest group of micro-batches, there of the first stage. Each list is thus part of one order that
// respects every dependency, so none can deadlock. Groups bound what waits between two stages.
#include <functional>
#include <queue>
#include <tuple>

#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {
namespace {

struct ReadyForward {
  int group, stage, micro_batch;
  friend bool operator>(const ReadyForward& a, const ReadyForward& b) {
    return std::tie(a.group, a.stage, a.micro_batch) > std::tie(b.group, b.stage, b.micro_batch);
  }
};

using ReadyQueue = std::priority_queue<ReadyForward, std::vector<ReadyForward>, std::greater<>>;

}  // namespace

Schedule forward_only(const Placement& placement, int micro_batches) {
  Schedule schedule = empty_schedule("forward-only", placement, micro_batches, micro_batches);
  schedule.forward_only = true;
  std::vector<ReadyQueue> ready(at(placement.ranks()));
  const auto queue_of = [&](int stage) -> ReadyQueue& {
    return ready[at(placement.rank_of(stage))];
  };
  int group = 0;
  for (const MicroBatchGroup& each : groups_of(micro_batches, placement.ranks())) {
    for (int i = each.begin; i < each.end; ++i) queue_of(0).push({group, 0, i});
    ++group;
  }
  const int last = placement.stages() - 1;
  std::vector<ReadyForward> ran;
  for (int left = micro_batches; left > 0;) {
    ran.clear();
    for (ReadyQueue& queue : ready) {
      if (queue.empty()) continue;
      ran.push_back(queue.top());
      queue.pop();
    }
    for (const ReadyForward& each : ran) {
      append(schedule, ActionKind::kForward, each.stage, each.micro_batch);
      if (each.stage == last) {
        --left;
      } else {
        queue_of(each.stage + 1).push({each.group, each.stage + 1, each.micro_batch});
      }
    }
  }
  return schedule;
}

Schedule forward_only(const ScheduleShape& shape) {
  return forward_only(Placement::looped(shape.ranks, shape.chunks), shape.micro_batches);
}

}  // namespace sluice::generators
