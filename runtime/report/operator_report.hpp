// Where the time of a job's operators goes: sums over ranks, and a table of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <sluice/compute.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/report/job_gpus.hpp"

namespace sluice {

// Collective. The sums over all ranks of `mine`, by name, the longest first; on every rank.
[[nodiscard]] std::vector<OperatorTime> sum_operator_times(Collectives& world,
                                                           const std::vector<OperatorTime>& mine);

struct OperatorReport {
  int steps = 0;            // in which the times were measured
  double rank_seconds = 0;  // those steps' seconds times ranks
  ProductPrecision precision = ProductPrecision::kF32;
  // Of the card that all ranks have; the table then has a column for the share of the time in which
  // it could have moved the bytes and computed the products.
  std::optional<CardPeaks> card = {};
};

// A line per operator: calls, milliseconds and share of the ranks' time, speeds, share of the
// roofline. Its lines end in newlines.
[[nodiscard]] std::string operator_table(const std::vector<OperatorTime>& times,
                                         const OperatorReport& report);

}  // namespace sluice
