#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <string_view>
#include <thread>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

#include "comm/base/host.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

// The one object of its kind in a process, as signal handlers see it. What a handler reads of it
// stays until no handler runs.
template <typename Impl>
class OneInProcess {
 public:
  void enter(Impl& impl, const char* kind) {
    Impl* none = nullptr;
    if (active_.compare_exchange_strong(none, &impl)) return;
    throw_usage("one {} may exist in a process", kind);
  }
  void leave() {
    active_ = nullptr;
    while (handlers_ > 0) std::this_thread::yield();
  }
  // In a handler.
  template <typename Body>
  void with(const Body& body) {
    const int saved = errno;
    ++handlers_;
    if (Impl* const impl = active_) body(*impl);
    --handlers_;
    errno = saved;
  }

 private:
  std::atomic<Impl*> active_ = nullptr;  // null: there is no object
  std::atomic<int> handlers_ = 0;        // that run now
  static_assert(std::atomic<Impl*>::is_always_lock_free);
};

// The actions of some signals, and those that were there before.
template <std::size_t kCount>
struct Actions {
  const std::array<int, kCount> signals;
  std::array<struct sigaction, kCount> previous{};

  void install(const struct sigaction& action) {
    for (std::size_t i = 0; i < kCount; ++i) ::sigaction(signals[i], &action, &previous[i]);
  }
  void restore() const {
    for (std::size_t i = 0; i < kCount; ++i) ::sigaction(signals[i], &previous[i], nullptr);
  }
};

void set_default(int signal) {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
}

constexpr std::array kSignals = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
// The first of kSignals, which the handler reports.
constexpr std::array kReported = {"SIGTERM", "SIGINT", "SIGHUP"};

// At most PIPE_BUF bytes on Linux: one write() puts it into a pipe whole.
struct Line {
  std::array<char, 4096> text;
  std::size_t size = 0;
};

constexpr std::array kFaults = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
constexpr std::array kFaultNames = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"};
constexpr const char* kShorter = "' has become shorter, or its disk cannot be read";
constexpr std::size_t kStackBytes = std::size_t{128} << 10;

// Of kFaults.
std::size_t place_of(int signal) {
  return static_cast<std::size_t>(std::find(kFaults.begin(), kFaults.end(), signal) -
                                  kFaults.begin());
}

void write_line(const char* line, std::size_t size) noexcept {
  // Standard error may be closed; there is nothing else to tell.
  (void)!::write(STDERR_FILENO, line, size);
}

struct Fault {
  int signal;
  std::string_view file;  // of the address; may be empty
  int lines;
};

void write_place(ActivityBoard& board, void* with) noexcept {
  auto& fault = *static_cast<Fault*>(with);
  const Activity now = board.read();
  if (now.doing == Doing::kOutside && now.step == 0) return;
  std::array<char, 96> room{};
  const std::string_view doing = describe_doing(now, room);
  std::array<char, 512> line{};
  const bool has_file = !fault.file.empty();
  const int size = std::snprintf(
      line.data(), line.size(),
      "sluice: error: %s on rank %d on %s (stages %s), step %" PRIu64 ": %s%.*s%s%.*s%s\n",
      kFaultNames[place_of(fault.signal)], board.rank(), board.host(), board.stages(), now.step,
      now.waits ? "waiting in " : "in ", static_cast<int>(doing.size()), doing.data(),
      has_file ? "; '" : "", static_cast<int>(fault.file.size()), fault.file.data(),
      has_file ? kShorter : "");
  write_line(line.data(), std::min(static_cast<std::size_t>(size), line.size() - 1));
  ++fault.lines;
}

}  // namespace

struct StopSignals::Impl {
  using Lines = std::array<Line, kReported.size()>;

  void fill(Lines& into, const std::string& when, std::string save) const {
    constexpr std::size_t kMostOfPath = 3800;
    save.resize(std::min(save.size(), kMostOfPath));
    const int rank = launched_rank();
    for (std::size_t i = 0; i < into.size(); ++i) {
      const std::string text =
          fmt::format("sluice: {}{} {}; it stops once all ranks have ended the step{}{}\n",
                      rank < 0 ? "" : fmt::format("rank {}: ", rank), kReported[i], when,
                      save.empty() ? "" : "; last complete save: ", save);
      into[i].size = text.copy(into[i].text.data(), into[i].text.size());
    }
  }
  // In the handler.
  void on_signal(int signal) noexcept {
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
      if (kSignals[i] == signal) write_line(now[i].text.data(), now[i].size);
    }
  }

  static constinit OneInProcess<Impl> only;

  void (*call)(const void* copy) noexcept = nullptr;
  Copy stop{};
  Actions<kSignals.size()> actions{kSignals};
  std::array<Lines, 2> lines;
  std::atomic<std::size_t> current = 0;  // of `lines`
  std::atomic<bool> requested = false;
};

