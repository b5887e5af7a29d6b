#include "runtime/doctor/start_watch.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

namespace sluice {

StartWatch::StartWatch(double seconds, std::function<std::string()> text)
    : thread_([this, seconds, text = std::move(text)] { watch(seconds, text); }) {}

StartWatch::~StartWatch() { stop(); }

void StartWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StartWatch::watch(double seconds, const std::function<std::string()>& text) {
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return stopped_; })) {
    return;
  }
  if (const std::string line = text(); !line.empty()) {
    fmt::print(stderr, "sluice: error: {}\n", line);
    std::fflush(stderr);
  }
  // The launcher ends the others with this process: they write their lines first.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  std::_Exit(exit_code(ErrorCode::kPeer));
}

std::string no_start_text(const std::string& host, double seconds, const NetworkFacts& facts) {
  std::vector<std::string> all, unfit;
  std::string network = "<network>";
  for (const NetworkInterface& each : facts.interfaces) {
    all.push_back(fmt::format("{} ({})", each.name, each.address));
    if (is_virtual_interface(each.name)) {
      unfit.push_back(each.name);
    } else if (network.starts_with('<')) {
      network = each.network;
    }
  }
  const std::string blame =
      unfit.empty() ? "the network or a firewall loses what MPI sends, or MPI has chosen an "
                      "interface that does not lead to the other hosts"
                    : fmt::format("MPI may have chosen {}, which does not lead to other hosts",
                                  fmt::join(unfit, ", "));
  return fmt::format(
      "{}: MPI has not started within {:.0f} s: another host does not answer. Interfaces here: {}; "
      "{}. Start with 'mpirun --mca btl_tcp_if_include {}'",
      host, seconds, fmt::join(all, ", "), blame, network);
}

}  // namespace sluice
