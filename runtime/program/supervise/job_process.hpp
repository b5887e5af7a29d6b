// A job as processes: the launcher, a child of this process in a session of its own, which a
// terminal's signals do not reach, and what it starts on this host.
//
// To stop: the launcher gets SIGUSR1. If it has not ended after `grace` seconds, or end() is
// called, its process group gets SIGTERM, and five seconds later every process of the job SIGKILL.
// Processes of the job whose parents die become children of this process: what outlives the
// launcher gets SIGTERM, and after two seconds SIGKILL. If this process dies, the kernel sends
// SIGTERM to the launcher.
//
// Linux only. For a process with one thread and no children besides, which is told of SIGCHLD.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace sluice {

struct JobEnd {
  int code = 0;            // as a shell has it: 128 + the signal
  bool by_signal = false;  // the launcher itself
};

// Seconds of a clock that does not go back.
[[nodiscard]] double clock_seconds();

class JobProcess {
 public:
  // Starts the launcher, with standard input from /dev/null. Words as of execvp. Error(kUsage) for
  // a program that cannot be started, naming the cause; Error(kInternal) where the kernel has no
  // process or pipe left.
  JobProcess(const std::vector<std::string>& words, const std::vector<std::string>& environment,
             double grace);
  // Kills what is left of the job, and waits for it.
  ~JobProcess();
  JobProcess(const JobProcess&) = delete;
  JobProcess& operator=(const JobProcess&) = delete;

  // Of the job's standard error; reads do not block. No end of file shows the end of the job.
  [[nodiscard]] int errors_fd() const { return errors_; }

  // Nothing happens where the job has ended, or does so already.
  void stop();
  void end();
  void kill();
  // The launcher gets SIGUSR2.
  void tell();

  // Does what is due. How the job ended, once nothing of it is left. To be called after SIGCHLD and
  // after wait() seconds.
  [[nodiscard]] std::optional<JobEnd> check();
  // None: nothing is due before SIGCHLD.
  [[nodiscard]] std::optional<double> wait() const;

 private:
  enum class Stage { kRunning, kStopping, kEnding, kKilling };

  void enter(Stage stage, double seconds);

  double grace_;
  int errors_ = -1;
  pid_t launcher_ = -1;
  std::optional<JobEnd> end_;  // of the launcher
  Stage stage_ = Stage::kRunning;
  double deadline_ = 0;  // of any other stage
};

}  // namespace sluice
