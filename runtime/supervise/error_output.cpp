#include "runtime/supervise/error_output.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace sluice {
namespace {

constexpr std::size_t kFull = 1U << 20;
// A pipe that is ready takes so much without blocking (PIPE_BUF of Linux).
constexpr std::size_t kAtOnce = 4096;

}  // namespace

void ErrorOutput::add(std::string_view text) { waiting_ += text; }
void ErrorOutput::say(std::string_view text) { waiting_ += fmt::format("sluice run: {}\n", text); }
bool ErrorOutput::full() const { return waiting_.size() - written_ >= kFull; }

void ErrorOutput::write_some() {
  const std::size_t size = std::min(waiting_.size() - written_, kAtOnce);
  if (size == 0) return;
  const ssize_t count = ::write(fd_, waiting_.data() + written_, size);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  written_ = count < 0 ? waiting_.size() : written_ + static_cast<std::size_t>(count);
  if (written_ == waiting_.size()) {
    waiting_.clear();
    written_ = 0;
  } else if (written_ >= kFull) {
    waiting_.erase(0, written_);
    written_ = 0;
  }
}

void ErrorOutput::flush(int wake) {
  while (fd() >= 0) {
    std::array<pollfd, 2> fds = {{{.fd = fd_, .events = POLLOUT, .revents = 0},
                                  {.fd = wake, .events = POLLIN, .revents = 0}}};
    if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) {
      write_some();
    } else if (fds[1].revents != 0) {
      return;
    }
  }
}

}  // namespace sluice
