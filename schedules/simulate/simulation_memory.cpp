#include "schedules/simulate/simulation_memory.hpp"

#include <algorithm>
#include <tuple>

#include "schedules/model/index.hpp"

namespace sluice {
namespace {

constexpr std::uint8_t kRelease = 0, kTake = 1, kReleaseAtOnce = 2;

}  // namespace

MemoryRecorder::MemoryRecorder(const Schedule& schedule, const SimulationTimes& times)
    : schedule_(schedule), times_(times), changes_(schedule.ranks.size()) {
  for (std::size_t rank = 0; rank < changes_.size(); ++rank) {
    changes_[rank].reserve(schedule.ranks[rank].size());
  }
}

void MemoryRecorder::take(int rank, double time, std::int64_t bytes) {
  if (bytes > 0) changes_[at(rank)].push_back({time, bytes, kTake});
}

void MemoryRecorder::release(int rank, double time, std::int64_t bytes, bool held) {
  if (bytes == 0) return;
  changes_[at(rank)].push_back({time, -bytes, held ? kRelease : kReleaseAtOnce});
}

void MemoryRecorder::compute(int rank, const Action& action, double start, double end) {
  const StageBytes& bytes = of_stage(times_.bytes, action.stage);
  const std::int64_t all = bytes.until_input + bytes.until_weight;
  switch (action.kind) {
    case ActionKind::kForward:
      take(rank, start, all);
      if (schedule_.forward_only) release(rank, end, all, end > start);
      break;
    case ActionKind::kBackwardInput:
      release(rank, end, bytes.until_input, end > start);
      break;
    case ActionKind::kBackwardWeight:
      release(rank, end, bytes.until_weight, end > start);
      break;
    default:
      release(rank, end, all, end > start);
      break;
  }
}

void MemoryRecorder::produced(const Handover& handover, double start, double leaves, double left) {
  if (handover.bytes == 0) return;
  take(handover.from, start, handover.bytes);
  if (handover.link < 0) return;
  release(handover.from, left, handover.bytes, left > start);
  take(handover.to, leaves, handover.bytes);
}

void MemoryRecorder::received(const Handover& handover, double start, double end) {
  release(handover.to, end, handover.bytes, end > start);
}

void MemoryRecorder::finish(Simulation& result, bool curves) {
  const auto earlier = [](const Change& a, const Change& b) {
    return std::tie(a.time, a.turn) < std::tie(b.time, b.turn);
  };
  result.peak_bytes.resize(changes_.size());
  if (curves) result.memory.resize(changes_.size());
  for (std::size_t rank = 0; rank < changes_.size(); ++rank) {
    std::vector<Change> changes = std::move(changes_[rank]);
    if (!std::is_sorted(changes.begin(), changes.end(), earlier)) {
      std::sort(changes.begin(), changes.end(), earlier);
    }
    std::int64_t held = 0;
    for (const int stage : schedule_.placement.stages_of(static_cast<int>(rank))) {
      held += of_stage(times_.bytes, stage).resident;
    }
    std::int64_t peak = held;
    std::vector<MemoryStep> curve{{0, held}};
    for (const Change& change : changes) {
      held += change.bytes;
      peak = std::max(peak, held);
      if (!curves) continue;
      if (curve.back().time < change.time) curve.push_back({change.time, held});
      curve.back().bytes = held;
    }
    result.peak_bytes[rank] = peak;
    if (curves) result.memory[rank] = std::move(curve);
  }
}

}  // namespace sluice
