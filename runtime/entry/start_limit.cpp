#include "runtime/entry/start_limit.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/cores.hpp"
#include "comm/base/host.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/local_ranks.hpp"
#include "comm/base/threads.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

constexpr const char* kVariable = "SLUICE_START_TIMEOUT";
constexpr auto kOthersWrite = std::chrono::seconds(1);

}  // namespace

std::chrono::seconds start_time_limit() {
  constexpr int kDefault = 60;
  constexpr int kMost = 1'000'000;
  const char* text = std::getenv(kVariable);
  if (text == nullptr) return std::chrono::seconds(kDefault);
  const std::string_view digits(text);
  int value = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value);
  if (error != std::errc() || end != digits.end() || value < 0 || value > kMost) {
    throw Error(ErrorCode::kUsage, fmt::format("{} is '{}'; legal: seconds from 0 (no limit) to {}",
                                               kVariable, text, kMost));
  }
  return std::chrono::seconds(value);
}

std::string network_advice(const NetworkFacts& facts) {
  std::vector<std::string> all, unfit;
  std::string network = "NETWORK";
  for (const NetworkInterface& each : facts.interfaces) {
    all.push_back(fmt::format("{} ({})", each.name, each.address));
    if (is_virtual_interface(each.name)) {
      unfit.push_back(each.name);
    } else if (network == "NETWORK") {
      network = each.network;
    }
  }
  const std::string blame =
      unfit.empty() ? "a rank does not run, a firewall loses what MPI sends, or MPI has chosen an "
                      "interface that does not lead to the other hosts"
                    : fmt::format("MPI may have chosen {}, which does not lead to other hosts",
                                  joined(unfit, ", "));
  return fmt::format(
      "interfaces here: {}; {}. Name the network that joins all hosts: 'mpirun --mca "
      "btl_tcp_if_include {}'",
      all.empty() ? "none" : joined(all, ", "), blame, network);
}

StartLimit::StartLimit(std::string what, std::chrono::milliseconds limit) : what_(std::move(what)) {
  if (limit.count() == 0) return;
  thread_ = start_thread<std::jthread>(
      "time limit of the start",
      [this, limit](const std::stop_token& stop) { watch(stop, limit); });
}

// Empty where another rank of this host speaks.
std::string StartLimit::line(std::chrono::milliseconds waited, bool was_stopped) const {
  const int rank = launched_rank();
  const std::string who = fmt::format(
      "{} on {}: {}", rank < 0 ? "the process" : fmt::format("rank {}", rank), host_name(), what_);
  const double seconds = static_cast<double>(waited.count()) / 1e3;
  // What it would see of the others now is their end.
  if (was_stopped) {
    return fmt::format("sluice: error: {} has not ended: this process was stopped\n", who);
  }
  const std::vector<LocalRank> ranks = local_ranks();
  const auto first = std::ranges::find(ranks, false, &LocalRank::stopped);
  const bool speaks = first == ranks.end() ? launcher_info().local_rank <= 0 : first->rank == rank;
  if (!speaks) return "";
  const std::string cause = silence_on_host(ranks, launched_size());
  return fmt::format(
      "sluice: error: {} waits for other ranks of the job since {} s: {}. {}=SECONDS allows more "
      "time\n",
      who, seconds, cause.empty() ? network_advice(network_facts()) : cause, kVariable);
}

void StartLimit::watch(const std::stop_token& stop, std::chrono::milliseconds limit) const {
  const auto begin = std::chrono::steady_clock::now();
  if (stopped_within(stop, limit)) return;
  // One line for each host. The launcher ends the others with this process: they write theirs
  // first.
  const auto late = std::chrono::steady_clock::now() - begin - limit;
  const std::string text = line(limit, /*was_stopped=*/late > kOthersWrite);
  (void)!::write(STDERR_FILENO, text.data(), text.size());
  std::this_thread::sleep_for(kOthersWrite);
  ::_exit(exit_code(ErrorCode::kPeer));
}

}  // namespace sluice
