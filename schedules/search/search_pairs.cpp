#include "schedules/search/search_pairs.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "schedules/model/index.hpp"

namespace sluice::search {
namespace {

using List = std::vector<Step>;

bool is_forward(const Step& step) {
  return !step.overlapped && step.action.kind == ActionKind::kForward;
}

bool is_backward(const Step& step) {
  return !step.overlapped && step.action.kind == ActionKind::kBackward;
}

// I and W of one micro-batch, one right after the other, as B.
List merged(const List& list) {
  List result;
  for (const Step& step : list) {
    const bool ends = !step.overlapped && step.action.kind == ActionKind::kBackwardWeight &&
                      !result.empty() && !result.back().overlapped &&
                      result.back().action.kind == ActionKind::kBackwardInput &&
                      result.back().action.stage == step.action.stage &&
                      result.back().action.micro_batch == step.action.micro_batch;
    if (ends) {
      result.back().action.kind = ActionKind::kBackward;
    } else {
      result.push_back(step);
    }
  }
  return result;
}

bool may_pair(const Step& one, const Step& two) {
  const bool kinds = (is_forward(one) && is_backward(two)) || (is_backward(one) && is_forward(two));
  return kinds && one.action.micro_batch != two.action.micro_batch;
}

// The forward comes first in a pair.
Step pair_of(const Step& one, const Step& two) {
  return is_forward(one) ? Step{one.action, two.action} : Step{two.action, one.action};
}

List paired(const List& list, bool backward_first) {
  List result;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const bool first = backward_first ? is_backward(list[i]) : is_forward(list[i]);
    if (first && i + 1 < list.size() && may_pair(list[i], list[i + 1])) {
      result.push_back(pair_of(list[i], list[i + 1]));
      ++i;
    } else {
      result.push_back(list[i]);
    }
  }
  return result;
}

// The list with the pair at `i` apart, or with its forward beside the backward before it or after
// it: the ways to change one pair.
std::vector<List> changes_of(const List& list, std::size_t i) {
  const Step forward = {list[i].action}, backward = {*list[i].overlapped};
  const auto with = [&](std::vector<Step> steps, std::size_t first, std::size_t last) {
    List changed(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(first));
    changed.insert(changed.end(), steps.begin(), steps.end());
    changed.insert(changed.end(), list.begin() + static_cast<std::ptrdiff_t>(last) + 1, list.end());
    return changed;
  };
  std::vector<List> changes = {with({forward, backward}, i, i), with({backward, forward}, i, i)};
  if (i > 0 && may_pair(list[i - 1], forward)) {
    changes.push_back(with({pair_of(list[i - 1], forward), backward}, i - 1, i));
  }
  if (i + 1 < list.size() && may_pair(list[i + 1], forward)) {
    changes.push_back(with({backward, pair_of(list[i + 1], forward)}, i, i + 1));
  }
  return changes;
}

}  // namespace

bool has_pairs(const Schedule& schedule) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const List& list) {
    return std::any_of(list.begin(), list.end(),
                       [](const Step& step) { return step.overlapped.has_value(); });
  });
}

std::optional<Schedule> with_pairs(const Schedule& schedule, bool backward_first,
                                   const Worth& worth) {
  Schedule all = schedule;
  for (List& list : all.ranks) list = paired(merged(list), backward_first);
  if (!has_pairs(all)) return std::nullopt;
  if (worth(all)) return all;
  Schedule some = schedule;
  std::optional<double> value = worth(some);
  for (std::size_t rank = 0; rank < some.ranks.size() && value; ++rank) {
    List before = std::exchange(some.ranks[rank], all.ranks[rank]);
    const std::optional<double> now = worth(some);
    if (now && *now <= *value) {
      value = now;
    } else {
      some.ranks[rank] = std::move(before);
    }
  }
  if (!value || !has_pairs(some)) return std::nullopt;
  return some;
}

Schedule improved_pairs(Schedule schedule, const Worth& worth, std::int64_t most) {
  std::optional<double> value = worth(schedule);
  bool better = value.has_value();
  while (better) {
    better = false;
    for (List& list : schedule.ranks) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (!list[i].overlapped || !is_forward({list[i].action})) continue;
        for (List& change : changes_of(list, i)) {
          if (most-- <= 0) return schedule;
          std::swap(list, change);
          const std::optional<double> now = worth(schedule);
          if (now && *now < *value) {
            value = now;
            better = true;
            break;
          }
          std::swap(list, change);
        }
      }
    }
  }
  return schedule;
}

}  // namespace sluice::search
