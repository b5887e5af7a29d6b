// 1F1B (PipeDream-Flush: Narayanan et al., 2021, arXiv:2006.09503): stage s forwards
// min(p - 1 - s, m) micro-batches ahead, then alternates one forward and one backward, then drains.
// As fast as gpipe, (m + p - 1)(F + B), but stage s holds at most min(p - s, m) micro-batches.
//
// 1f1b, p = 4, m = 6:
//
//   rank 0 | F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
//   rank 1 |    F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2 |       F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
//   rank 3 |          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
//
// 1f1b-eager: stage s forwards twice as far ahead, min(2(p - 1 - s), m) micro-batches, so that
// messages travel while other micro-batches compute. As fast as 1f1b where messages take no time.
// With latency C up to (F + B) / 2 it loses 2(p - 1)C in all, where the loss of 1f1b grows with m.
// Stage s holds at most min(2p - 1 - 2s, m) micro-batches. p = 3, m = 6:
//
//   rank 0 | F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
//   rank 1 |    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
//
// Zero bubble, handcrafted (Qi et al., 2023, arXiv:2401.10241): the backward pass is split into I,
// which the previous stage waits for, and W, which no other stage needs. Stage s forwards
// k(p - 1 - s) micro-batches ahead, and W runs ks micro-batches after I.
//
// zb-h1, k = 1: holds min(p, m) micro-batches at most, as 1F1B does. Where F = I = W, the makespan
// is 3m + p - 1 from m = p on and 2(m + p - 1) + 1 below. p = 3, m = 5:
//
//   rank 0 | F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
//   rank 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
//   rank 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
//
// zb-h2, k = 2: from m = 2p - 1 on each rank's own span is 3m, without a bubble, and ranks hold
// 2p - 1 micro-batches at most. A step that ends with a barrier gains nothing over zb-h1 from
// that: the last rank still starts p - 1 forwards late. p = 3, m = 5:
//
//   rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
//   rank 1 |    F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
//   rank 2 |       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
//
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

#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {
namespace {

struct StageMicroBatch {
  int stage = 0, micro_batch = 0;
};

struct Alternation {
  int ahead = 1;       // rank r forwards ahead * (p - 1 - r) chunks ahead within its group
  bool split = false;  // backwards as I and W
  int trail = 0;       // on rank r, W runs trail * r chunks after I
};

// Some forwards ahead, then one forward and one backward in turn, then the remaining backwards:
// groups of at least p micro-batches, in each group chunk by chunk, forwards from the first chunk
// on, backwards from the last one on. Fewer than p micro-batches: as for p, the others left out.
Schedule alternating(std::string_view name, const ScheduleShape& shape, const Alternation& rule) {
  const int p = shape.ranks, v = shape.chunks;
  const std::vector<MicroBatchGroup> groups = groups_of(std::max(shape.micro_batches, p), p);
  const int count = v * groups.back().end;
  std::vector<StageMicroBatch> forwards, backwards;  // of rank 0; rank r has stages r higher
  for (const MicroBatchGroup& group : groups) {
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int i = group.begin; i < group.end; ++i) {
        forwards.push_back({chunk * p, i});
        backwards.push_back({(v - 1 - chunk) * p, i});
      }
    }
  }
  Schedule schedule = empty_schedule(name, Placement::looped(p, v), shape.micro_batches,
                                     (rule.split ? 3 : 2) * v * shape.micro_batches);
  for (int rank = 0; rank < p; ++rank) {
    const auto add = [&](ActionKind kind, const StageMicroBatch& of) {
      if (of.micro_batch >= shape.micro_batches) return;
      append(schedule, kind, of.stage + rank, of.micro_batch);
    };
    const int ahead = std::min((v - 1) * groups.front().end + rule.ahead * (p - 1 - rank), count);
    const int trail = std::min(rule.trail * rank, count);
    for (int i = 0; i < ahead; ++i) add(ActionKind::kForward, forwards[at(i)]);
    for (int i = 0; i < count; ++i) {
      if (ahead + i < count) add(ActionKind::kForward, forwards[at(ahead + i)]);
      add(rule.split ? ActionKind::kBackwardInput : ActionKind::kBackward, backwards[at(i)]);
      if (rule.split && i >= trail) add(ActionKind::kBackwardWeight, backwards[at(i - trail)]);
    }
    for (int i = count - trail; rule.split && i < count; ++i) {
      add(ActionKind::kBackwardWeight, backwards[at(i)]);
    }
  }
  return schedule;
}

}  // namespace

Schedule one_f_one_b(const ScheduleShape& shape) { return alternating("1f1b", shape, {}); }

Schedule one_f_one_b_eager(const ScheduleShape& shape) {
  return alternating("1f1b-eager", shape, {.ahead = 2});
}

Schedule zb_h1(const ScheduleShape& shape) {
  return alternating("zb-h1", shape, {.split = true, .trail = 1});
}

Schedule zb_h2(const ScheduleShape& shape) {
  return alternating("zb-h2", shape, {.ahead = 2, .split = true, .trail = 2});
}

Schedule interleaved(const ScheduleShape& shape) {
  return alternating("interleaved", shape, {.ahead = 2});
}

Schedule interleaved_zb(const ScheduleShape& shape) {
  return alternating("interleaved-zb", shape, {.split = true, .trail = 1});
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
