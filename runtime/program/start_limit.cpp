#include "runtime/program/start_limit.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr const char* kVariable = "SLUICE_START_TIMEOUT";

std::string own_host() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "this host";
}

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

StartLimit::StartLimit(std::string what, std::chrono::milliseconds limit) : what_(std::move(what)) {
  if (limit.count() > 0) thread_ = std::thread([this, limit] { watch(limit); });
}

StartLimit::~StartLimit() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StartLimit::watch(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, limit, [this] { return over_; })) return;
  const int rank = launched_rank();
  const std::string line = fmt::format(
      "sluice: error: {} on {}: {} waits for other ranks of the job since {} s. A rank does not "
      "run, or hosts do not reach each other: look at the other ranks' lines, and name the "
      "network that joins all hosts ('--mca btl_tcp_if_include NETWORK'). {}=SECONDS allows more "
      "time\n",
      rank < 0 ? "the process" : fmt::format("rank {}", rank), own_host(), what_,
      static_cast<double>(limit.count()) / 1e3, kVariable);
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(exit_code(ErrorCode::kPeer));
}

}  // namespace sluice
