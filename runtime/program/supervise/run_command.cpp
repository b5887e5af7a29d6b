#include "runtime/program/supervise/run_command.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/supervise/hosts.hpp"
#include "runtime/program/supervise/job_command.hpp"
#include "runtime/program/supervise/job_watch.hpp"
#include "runtime/program/supervise/restart_policy.hpp"

namespace sluice {
namespace {

constexpr int kMostRestarts = 1'000'000;
constexpr double kMostSeconds = 1e6;
constexpr const char* kAbout =
    R"(Starts a job, and starts it again when it ends by an error that a restart may mend:

  sluice run -- mpirun -n 8 sluice train --pipeline 8 --save run --save-minutes 10 --resume auto

It gives up when two restarts in a row make no progress. SIGINT, SIGTERM, SIGHUP and SIGUSR1
stop the job after its step, saved. With --hosts it leaves out a host that is lost twice or
stays down, and with --layouts it takes the next layout that fits:

  sluice run --hosts hosts --layouts 4x2,2x2 -- mpirun -n {ranks} --hostfile {hostfile} \
    sluice train --pipeline {pipeline} --replicas {replicas} --save run --resume auto

Standard input of the job is empty.)";

struct RunOptions {
  std::vector<std::string> command;
  int restarts = 100;
  double grace = 300;
  double pause = 1;
  std::string hosts, layouts;  // may be empty
};

OptionTable make_table(RunOptions& options) {
  OptionTable table("sluice run [options] -- COMMAND", kAbout);
  table.add_integer("restarts", options.restarts, 0, kMostRestarts, "at most, in all", "",
                    "unlimited");
  table.add_real("pause", options.pause, {.low = 0, .high = kMostSeconds},
                 "seconds before the first restart; twice as many, up to 60, after each start that "
                 "lasted less than a minute");
  table.add_real("grace", options.grace, {.low = 0, .high = kMostSeconds},
                 "seconds for a step and a save, after a request to stop, until the job is ended");
  table.add_text("hosts", options.hosts, "FILE", "a host file of mpirun, for {hostfile}");
  table.add_text("layouts", options.layouts, "LIST",
                 "pipeline x replicas [x tensor], best first, such as 4x2,2x2 or 2x2x2,2x2x1, for "
                 "{ranks}, {pipeline}, {replicas} and {tensor}");
  return table;
}

// Where standard input, output or error is closed, the next descriptor that is opened would take
// its place, and get what is meant for it.
void open_standard_streams() {
  int fd = -1;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  ::close(fd);
}

std::vector<std::string> own_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

// A file in memory that other processes of the user can read, for as long as this exists.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& text) : fd_(::memfd_create("hosts", MFD_CLOEXEC)) {
    if (fd_ < 0 || ::write(fd_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
      throw_error(ErrorCode::kInternal, "cannot make a host file: {}", std::strerror(errno));
    }
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  [[nodiscard]] std::string path() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), fd_); }

 private:
  int fd_;
};

// An option is given where the command has one of these placeholders, and only there.
void require_use(const JobCommand& command, const char* option, const std::string& value,
                 const std::vector<const char*>& names) {
  const auto used =
      std::ranges::find_if(names, [&](const char* name) { return command.uses(name); });
  if (used != names.end() && value.empty()) {
    throw_usage("the command has {{{}}}, which needs --{}", *used, option);
  }
  if (used == names.end() && !value.empty()) {
    throw_usage("option --{} has no effect: the command lacks {{{}}}", option,
                joined(names, "}, {"));
  }
}