static_assert(std::atomic<std::size_t>::is_always_lock_free);
static_assert(std::atomic<bool>::is_always_lock_free);

constinit OneInProcess<StopSignals::Impl> StopSignals::Impl::only;

StopSignals::StopSignals(void (*call)(const void* copy) noexcept, const Copy& stop)
    : impl_(std::make_unique<Impl>()) {
  impl_->call = call;
  impl_->stop = stop;
  impl_->fill(impl_->lines[0], "before the first step", "");
  Impl::only.enter(*impl_, "StopSignals");
  struct sigaction action {};
  action.sa_handler = [](int signal) {
    Impl::only.with([&](Impl& impl) { impl.on_signal(signal); });
  };
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) sigaddset(&action.sa_mask, signal);
  impl_->actions.install(action);
  // As nohup starts a program.
  const struct sigaction& hang_up = impl_->actions.previous[2];
  if (hang_up.sa_handler == SIG_IGN) ::sigaction(SIGHUP, &hang_up, nullptr);
}

StopSignals::~StopSignals() {
  impl_->actions.restore();
  Impl::only.leave();
}

void StopSignals::describe(std::uint64_t step, const std::filesystem::path& save) {
  if (impl_->requested) return;
  const std::size_t next = 1 - impl_->current;
  impl_->fill(impl_->lines[next], fmt::format("during step {}", step), save.string());
  impl_->current = next;
}

bool StopSignals::requested() const noexcept { return impl_->requested; }

struct PlaceSignals::Impl {
  void install();
  void on_fault(int signal, siginfo_t* info, void* context) const {
    Fault fault{.signal = signal, .file = {}, .lines = 0};
    if (signal == SIGBUS) fault.file = MappedFile::path_at(info->si_addr);
    ActivityBoard::for_each(&write_place, &fault);
    if (fault.lines == 0) {
      std::array<char, 512> line{};
      const int size = std::snprintf(line.data(), line.size(),
                                     "sluice: error: %s on rank %d on %s, outside of pipelines\n",
                                     kFaultNames[place_of(signal)], rank, host.data());
      write_line(line.data(), std::min(static_cast<std::size_t>(size), line.size() - 1));
    }
    chain(signal, info, context);
  }

  // Runs the action that was there before. The default one ends the process once this handler has
  // returned.
  void chain(int signal, siginfo_t* info, void* context) const {
    const struct sigaction& before = faults.previous[place_of(signal)];
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
      return before.sa_sigaction(signal, info, context);
    }
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
      return before.sa_handler(signal);
    }
    set_default(signal);
    ::raise(signal);
  }

  static constinit OneInProcess<Impl> only;

  Actions<kFaults.size()> faults{kFaults};
  Actions<1> table{{SIGUSR2}};
  stack_t previous_stack{};
  std::vector<std::byte> stack = std::vector<std::byte>(kStackBytes);
  bool own_stack = false;
  std::array<char, 256> host{};
  int rank = 0;
};

constinit OneInProcess<PlaceSignals::Impl> PlaceSignals::Impl::only;

void PlaceSignals::Impl::install() {
  const std::string name = host_name();
  std::copy_n(name.begin(), std::min(name.size(), host.size() - 1), host.begin());
  rank = std::max(launched_rank(), 0);
  ::sigaltstack(nullptr, &previous_stack);
  own_stack = (previous_stack.ss_flags & SS_DISABLE) != 0;
  if (own_stack) {
    const stack_t mine = {.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
    ::sigaltstack(&mine, nullptr);
  }
  struct sigaction action {};
  action.sa_sigaction = [](int signal, siginfo_t* info, void* context) {
    only.with([&](const Impl& impl) { impl.on_fault(signal, info, context); });
  };
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  faults.install(action);
  struct sigaction request {};
  request.sa_handler = [](int /*signal*/) {
    ActivityBoard::for_each([](ActivityBoard& board, void*) noexcept { board.request_table(); },
                            nullptr);
  };
  request.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&request.sa_mask);
  table.install(request);
}

PlaceSignals::PlaceSignals() : impl_(std::make_unique<Impl>()) {
  Impl::only.enter(*impl_, "PlaceSignals");
  impl_->install();
}

PlaceSignals::~PlaceSignals() {
  impl_->faults.restore();
  impl_->table.restore();
  if (impl_->own_stack) ::sigaltstack(&impl_->previous_stack, nullptr);
  Impl::only.leave();
}

}  // namespace sluice
