// Standard error of a supervisor, written without ever blocking: a reader that has stopped does not
// keep the supervisor from its job.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sluice {

class ErrorOutput {
 public:
  explicit ErrorOutput(int fd) : fd_(fd) {}

  void add(std::string_view text);
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
  int fd_;
  std::string waiting_;
  std::size_t written_ = 0;  // of waiting_
};

}  // namespace sluice
