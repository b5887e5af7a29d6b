#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr std::array kSignals = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
// The first of kSignals, which the handler reports.
constexpr std::array kReported = {"SIGTERM", "SIGINT", "SIGHUP"};

// At most PIPE_BUF bytes on Linux: one write() puts it into a pipe whole.
struct Line {
  std::array<char, 4096> text;
  std::size_t size = 0;
};

void set_default(int signal) {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

struct StopSignals::Impl {
  using Lines = std::array<Line, kReported.size()>;

  void install();
  void restore() const;
  void fill(Lines& into, const std::string& when, std::string save) const;
  // In the handler.
  void on_signal(int signal) noexcept;

  // Null: there is no object. What a handler reads of it stays until no handler runs.
  static constinit std::atomic<Impl*> active;
  static constinit std::atomic<int> handlers;  // that run now
  static void handle(int signal);

  void (*call)(const void* copy) noexcept = nullptr;
  Copy stop{};
  std::array<struct sigaction, kSignals.size()> previous{};
  std::array<Lines, 2> lines;
  std::atomic<std::size_t> current = 0;  // of `lines`
  std::atomic<bool> requested = false;
};

static_assert(std::atomic<StopSignals*>::is_always_lock_free);
static_assert(std::atomic<std::size_t>::is_always_lock_free);
static_assert(std::atomic<bool>::is_always_lock_free);

constinit std::atomic<StopSignals::Impl*> StopSignals::Impl::active = nullptr;
constinit std::atomic<int> StopSignals::Impl::handlers = 0;

void StopSignals::Impl::handle(int signal) {
  const int saved = errno;
  ++handlers;
  if (Impl* const impl = active) impl->on_signal(signal);
  --handlers;
  errno = saved;
}

void StopSignals::Impl::on_signal(int signal) noexcept {
  // Two threads may be here at once: the later one's signal is the second.
  if (requested.exchange(true)) {
    if (signal == SIGHUP) return;  // a terminal that closes may send it twice
    set_default(signal);
    ::kill(::getpid(), signal);
    return;
  }
  for (const int each : kSignals) {
    if (each != SIGHUP) set_default(each);
  }
  call(stop.bytes.data());
  // describe() changes no line any more: it may complete the other half, not this one.
  const Lines& now = lines[current];
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (kSignals[i] != signal) continue;
    // Standard error may be closed; there is nothing else to tell.
    [[maybe_unused]] const ssize_t written =
        ::write(STDERR_FILENO, now[i].text.data(), now[i].size);
  }
}

void StopSignals::Impl::fill(Lines& into, const std::string& when, std::string save) const {
  constexpr std::size_t kMostOfPath = 3800;
  save.resize(std::min(save.size(), kMostOfPath));
  const int rank = launched_rank();
  for (std::size_t i = 0; i < into.size(); ++i) {
    const auto result =
        fmt::format_to_n(into[i].text.data(), into[i].text.size(),
                         "sluice: {}{} {}; it stops once all ranks have ended the step{}{}\n",
                         rank < 0 ? "" : fmt::format("rank {}: ", rank), kReported[i], when,
                         save.empty() ? "" : "; last complete save: ", save);
    into[i].size = std::min(result.size, into[i].text.size());
  }
}

void StopSignals::Impl::install() {
  struct sigaction action {};
  action.sa_handler = &Impl::handle;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) sigaddset(&action.sa_mask, signal);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &previous[i]);
    // As nohup starts a program.
    const bool stays = kSignals[i] == SIGHUP && previous[i].sa_handler == SIG_IGN;
    if (stays) ::sigaction(kSignals[i], &previous[i], nullptr);
  }
}

void StopSignals::Impl::restore() const {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &previous[i], nullptr);
  }
}

StopSignals::StopSignals(void (*call)(const void* copy) noexcept, const Copy& stop)
    : impl_(std::make_unique<Impl>()) {
  impl_->call = call;
  impl_->stop = stop;
  impl_->fill(impl_->lines[0], "before the first step", "");
  Impl* none = nullptr;
  if (!Impl::active.compare_exchange_strong(none, impl_.get())) {
    throw Error(ErrorCode::kUsage, "one StopSignals may exist in a process");
  }
  impl_->install();
}

StopSignals::~StopSignals() {
  impl_->restore();
  Impl::active = nullptr;
  while (Impl::handlers > 0) std::this_thread::yield();
}

void StopSignals::describe(std::uint64_t step, const std::filesystem::path& save) {
  if (impl_->requested) return;
  const std::size_t next = 1 - impl_->current;
  impl_->fill(impl_->lines[next], fmt::format("during step {}", step), save.string());
  impl_->current = next;
}

bool StopSignals::requested() const noexcept { return impl_->requested; }

}  // namespace sluice
