#include "runtime/watchdog/async_writer.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string_view>
#include <system_error>
#include <utility>

#include "comm/base/threads.hpp"
#include "runtime/files/atomic_file.hpp"

namespace sluice {
namespace {

constexpr auto kEndTime = std::chrono::seconds(2);
constexpr int kMostNames = 100;
constexpr std::size_t kMostWaitingJobs = 64;

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void write_new(const std::filesystem::path& directory, const std::string& stem,
               std::string_view text) {
  for (int number = 1; number <= kMostNames; ++number) {
    const std::string name = number == 1 ? stem + ".txt" : fmt::format("{}-{}.txt", stem, number);
    const int file =
        ::open((directory / name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0 && errno == EEXIST) continue;
    if (file < 0) {
      write_all(STDERR_FILENO,
                fmt::format("sluice: watchdog: cannot write '{}': {}\n",
                            (directory / name).string(), std::generic_category().message(errno)));
      return;
    }
    write_all(file, text);
    ::close(file);
    return;
  }
}

}  // namespace

struct AsyncWriter::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;  // the first is under way
  bool started = false, over = false, ended = false;
};

AsyncWriter::AsyncWriter() : state_(std::make_shared<State>()) {}

// The thread owns the state too: it may outlive the scribe.
void AsyncWriter::start() {
  start_thread("watchdog's writer", [state = state_] {
    std::unique_lock lock(state->mutex);
    while (true) {
      state->changed.wait(lock, [&] { return state->over || !state->jobs.empty(); });
      if (state->jobs.empty()) break;
      const std::function<void()> job = state->jobs.front();
      lock.unlock();
      job();
      lock.lock();
      state->jobs.pop_front();
    }
    state->ended = true;
    state->changed.notify_all();
  }).detach();
}

AsyncWriter::~AsyncWriter() {
  std::unique_lock lock(state_->mutex);
  if (!state_->started) return;
  state_->over = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kEndTime, [&] { return state_->ended; });
}

void AsyncWriter::run(std::function<void()> job) {
  const std::lock_guard lock(state_->mutex);
  if (!std::exchange(state_->started, true)) start();
  if (state_->jobs.size() >= kMostWaitingJobs) return;
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_all();
}

void AsyncWriter::say(std::string text) {
  run([text = std::move(text)] { write_all(STDERR_FILENO, text); });
}

void AsyncWriter::say_now(std::string text) {
  // A pipe that polls as writable takes that many bytes.
  pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (text.size() > PIPE_BUF || ::poll(&out, 1, 0) != 1 || (out.revents & POLLOUT) == 0) {
    return say(std::move(text));
  }
  write_all(STDERR_FILENO, text);
}

void AsyncWriter::replace(const std::filesystem::path& path, std::string text) {
  run([path, text = std::move(text)] {
    try {
      write_file(path, text);
    } catch (const std::exception&) {  // the next one may succeed
    }
  });
}

void AsyncWriter::add_file(const std::filesystem::path& directory, const std::string& stem,
                           std::string text) {
  run([=, text = std::move(text)] { write_new(directory, stem, text); });
}

bool AsyncWriter::idle() const {
  const std::lock_guard lock(state_->mutex);
  return state_->jobs.empty();
}

}  // namespace sluice
