// Finds ranks that compute more slowly than they should: 1.2 times as long as the ranks that do the
// same work for other replicas, or as in their own first steps, over 100 steps.
//
// The lower quartile of 100 steps stands for them: a rank that is slow is slow in nearly all of
// them, while other programs of the machine disturb some. Where all ranks become slower together,
// none is named: the machine or the batches have changed. So the only rank of a job is never named.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sluice {

struct Straggler {
  int rank = 0;  // of the job
  double factor = 1;
  bool of_replicas = false;  // against the other replicas; else against its own first steps
};

class Stragglers {
 public:
  static constexpr std::size_t kWindow = 100;      // steps
  static constexpr std::size_t kFirstSteps = 200;  // of a rank's own
  static constexpr std::size_t kWarmUp = 5;        // steps that do not count
  static constexpr double kFactor = 1.2;

  // Of a rank that is not judged: it shares its cores with others, by turns of the system's choice.
  static constexpr int kShared = -1;

  // [rank of the job] What work a rank does, from 0: ranks with equal numbers do the same.
  explicit Stragglers(std::vector<int> work);

  // After each step: [rank] its seconds in compute actions. Returns those that became stragglers by
  // this step. Looks at the window every 25 steps; allocates then alone.
  [[nodiscard]] std::vector<Straggler> step(std::span<const double> busy);
  // Ranks that are stragglers now, ascending.
  [[nodiscard]] const std::vector<int>& now() const { return now_; }

 private:
  [[nodiscard]] double recent(std::size_t rank) const;
  [[nodiscard]] Straggler compare(std::size_t rank, const std::vector<double>& recent) const;

  std::vector<int> work_;
  std::vector<std::vector<double>> window_;  // [rank] the last kWindow steps
  std::vector<std::vector<double>> first_;   // [rank] its first steps, until own_ is known
  std::vector<double> own_;                  // [rank] of the first steps; empty: not known yet
  std::size_t steps_ = 0;
  std::vector<int> now_;
};

}  // namespace sluice
