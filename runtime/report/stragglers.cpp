#include "runtime/report/stragglers.hpp"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

constexpr std::size_t kEvery = 25;
constexpr double kFactorToEnd = 1.1;  // of a rank that is named already

// The value at the end of the first of `parts` equal parts, in ascending order: of 4 the lower
// quartile, of 2 the lower middle one. 0 of no values.
double lower(std::size_t parts, std::vector<double> values) {
  if (values.empty()) return 0;
  const auto place = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / parts);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

}  // namespace

Stragglers::Stragglers(std::vector<int> work)
    : work_(std::move(work)), window_(work_.size()), first_(work_.size()) {
  for (auto& each : window_) each.reserve(kWindow);
  for (auto& each : first_) each.reserve(kFirstSteps);
}

double Stragglers::recent(std::size_t rank) const { return lower(4, window_[rank]); }

std::vector<Straggler> Stragglers::step(std::span<const double> busy) {
  if (busy.size() != work_.size() || steps_++ < kWarmUp) return {};
  const std::size_t counted = steps_ - kWarmUp;
  for (std::size_t rank = 0; rank < busy.size(); ++rank) {
    if (window_[rank].size() < kWindow) window_[rank].push_back(0);
    window_[rank][(counted - 1) % kWindow] = busy[rank];
    if (own_.empty()) first_[rank].push_back(busy[rank]);
  }
  if (own_.empty() && counted == kFirstSteps) {
    for (auto& each : first_) own_.push_back(lower(4, std::move(each)));
    first_.clear();
  }
  if (counted < kWindow || counted % kEvery != 0) return {};
  std::vector<double> values(busy.size());
  for (std::size_t rank = 0; rank < busy.size(); ++rank) values[rank] = recent(rank);
  std::vector<Straggler> found;
  const std::vector<int> before = std::exchange(now_, {});
  for (std::size_t rank = 0; rank < busy.size(); ++rank) {
    const Straggler straggler = compare(rank, values);
    const bool known = std::find(before.begin(), before.end(), straggler.rank) != before.end();
    if (straggler.factor <= (known ? kFactorToEnd : kFactor)) continue;
    now_.push_back(straggler.rank);
    if (!known) found.push_back(straggler);
  }
  return found;
}

Straggler Stragglers::compare(std::size_t rank, const std::vector<double>& recent) const {
  Straggler result{.rank = static_cast<int>(rank)};
  if (work_[rank] == kShared) return result;
  std::vector<double> same, growth;
  for (std::size_t other = 0; other < recent.size(); ++other) {
    if (other == rank || work_[other] == kShared) continue;
    if (work_[other] == work_[rank]) same.push_back(recent[other]);
    if (!own_.empty() && own_[other] > 0) growth.push_back(recent[other] / own_[other]);
  }
  if (!same.empty()) {
    const double theirs = lower(2, same);
    if (theirs > 0) result = {result.rank, recent[rank] / theirs, true};
  }
  if (growth.empty() || own_[rank] <= 0 || result.factor > kFactor) return result;
  const double common = std::max(1.0, lower(2, growth));
  const double grown = recent[rank] / own_[rank] / common;
  if (grown > result.factor) result = {result.rank, grown, false};
  return result;
}

}  // namespace sluice
