#include "runtime/report/job_gpus.hpp"

#include <fmt/format.h>

#include <array>
#include <set>
#include <span>

#include "comm/base/index.hpp"

namespace sluice {

namespace {

struct Card {
  std::string_view begins, contains;  // of its name
  double bf16, tf32, fp32;            // TFLOP/s
};

// Data sheets of NVIDIA. The first row that fits counts.
constexpr std::array<Card, 10> kCards = {{{"NVIDIA H200 NVL", "", 835.5, 417.5, 60},
                                          {"NVIDIA H200", "", 989.5, 494.5, 67},
                                          {"NVIDIA H100 NVL", "", 835.5, 417.5, 60},
                                          {"NVIDIA H100 PCIe", "", 756, 378, 51},
                                          {"NVIDIA H100", "HBM3", 989.5, 494.5, 67},
                                          {"NVIDIA B200", "", 2250, 1125, 75},
                                          {"NVIDIA A100", "", 312, 156, 19.5},
                                          {"NVIDIA L40S", "", 362, 183, 91.6},
                                          {"NVIDIA L4", "", 121, 60, 30.3},
                                          {"NVIDIA GeForce RTX 4090", "", 165.2, 82.6, 82.6}}};

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

double peak_flops(std::string_view card, ProductPrecision precision) {
  constexpr double kTera = 1e12;
  for (const Card& row : kCards) {
    if (!fits(row, card)) continue;
    switch (precision) {
      case ProductPrecision::kF32:
        return row.fp32 * kTera;
      case ProductPrecision::kTf32:
        return row.tf32 * kTera;
      case ProductPrecision::kBf16:
        return row.bf16 * kTera;
    }
  }
  return 0;
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

double JobGpus::peak(ProductPrecision precision) const {
  double sum = 0;
  for (const std::string& card : cards_) {
    const double flops = peak_flops(card, precision);
    if (flops == 0) return 0;
    sum += flops;
  }
  return sum;
}

std::vector<GpuState> JobGpus::read() {
  if (!any_works_) return {};
  const GpuState mine = monitor_.read();
  Communicator& ranks = world_.communicator();
  std::vector<GpuState> all(ranks.rank() == 0 ? at(ranks.size()) : 0);
  world_.gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), 0);
  return all;
}

}  // namespace sluice
