#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <thread>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

#include "comm/base/host.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/job/activity.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr std::array kFaults = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
constexpr const char* kShorter = "' has become shorter, or its disk cannot be read";
constexpr std::size_t kStackBytes = std::size_t{128} << 10;

const char* name_of_signal(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    default:
      return "SIGABRT";
  }
}

void write_line(const std::array<char, 512>& line, std::size_t size) noexcept {
  // Standard error may be closed; there is nothing else to tell.
  [[maybe_unused]] const ssize_t written =
      ::write(STDERR_FILENO, line.data(), std::min(size, line.size()));
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
  try {
    const auto end = fmt::format_to_n(
        line.data(), line.size(),
        "sluice: error: {} on rank {} on {} (stages {}), step {}: {}{}{}{}{}\n",
        name_of_signal(fault.signal), board.rank(), std::string_view(board.host()),
        std::string_view(board.stages()), now.step, now.waits ? "waiting in " : "in ", doing,
        fault.file.empty() ? "" : "; '", fault.file, fault.file.empty() ? "" : kShorter);
    write_line(line, end.size);
    ++fault.lines;
  } catch (...) {  // a format that cannot fail
  }
}

}  // namespace

struct PlaceSignals::Impl {
  void install();
  void restore() const;
  static void on_fault(int signal, siginfo_t* info, void* context);
  static void on_table(int signal);
  void chain(int signal, siginfo_t* info, void* context) const;

  // Null: there is no object. What a handler reads of it stays until no handler runs.
  static constinit std::atomic<Impl*> active;
  static constinit std::atomic<int> handlers;  // that run now

  std::array<struct sigaction, kFaults.size()> previous{};
  struct sigaction previous_table {};
  stack_t previous_stack{};
  std::vector<std::byte> stack = std::vector<std::byte>(kStackBytes);
  bool own_stack = false;
  std::array<char, 256> host{};
  int rank = 0;
};

constinit std::atomic<PlaceSignals::Impl*> PlaceSignals::Impl::active = nullptr;
constinit std::atomic<int> PlaceSignals::Impl::handlers = 0;

void PlaceSignals::Impl::on_fault(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  ++handlers;
  Impl* const impl = active;
  if (impl != nullptr) {
    Fault fault{.signal = signal, .file = {}, .lines = 0};
    if (signal == SIGBUS) fault.file = MappedFile::path_at(info->si_addr);
    ActivityBoard::for_each(&write_place, &fault);
    if (fault.lines == 0) {
      std::array<char, 512> line{};
      const auto end = fmt::format_to_n(
          line.data(), line.size(), "sluice: error: {} on rank {} on {}, outside of pipelines\n",
          name_of_signal(signal), impl->rank, std::string_view(impl->host.data()));
      write_line(line, end.size);
    }
    impl->chain(signal, info, context);
  }
  --handlers;
  errno = saved;
}

// Runs the action that was there before. The default one ends the process once this handler has
// returned.
void PlaceSignals::Impl::chain(int signal, siginfo_t* info, void* context) const {
  const auto place = std::find(kFaults.begin(), kFaults.end(), signal) - kFaults.begin();
  const struct sigaction& before = previous[static_cast<std::size_t>(place)];
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    return before.sa_sigaction(signal, info, context);
  }
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    return before.sa_handler(signal);
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  ::raise(signal);
}

void PlaceSignals::Impl::on_table(int /*signal*/) {
  ActivityBoard::for_each([](ActivityBoard& board, void*) noexcept { board.request_table(); },
                          nullptr);
}

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
  action.sa_sigaction = &Impl::on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kFaults.size(); ++i) {
    ::sigaction(kFaults[i], &action, &previous[i]);
  }
  struct sigaction table {};
  table.sa_handler = &Impl::on_table;
  table.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&table.sa_mask);
  ::sigaction(SIGUSR2, &table, &previous_table);
}

void PlaceSignals::Impl::restore() const {
  for (std::size_t i = 0; i < kFaults.size(); ++i) ::sigaction(kFaults[i], &previous[i], nullptr);
  ::sigaction(SIGUSR2, &previous_table, nullptr);
  if (own_stack) ::sigaltstack(&previous_stack, nullptr);
}

PlaceSignals::PlaceSignals() : impl_(std::make_unique<Impl>()) {
  Impl* none = nullptr;
  if (!Impl::active.compare_exchange_strong(none, impl_.get())) {
    throw Error(ErrorCode::kUsage, "one PlaceSignals may exist in a process");
  }
  impl_->install();
}

PlaceSignals::~PlaceSignals() {
  impl_->restore();
  Impl::active = nullptr;
  while (Impl::handlers > 0) std::this_thread::yield();
}

}  // namespace sluice
