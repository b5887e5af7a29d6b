#include "runtime/supervise/supervisor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/launch/command_template.hpp"
#include "runtime/launch/host_file.hpp"
#include "runtime/launch/job_environment.hpp"
#include "runtime/launch/job_process.hpp"
#include "runtime/launch/layouts.hpp"
#include "runtime/supervise/error_output.hpp"
#include "runtime/supervise/job_watch.hpp"
#include "runtime/supervise/restart_policy.hpp"
#include "runtime/supervise/run_account.hpp"
#include "runtime/supervise/stop_requests.hpp"

namespace sluice {
namespace {

std::vector<std::string> own_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

// Where standard input, output or error is closed, the next descriptor that is opened would take
// its place, and get what is meant for it.
void open_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != fd) {
      throw_error(ErrorCode::kInternal, "cannot open '/dev/null': {}", std::strerror(errno));
    }
  }
}

// A file in the folder for temporary files, for as long as this exists.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    std::error_code error;
    std::filesystem::path folder = std::filesystem::temp_directory_path(error);
    if (error) folder = "/tmp";
    path_ = (folder / "sluice-hosts-XXXXXX").string();
    const int fd = ::mkstemp(path_.data());
    if (fd < 0) fail();
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t size = ::write(fd, text.data() + done, text.size() - done);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0) {
        const int why = errno;
        ::close(fd);
        ::unlink(path_.c_str());
        errno = why;
        fail();
      }
      done += static_cast<std::size_t>(size);
    }
    ::close(fd);
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  [[noreturn]] void fail() const {
    throw_error(ErrorCode::kIo, "cannot write the host file '{}': {}", path_, std::strerror(errno));
  }

  std::string path_;
};

void require_that_options_fit(const SupervisorOptions& options, const CommandTemplate& command) {
  const bool hostfile = command.uses("hostfile");
  if (hostfile && options.hosts.empty()) {
    throw_usage("the command has {{hostfile}}, which needs --hosts FILE");
  }
  if (!hostfile && !options.hosts.empty()) {
    throw_usage("option --hosts has no effect: the command has no {{hostfile}}");
  }
  bool used = false;
  for (const char* name : {"ranks", "pipeline", "replicas"}) {
    if (!command.uses(name)) continue;
    used = true;
    if (options.layouts.empty()) {
      throw_usage("the command has {{{}}}, which needs --layouts, such as --layouts 4x2", name);
    }
  }
  if (!used && !options.layouts.empty()) {
    throw_usage(
        "option --layouts has no effect: the command has none of {{ranks}}, {{pipeline}} and "
        "{{replicas}}");
  }
}

// Hosts that are left, and the layout that fits them.
class Places {
 public:
  Places(const std::string& host_file, const std::string& layouts) {
    if (!host_file.empty()) hosts_ = read_host_file(host_file);
    if (layouts.empty()) return;
    layouts_ = parse_layouts(layouts);
    for (const HostLine& host : hosts_) {
      if (host.slots) continue;
      throw_error(ErrorCode::kData,
                  "host '{}' of '{}' has no number of slots, which --layouts needs; write '{} "
                  "slots=N'",
                  host.name, host_file, host.name);
    }
    if (!choose()) {
      throw_usage("option --layouts: none of '{}' fits the {} slots of '{}'", layouts,
                  *slots_of(hosts_), host_file);
    }
  }

  // False where no layout fits the hosts that are left.
  bool leave_out(const std::vector<std::string>& names) {
    std::erase_if(hosts_, [&](const HostLine& host) {
      return std::find(names.begin(), names.end(), host.name) != names.end();
    });
    return layouts_.empty() || choose();
  }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const HostLine& host : hosts_) result.push_back(host.name);
    return result;
  }
  [[nodiscard]] std::span<const HostLine> hosts() const { return hosts_; }
  [[nodiscard]] const std::optional<Layout>& layout() const { return layout_; }
  // Of all hosts that are left.
  [[nodiscard]] int slots() const { return slots_of(hosts_).value_or(0); }

 private:
  bool choose() {
    layout_ = first_that_fits(layouts_, hosts_.empty() ? std::nullopt : slots_of(hosts_));
    return layout_.has_value();
  }

  std::vector<HostLine> hosts_;  // none: the command names them
  std::vector<Layout> layouts_;
  std::optional<Layout> layout_;
};

class Supervisor {
 public:
  explicit Supervisor(const SupervisorOptions& options)
      : options_(options),
        command_(options.command),
        places_(options.hosts, options.layouts),
        policy_(options.restarts, options.pause),
        out_(STDERR_FILENO) {
    require_that_options_fit(options_, command_);
    const std::vector<std::string> current = own_environment();
    if (const int ranks = ranks_around(current); ranks > 1) {
      throw_usage(
          "'sluice run' is one of {} ranks of an MPI job; start it alone: it starts the launcher",
          ranks);
    }
    environment_ = job_environment(current);
  }

  int run() {
    try {
      const int code = attempts();
      summarise();
      out_.flush(stops_.fd());
      return code;
    } catch (...) {
      out_.flush(stops_.fd());
      throw;
    }
  }