class Supervisor {
 public:
  explicit Supervisor(const RunOptions& options)
      : options_(options),
        command_(options.command),
        places_(options.hosts, options.layouts),
        policy_(options.restarts, options.pause),
        out_(STDERR_FILENO),
        environment_(job_environment(own_environment())) {
    require_use(command_, "hosts", options_.hosts, {"hostfile"});
    require_use(command_, "layouts", options_.layouts, {"ranks", "pipeline", "replicas", "tensor"});
    require_division("replicas", &Layout::replicas, kVirtualReplicas);
    require_division("tensor", &Layout::tensor, kTensorShards);
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
  // Of the parts that the command names among what it is given of each layout.
  void require_division(const char* placeholder, int Layout::*holders,
                        const DivisionNames& names) const {
    const std::optional<int> parts = command_.number_of(names.option);
    if (!parts || !command_.uses(placeholder)) return;
    sluice::require_division(options_.layouts, holders, names, *parts);
  }

  int attempts() {
    while (true) {
      const Attempt attempt = start_and_watch();
      const int code = attempt.end.code;
      if (attempt.steps) steps_.push_back(*attempt.steps);
      if (code == kDoneCode || code == kStoppedCode || stops_.asked()) return code;
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
                {"replicas", std::to_string(layout->replicas)},
                {"tensor", std::to_string(layout->tensor)}};
    }
    std::optional<MemoryFile> host_file;
    if (!options_.hosts.empty()) {
      host_file.emplace(places_.host_file());
      values.emplace("hostfile", host_file->path());
    }
    JobProcess job(command_.fill(values), environment_, options_.grace);
    return watch_job(job, stops_, out_);
  }

  int give_up(const Attempt& attempt, const std::string& reason) {
    out_.say(fmt::format("giving up: {}; {}", describe(attempt), reason));
    return attempt.end.code;
  }

  bool leave_out(const std::vector<std::string>& hosts) {
    const std::optional<Layout> before = places_.layout();
    out_.say(fmt::format("leaving out {} from now on", joined(hosts, ", ")));
    if (!places_.leave_out(hosts)) return false;
    const std::optional<Layout>& now = places_.layout();
    if (now && *now != *before) {
      out_.say(fmt::format(
          "layout {} instead of {}: {}", to_string(*now), to_string(*before),
          now->replicas == before->replicas && now->tensor == before->tensor
              ? "the same bits"
              : "other replicas or tensor ranks: the same bits where they can divide the run's "
                "virtual replicas and tensor shards"));
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
    const double end = clock_seconds() + seconds;
    while (true) {
      while (stops_.take()) {
      }
      if (stops_.asked()) return false;
      const double left = end - clock_seconds();
      if (left <= 0) return true;
      wait_for(stops_, out_, -1, left);
    }
  }

  void summarise() {
    if (policy_.restarts() == 0) return;
    const double seconds = clock_seconds() - start_;
    std::string text = fmt::format("{} restart{} in {:.0f} s", policy_.restarts(),
                                   policy_.restarts() == 1 ? "" : "s", seconds);
    if (!steps_.empty()) {
      const RunTotals totals = totals_of(steps_);
      text += fmt::format("; {:.1f} % of the time in steps that count, {} step{} lost",
                          100 * std::min(1.0, totals.step_seconds / seconds), totals.steps_lost,
                          totals.steps_lost == 1 ? "" : "s");
    }
    out_.say(text);
  }

  const RunOptions& options_;
  JobCommand command_;
  Places places_;
  RestartPolicy policy_;
  StopRequests stops_;
  JobOutput out_;
  std::vector<std::string> environment_;
  std::vector<AttemptSteps> steps_;  // of all starts
  const double start_ = clock_seconds();
};

}  // namespace

int run_job_command(const std::vector<std::string>& arguments) {
  RunOptions options;
  OptionTable table = make_table(options);
  const auto dashes = std::ranges::find(arguments, "--");
  if (dashes != arguments.end()) options.command.assign(dashes + 1, arguments.end());
  int code = 0;
  const int refused = run_guarded(table, {arguments.begin(), dashes}, [&] {
    open_standard_streams();
    code = Supervisor(options).run();
  });
  return refused != 0 ? refused : code;
}

}  // namespace sluice
