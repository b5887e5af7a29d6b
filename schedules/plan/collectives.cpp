#include "schedules/plan/collectives.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, kCollectiveAxes> kAxisNames = {"the replicas",
                                                                      "the tensor ranks"};
constexpr std::array<std::string_view, kCollectiveKinds> kKindNames = {
    "sum", "all-gather", "reduce-scatter", "all-to-all"};

bool makes(ActionKind action, ActionKind part) {
  return action == part ||
         (action == ActionKind::kBackward &&
          (part == ActionKind::kBackwardInput || part == ActionKind::kBackwardWeight));
}

std::string text_of(CollectiveKind kind, std::uint64_t bytes, DType type) {
  return concat(name_of(kind), " of ", bytes, " bytes of ", name_of(type));
}

}  // namespace

std::string_view name_of(CollectiveAxis axis) { return kAxisNames[at(axis)]; }
std::string_view name_of(CollectiveKind kind) { return kKindNames[at(kind)]; }

std::string to_string(const PlannedCollective& collective) {
  return concat(text_of(collective.kind, collective.bytes, collective.type), " over ",
                name_of(collective.axis));
}

std::string in_sentence(CollectiveKind kind, std::uint64_t bytes, DType type) {
  return concat(name_of(kind).front() == 'a' ? "an " : "a ", text_of(kind, bytes, type));
}
std::string in_sentence(const PlannedCollective& collective) {
  return concat(in_sentence(collective.kind, collective.bytes, collective.type), " over ",
                name_of(collective.axis));
}

std::vector<PlannedCollective> collectives_of(const StageCollectives& stage, ActionKind kind,
                                              bool forward_only) {
  std::vector<PlannedCollective> all;
  const auto append = [&](ActionKind part, const std::vector<PlannedCollective>& list) {
    if (!makes(kind, part)) return;
    std::copy_if(list.begin(), list.end(), std::back_inserter(all), [&](const auto& each) {
      return !forward_only || each.axis == CollectiveAxis::kTensor;
    });
  };
  append(ActionKind::kForward, stage.forward);
  append(ActionKind::kForward, stage.loss);
  append(ActionKind::kRecompute, stage.recompute);
  append(ActionKind::kBackwardInput, stage.backward_input);
  append(ActionKind::kBackwardWeight, stage.backward_weight);
  return all;
}

std::string_view why_illegal(const PlannedCollective& collective) {
  if (at(collective.axis) >= kCollectiveAxes || at(collective.kind) >= kCollectiveKinds ||
      at(collective.type) >= kDTypes) {
    return "legal are the axes of CollectiveAxis, the kinds of CollectiveKind, the types of DType";
  }
  const bool adds =
      collective.kind == CollectiveKind::kSum || collective.kind == CollectiveKind::kReduceScatter;
  if (adds && collective.type != DType::kF32 && collective.type != DType::kF64) {
    return "legal are sums of f32 and of f64";
  }
  return {};
}

std::string why_unlike(std::span<const PlannedCollective> largest,
                       std::span<const PlannedCollective> smaller) {
  if (largest.size() != smaller.size()) {
    return concat(smaller.size(), " collectives, not ", largest.size());
  }
  for (std::size_t i = 0; i < largest.size(); ++i) {
    PlannedCollective fits = smaller[i];
    fits.bytes = largest[i].bytes;
    if (fits == largest[i] && smaller[i].bytes <= largest[i].bytes) continue;
    return concat("collective ", i + 1, " is ", in_sentence(smaller[i]), ", not ",
                  in_sentence(largest[i]));
  }
  return {};
}

CollectiveLists::CollectiveLists(const std::vector<StageCollectives>& stages, bool forward_only,
                                 std::vector<PlannedCollective>& all) {
  const auto end_of = [&](const StageCollectives& stage, ActionKind kind) {
    const std::vector<PlannedCollective> list = collectives_of(stage, kind, forward_only);
    all.insert(all.end(), list.begin(), list.end());
    return static_cast<std::int32_t>(all.size());
  };
  for (const StageCollectives& stage : stages) {
    Ends& ends = stages_.emplace_back();
    ends.begin = static_cast<std::int32_t>(all.size());
    ends.forward = end_of(stage, ActionKind::kForward);
    ends.recompute = end_of(stage, ActionKind::kRecompute);
    ends.input = end_of(stage, ActionKind::kBackwardInput);
    ends.weight = end_of(stage, ActionKind::kBackwardWeight);
  }
}

void CollectiveLists::name(PlanOp& op) const {
  if (stages_.empty()) return;
  const Ends& ends = stages_[at(op.stage)];
  const auto [first, end] = [&]() -> std::pair<std::int32_t, std::int32_t> {
    switch (op.action) {
      case ActionKind::kForward:
        return {ends.begin, ends.forward};
      case ActionKind::kRecompute:
        return {ends.forward, ends.recompute};
      case ActionKind::kBackwardInput:
        return {ends.recompute, ends.input};
      case ActionKind::kBackwardWeight:
        return {ends.input, ends.weight};
      default:
        return {ends.recompute, ends.weight};
    }
  }();
  op.first_collective = first;
  op.collectives = end - first;
}

}  // namespace sluice
