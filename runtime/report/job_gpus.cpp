#include "runtime/report/job_gpus.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "comm/base/index.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OperatorTime, name, calls, seconds, bytes, flops)

namespace {

struct Card {
  std::string_view begins, contains;  // of its name
  CardPeaks peaks;                    // in TFLOP/s and TB/s
};

// Data sheets of NVIDIA. The first row that fits counts.
constexpr std::array<Card, 12> kCards = {
    {{"NVIDIA H200 NVL", "", {835.5, 417.5, 60, 4.8}},
     {"NVIDIA H200", "", {989.5, 494.5, 67, 4.8}},
     {"NVIDIA H100 NVL", "", {835.5, 417.5, 60, 3.9}},
     {"NVIDIA H100 PCIe", "", {756, 378, 51, 2.0}},
     {"NVIDIA H100", "HBM3", {989.5, 494.5, 67, 3.35}},
     {"NVIDIA B200", "", {2250, 1125, 75, 8}},
     {"NVIDIA A100", "40GB", {312, 156, 19.5, 1.555}},
     {"NVIDIA A100", "SXM4-80GB", {312, 156, 19.5, 2.039}},
     {"NVIDIA A100", "80GB", {312, 156, 19.5, 1.935}},
     {"NVIDIA L40S", "", {362, 183, 91.6, 0.864}},
     {"NVIDIA L4", "", {121, 60, 30.3, 0.3}},
     {"NVIDIA GeForce RTX 4090", "", {165.2, 82.6, 82.6, 1.008}}}};

// "NVIDIA L4" is no beginning of "NVIDIA L40".
bool fits(const Card& card, std::string_view name) {
  if (!name.starts_with(card.begins)) return false;
  const std::string_view rest = name.substr(card.begins.size());
  return (rest.empty() || rest.front() == ' ' || rest.front() == '-') &&
         rest.find(card.contains) != std::string_view::npos;
}

std::string identity_of(Device device) {
  return device.kind == DeviceKind::kCpu ? "" : properties_of(device).identity;
}

}  // namespace

std::optional<CardPeaks> peaks_of(std::string_view card) {
  constexpr double kTera = 1e12;
  for (const Card& row : kCards) {
    if (!fits(row, card)) continue;
    const CardPeaks& peaks = row.peaks;
    return CardPeaks{peaks.bf16 * kTera, peaks.tf32 * kTera, peaks.fp32 * kTera,
                     peaks.bytes * kTera};
  }
  return {};
}

double flops_of(const CardPeaks& card, MatmulPrecision precision) {
  return precision == MatmulPrecision::kF32    ? card.fp32
         : precision == MatmulPrecision::kTf32 ? card.tf32
                                               : card.bf16;
}

JobGpus::JobGpus(Collectives& world, const std::string& machine, Device device,
                 const std::string& library)
    : world_(world), monitor_(identity_of(device), library) {
  const bool has_gpu = device.kind != DeviceKind::kCpu;
  std::set<std::string> seen;
  // "1" where the driver answers, the card's name, and what tells it from others.
  const std::string mine =
      fmt::format("{}{}\n{}\n{}", monitor_.works() ? 1 : 0,
                  has_gpu ? properties_of(device).name : "", machine, identity_of(device));
  for (const std::string& rank : world.all_gather_strings(mine)) {
    any_works_ = any_works_ || rank.front() == '1';
    const std::size_t end = rank.find('\n');
    if (seen.insert(rank.substr(end)).second) cards_.push_back(rank.substr(1, end - 1));
  }
}

double JobGpus::peak(MatmulPrecision precision) const {
  double sum = 0;
  for (const std::string& name : cards_) {
    const std::optional<CardPeaks> card = peaks_of(name);
    if (!card) return 0;
    sum += flops_of(*card, precision);
  }
  return sum;
}

std::optional<CardPeaks> JobGpus::card() const {
  for (const std::string& name : cards_) {
    if (name != cards_.front()) return {};
  }
  return cards_.empty() ? std::nullopt : peaks_of(cards_.front());
}

std::vector<GpuState> JobGpus::read() {
  if (!any_works_) return {};
  const GpuState mine = monitor_.read();
  Communicator& ranks = world_.communicator();
  std::vector<GpuState> all(ranks.rank() == 0 ? at(ranks.size()) : 0);
  world_.gather(object_bytes(mine), std::as_writable_bytes(std::span(all)), 0);
  return all;
}

std::vector<OperatorTime> sum_operator_times(Collectives& world,
                                             const std::vector<OperatorTime>& mine) {
  std::map<std::string, OperatorTime> sums;
  for (const std::string& rank : world.all_gather_strings(dump_json(nlohmann::json(mine)))) {
    for (const auto& each : parse_json(rank).get<std::vector<OperatorTime>>()) {
      OperatorTime& sum = sums[each.name];
      sum.name = each.name;
      sum.calls += each.calls;
      sum.seconds += each.seconds;
      sum.bytes += each.bytes;
      sum.flops += each.flops;
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