 private:
  int attempts() {
    while (true) {
      const Attempt attempt = start_and_watch();
      if (attempt.steps) account_.add(*attempt.steps);
      const ExitKind kind = kind_of(attempt);
      if (kind == ExitKind::kDone || kind == ExitKind::kStopped) return attempt.end.code;
      explain(attempt);
      if (stops_.asked()) return attempt.end.code;
      if (kind == ExitKind::kHopeless) {
        return give_up(attempt, "another start ends in the same way");
      }
      const RestartDecision decision = policy_.after(attempt, places_.names());
      if (!decision.again) return give_up(attempt, decision.reason);
      if (!decision.left_out.empty() && !leave_out(decision.left_out)) {
        return give_up(
            attempt,
            fmt::format("no layout of --layouts fits the {} slots that are left", places_.slots()));
      }
      announce(attempt, decision);
      if (!pause(decision.pause)) return kStoppedCode;
    }
  }

  Attempt start_and_watch() {
    Placeholders values;
    if (const auto& layout = places_.layout()) {
      values = {{"ranks", std::to_string(layout->ranks())},
                {"pipeline", std::to_string(layout->pipeline)},
                {"replicas", std::to_string(layout->replicas)}};
    }
    std::optional<TemporaryFile> host_file;
    if (!options_.hosts.empty()) {
      host_file.emplace(host_file_text(places_.hosts()));
      values.emplace_back("hostfile", host_file->path());
    }
    JobProcess job(command_.fill(values), environment_, options_.grace);
    return watch_job(job, stops_, out_, {.verbose = options_.verbose});
  }

  // The launcher's own words, where nothing else says what happened.
  void explain(const Attempt& attempt) {
    const JobFindings& findings = attempt.findings;
    const bool known = attempt.hang || findings.killed || !findings.lost_hosts.empty() ||
                       !findings.error.empty() || stops_.asked();
    if (!known) out_.add(attempt.launcher_text);
  }

  int give_up(const Attempt& attempt, const std::string& reason) {
    out_.say(fmt::format("giving up: {}; {}", describe(attempt), reason));
    return attempt.end.code;
  }

  bool leave_out(const std::vector<std::string>& hosts) {
    const std::optional<Layout> before = places_.layout();
    out_.say(fmt::format("leaving out {} from now on", fmt::join(hosts, ", ")));
    if (!places_.leave_out(hosts)) return false;
    const std::optional<Layout>& now = places_.layout();
    if (now && *now != *before) {
      out_.say(fmt::format("layout {} instead of {}: {}", to_string(*now), to_string(*before),
                           now->replicas == before->replicas
                               ? "the same bits"
                               : "other replicas, so results equal those to rounding, not to the "
                                 "bit"));
    }
    return true;
  }

  void announce(const Attempt& attempt, const RestartDecision& decision) {
    std::string from;
    if (attempt.steps) {
      // A save is complete before the job says so: there may be a later one.
      from = attempt.steps->saved == 0
                 ? ", from the beginning or the first save"
                 : fmt::format(", from step {} or a later save", attempt.steps->saved);
    }
    out_.say(fmt::format("{}; restart {} in {:g} s{}", describe(attempt), policy_.restarts(),
                         decision.pause, from));
  }

  // False where a request to stop came.
  bool pause(double seconds) {
    const double end = steady_seconds() + seconds;
    while (true) {
      const double now = steady_seconds();
      while (stops_.take(now)) {
      }
      if (stops_.asked()) return false;
      if (now >= end) return true;
      pollfd fds[2] = {{.fd = stops_.fd(), .events = POLLIN, .revents = 0},
                       {.fd = out_.fd(), .events = POLLOUT, .revents = 0}};
      const auto most = static_cast<int>(std::ceil(1000 * std::min(end - now, 3600.0)));
      if (::poll(fds, 2, most) > 0 && fds[1].revents != 0) out_.write_some();
    }
  }

  void summarise() {
    if (policy_.restarts() == 0 && !options_.verbose) return;
    const double seconds = steady_seconds() - start_;
    std::string text = fmt::format("{} restart{} in {:.0f} s", policy_.restarts(),
                                   policy_.restarts() == 1 ? "" : "s", seconds);
    if (!account_.empty()) {
      const RunTotals totals = account_.totals();
      text += fmt::format("; {:.1f} % of the time in steps that count, {} step{} lost",
                          100 * std::min(1.0, totals.step_seconds / seconds), totals.steps_lost,
                          totals.steps_lost == 1 ? "" : "s");
    }
    out_.say(text);
  }

  const SupervisorOptions& options_;
  CommandTemplate command_;
  Places places_;
  RestartPolicy policy_;
  StopRequests stops_;
  ErrorOutput out_;
  std::vector<std::string> environment_;
  RunAccount account_;
  const double start_ = steady_seconds();
};

}  // namespace

int supervise(const SupervisorOptions& options) {
  open_standard_streams();
  return Supervisor(options).run();
}

}  // namespace sluice
