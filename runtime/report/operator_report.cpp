#include "runtime/report/operator_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/base/index.hpp"

namespace sluice {

std::vector<OperatorTime> sum_operator_times(Collectives& world,
                                             const std::vector<OperatorTime>& mine) {
  nlohmann::json rows = nlohmann::json::array();
  for (const OperatorTime& each : mine) {
    rows.push_back({each.name, each.calls, each.seconds, each.bytes, each.flops});
  }
  std::map<std::string, OperatorTime> sums;
  for (const std::string& rank : world.all_gather_strings(rows.dump())) {
    for (const auto& row : nlohmann::json::parse(rank)) {
      OperatorTime& sum = sums[row[0].get<std::string>()];
      sum.name = row[0].get<std::string>();
      sum.calls += row[1].get<std::int64_t>();
      sum.seconds += row[2].get<double>();
      sum.bytes += row[3].get<double>();
      sum.flops += row[4].get<double>();
    }
  }
  std::vector<OperatorTime> all;
  for (const auto& [name, sum] : sums) all.push_back(sum);
  std::stable_sort(all.begin(), all.end(), [](const OperatorTime& a, const OperatorTime& b) {
    return a.seconds > b.seconds;
  });
  return all;
}

std::string operator_table(const std::vector<OperatorTime>& times, const OperatorReport& report) {
  std::string text =
      fmt::format("{:<34} {:>8} {:>10} {:>7} {:>10} {:>9}{}\n", "operator", "calls", "ms a step",
                  "share", "GFLOP/s", "GB/s", report.card ? "  of roofline" : "");
  const double all = std::max(report.rank_seconds, 1e-9);
  double seconds = 0;
  for (const OperatorTime& each : times) {
    seconds += each.seconds;
    const double time = std::max(each.seconds, 1e-12);
    std::string roofline;
    if (report.card) {
      const double least = std::max(each.flops / flops_of(*report.card, report.precision),
                                    each.bytes / report.card->bytes);
      roofline = fmt::format("  {:>9.1f} %", 100 * least / time);
    }
    text += fmt::format("{:<34} {:>8} {:>10.3f} {:>5.1f} % {:>10} {:>9.1f}{}\n", each.name,
                        each.calls, 1e3 * each.seconds / report.steps, 100 * each.seconds / all,
                        each.flops > 0 ? fmt::format("{:.1f}", each.flops / time * 1e-9) : "",
                        each.bytes / time * 1e-9, roofline);
  }
  text += fmt::format("{:<34} {:>8} {:>10.3f} {:>5.1f} %\n", "messages, sums, waiting, other code",
                      "", 1e3 * std::max(all - seconds, 0.0) / report.steps,
                      100 * std::max(all - seconds, 0.0) / all);
  return text;
}

}  // namespace sluice
