// Few configurations in which the values of factors meet: every option alone, and every legal tuple
// of values of `strength` factors (greedily, as AETG does: Cohen et al. 1997).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

namespace sluice::testing {

// [factor] The number of its value; the first is the usual one. kOpen: not chosen yet.
using Values = std::vector<int>;
constexpr int kOpen = -1;

class CoveringSet {
 public:
  // `counts`: of each factor's values, at most 255. `legal`: whether the chosen values may meet;
  // more values never make a configuration legal. The usual values together are legal.
  CoveringSet(Values counts, std::size_t strength, std::function<bool(const Values&)> legal)
      : counts_(std::move(counts)), strength_(strength), legal_(std::move(legal)) {
    const Values usual(counts_.size());
    add(usual);
    for (std::size_t factor = 0; factor < counts_.size(); ++factor) {
      for (int value = 1; value < counts_[factor]; ++value) {
        Values alone = usual;
        alone[factor] = value;
        if (legal_(alone)) add(alone);
      }
    }
    Values open(counts_.size(), kOpen);
    cover(open, 0, 0);
  }

  [[nodiscard]] const std::vector<Values>& chosen() const { return chosen_; }
  // Tuples of values that are in no legal configuration; other factors are kOpen.
  [[nodiscard]] const std::vector<Values>& impossible() const { return impossible_; }

 private:
  // Calls `use` with a number for each choice of `more` of `factors` and `tuple`, which are
  // ascending, and their values in `of`.
  template <typename Use>
  void for_tuples(const Values& of, std::size_t first, std::size_t more, std::size_t with,
                  std::uint64_t tuple, const Use& use) const {
    if (more == 0 && with == counts_.size()) return use(tuple);
    for (std::size_t factor = first; factor < counts_.size(); ++factor) {
      const bool wanted = factor == with;
      if (of[factor] != kOpen && (more > 0 || wanted)) {
        const std::uint64_t next =
            (tuple << 16U) | (factor << 8U) | static_cast<std::uint64_t>(of[factor]);
        for_tuples(of, factor + 1, wanted ? more : more - 1, wanted ? counts_.size() : with, next,
                   use);
      }
      if (wanted) return;  // every choice has it
    }
  }
  void add(const Values& configuration) {
    chosen_.push_back(configuration);
    for_tuples(configuration, 0, strength_, counts_.size(), 0,
               [&](std::uint64_t tuple) { seen_.insert(tuple); });
  }
  // Tuples with the value of `factor` that were not seen.
  [[nodiscard]] std::size_t gain(const Values& of, std::size_t factor) const {
    std::size_t gain = 0;
    for_tuples(of, 0, strength_ - 1, factor, 0,
               [&](std::uint64_t tuple) { gain += seen_.contains(tuple) ? 0 : 1; });
    return gain;
  }
  // Chooses values for the open factors, those first that make the most tuples not seen before;
  // false: none is legal.
  bool complete(Values& of) const {
    if (!legal_(of)) return false;
    const auto open = std::find(of.begin(), of.end(), kOpen);
    if (open == of.end()) return true;
    const auto factor = static_cast<std::size_t>(open - of.begin());
    std::vector<std::pair<std::size_t, int>> values;
    for (int i = 0; i < counts_[factor]; ++i) {
      // Among equals another one each time.
      *open = (static_cast<int>(chosen_.size()) + i) % counts_[factor];
      values.emplace_back(gain(of, factor), *open);
    }
    std::stable_sort(values.begin(), values.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [tuples, value] : values) {
      *open = value;
      if (complete(of)) return true;
    }
    *open = kOpen;
    return false;
  }
  // Configurations for each tuple with `of` and later factors.
  void cover(Values& of, std::size_t first, std::size_t chosen) {
    if (chosen == strength_) {
      bool seen = false;
      for_tuples(of, 0, strength_, counts_.size(), 0,
                 [&](std::uint64_t tuple) { seen = seen_.contains(tuple); });
      if (seen) return;
      Values next = of;
      if (complete(next)) {
        add(next);
      } else {
        impossible_.push_back(of);
      }
      return;
    }
    for (std::size_t factor = first; factor < counts_.size(); ++factor) {
      for (of[factor] = 0; of[factor] < counts_[factor]; ++of[factor]) {
        cover(of, factor + 1, chosen + 1);
      }
      of[factor] = kOpen;
    }
  }

  Values counts_;
  std::size_t strength_;
  std::function<bool(const Values&)> legal_;
  std::vector<Values> chosen_, impossible_;
  std::unordered_set<std::uint64_t> seen_;
};

}  // namespace sluice::testing
