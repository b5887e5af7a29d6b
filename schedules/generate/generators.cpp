#include "schedules/generate/generators.hpp"

#include <algorithm>

#include "schedules/generate/alternate.hpp"

namespace sluice::generators {

Schedule empty_linear(std::string_view name, const ScheduleShape& shape, int steps_per_rank) {
  return empty_schedule(name, Placement::linear(shape.ranks), shape.micro_batches, steps_per_rank);
}

Schedule alternating(std::string_view name, const ScheduleShape& shape, int k, bool split) {
  const int m = shape.micro_batches;
  Schedule schedule = empty_linear(name, shape, (split ? 3 : 2) * m);
  for (int stage = 0; stage < shape.ranks; ++stage) {
    const auto nth = [stage](int i) { return StageMicroBatch{stage, i}; };
    append_alternating(schedule, {m, k * (shape.ranks - 1 - stage), split, k * stage}, nth, nth);
  }
  return schedule;
}

std::vector<MicroBatchGroup> groups_of(int micro_batches, int smallest) {
  const int count = std::max(1, micro_batches / smallest);
  std::vector<MicroBatchGroup> groups;
  int begin = 0;
  for (int i = 0; i < count; ++i) {
    const int size = micro_batches / count + (i < micro_batches % count ? 1 : 0);
    groups.push_back({begin, begin + size});
    begin += size;
  }
  return groups;
}

}  // namespace sluice::generators
