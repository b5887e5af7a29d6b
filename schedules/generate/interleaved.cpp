// Interleaved 1F1B (Narayanan et al., 2021, arXiv:2104.04473): v chunks per rank over looped
// placement; groups of micro-batches pass chunk by chunk, and rank r forwards
// (v - 1)g + 2(p - 1 - r) chunks ahead, g the first group's size. Times of one chunk: from m = p on
// (mv + p - 1)(F + B), below (m + pv - 1)(F + B).
//
// Groups are floor(m / p) of nearly equal size, larger ones first: any m >= p is served, where the
// paper asks for a multiple of p. A larger last group or a small remainder would deadlock. Fewer
// than p micro-batches run the schedule for p without those that are not there.
//
// interleaved, p = 2, m = 4, v = 2:
//
//   rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
//   rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
//
// interleaved-zb: the same order with I and W split, as PyTorch's ScheduleInterleavedZeroBubble has
// it. Rank r forwards (v - 1)g + p - 1 - r chunks ahead, and W runs r chunks after I. With one
// chunk this is zb-h1. Where F = I = W, each rank idles p - 1 units for any m >= p. A rank holds at
// most (v - 1)g + p chunks, pv where p divides m. p = 2, m = 2, v = 2:
//
//   rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
//   rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
#include <algorithm>

#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {
namespace {

// Groups of at least p micro-batches, in each group chunk by chunk: forwards from the first chunk
// on, backwards from the last one on. Rank r forwards k(p - 1 - r) chunks ahead within the group.
Schedule by_groups(std::string_view name, const ScheduleShape& shape, int k, bool split) {
  const int p = shape.ranks, v = shape.chunks;
  const int m = std::max(shape.micro_batches, p);
  Schedule schedule = empty_schedule(name, Placement::looped(p, v), m, (split ? 3 : 2) * v * m);
  const std::vector<MicroBatchGroup> groups = groups_of(m, p);
  std::vector<StageMicroBatch> forwards, backwards;  // of rank 0; rank r has stages r higher
  for (const MicroBatchGroup& group : groups) {
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int i = group.begin; i < group.end; ++i) {
        forwards.push_back({chunk * p, i});
        backwards.push_back({(v - 1 - chunk) * p, i});
      }
    }
  }
  for (int rank = 0; rank < p; ++rank) {
    const auto nth = [rank](const std::vector<StageMicroBatch>& order) {
      return [rank, &order](int i) {
        return StageMicroBatch{order[at(i)].stage + rank, order[at(i)].micro_batch};
      };
    };
    const int ahead = (v - 1) * groups.front().end + k * (p - 1 - rank);
    append_alternating(schedule, {v * m, ahead, split, rank}, nth(forwards), nth(backwards));
  }
  // Fewer than p micro-batches run the schedule for p; the surplus ones are removed.
  schedule.micro_batches = shape.micro_batches;
  for (std::vector<Step>& steps : schedule.ranks) {
    std::erase_if(steps,
                  [&](const Step& step) { return step.action.micro_batch >= shape.micro_batches; });
  }
  return schedule;
}

}  // namespace

Schedule interleaved(const ScheduleShape& shape) {
  return by_groups("interleaved", shape, 2, false);
}

Schedule interleaved_zb(const ScheduleShape& shape) {
  return by_groups("interleaved-zb", shape, 1, true);
}

}  // namespace sluice::generators
