// The standard error of a job: it is passed on to that of this process, without the events that
// `sluice train` and the watchdog write there (runtime/process/supervisor_events.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct JobEvent {
  enum class Kind {
    kStart,  // steps begin; `step` are done, by a save, or 0
    kStep,   // `step` is done, `seconds` were spent in the steps of this start
    kSave,   // the save of `step` is complete
    kEnd,    // the last step is done and saved; otherwise as kStep
    kHang,   // a report of the watchdog
  };
  enum class Hang {
    kBusy,      // ranks do not finish what they do
    kDeadlock,  // all ranks live and wait; no host is to blame
    kLost,      // ranks do not answer
    kEnded,     // their processes have ended
  };
  Kind kind = Kind::kStep;
  std::uint64_t step = 0;
  double seconds = 0;
  Hang hang = Hang::kBusy;              // kHang
  std::vector<std::string> hosts = {};  // kHang: of the ranks that are lost or have ended
  std::vector<int> ranks = {};          // kHang
};

// Empty for text that is no event of these kinds, in any way: a line may be cut or mixed with
// another one.
[[nodiscard]] std::optional<JobEvent> parse_event(std::string_view json);

// Writes without ever blocking: a reader that has stopped does not keep the supervisor from its
// job.
class JobOutput {
 public:
  explicit JobOutput(int fd) : fd_(fd) {}

  // A piece of the job's text. Whole lines are passed on as they come; a line of more than 64 KiB
  // in pieces. Returns the events in it. Open MPI 5 may put an event behind a part of another line,
  // which is passed on.
  std::vector<JobEvent> feed(std::string_view piece);
  // No more text of this job comes. A last line without an end counts.
  std::vector<JobEvent> finish();
  // "sluice run: <text>" as a line.
  void say(std::string_view text);

  // So much waits that no more should be read from a job.
  [[nodiscard]] bool full() const;
  // To be polled for POLLOUT; -1: nothing waits.
  [[nodiscard]] int fd() const { return waiting_.empty() ? -1 : fd_; }
  // Writes what goes at once; call it when fd() is ready. Text for an output that is closed is
  // dropped.
  void write_some();
  // Writes all, unless `wake` becomes readable.
  void flush(int wake);

 private:
  void take_line(std::string_view line, std::vector<JobEvent>& events);

  int fd_;
  std::string partial_;  // a line of the job that has not ended
  std::string waiting_;
  std::size_t written_ = 0;  // of waiting_
};

}  // namespace sluice
