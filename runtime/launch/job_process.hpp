// A job as processes: the launcher, and a keeper between it and the supervisor that sees to it that
// nothing of the job is left, whatever happens to launcher or supervisor.
//
// The keeper is a child of the supervisor in a session of its own, which a terminal's signals do
// not reach. The launcher is its child, in a process group of its own. Processes of the job whose
// parents die become children of the keeper. It ends when the launcher has ended and no process of
// the job is left on this host: what outlives the launcher gets SIGTERM, and after two seconds
// SIGKILL.
//
// To stop: the launcher gets SIGUSR1. If it has not ended after `grace` seconds, or end() is
// called, its process group gets SIGTERM, and five seconds later every process of the job SIGKILL.
// If the supervisor dies, the keeper stops the job in the same way. If the keeper dies, the
// launcher gets SIGTERM from the kernel, and the supervisor ends the rest.
//
// Linux only. For a process with one thread and no children besides. No function blocks, but for
// the destructor.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace sluice {

struct JobEnd {
  int code = 0;            // as a shell has it: 128 + the signal
  bool by_signal = false;  // the launcher itself
};

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
  // Becomes readable when the job ends.
  [[nodiscard]] int end_fd() const { return answers_; }

  // Nothing happens where the job has ended, or does so already.
  void stop();
  void end();
  void kill();
  // The launcher gets SIGUSR2.
  void tell();

  // How the job ended, once nothing of it is left.
  [[nodiscard]] std::optional<JobEnd> ended();

 private:
  void command(char what);

  std::string program_;
  int errors_ = -1, answers_ = -1, commands_ = -1;
  int keeper_ = -1;
  std::optional<JobEnd> end_;
};

}  // namespace sluice
