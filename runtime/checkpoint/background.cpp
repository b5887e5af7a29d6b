#include "runtime/checkpoint/background.hpp"

#include <utility>

#include "comm/base/threads.hpp"

namespace sluice {

Background::Background() : thread_(start_thread("writer of saves", [this] { run(); })) {}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Background::start(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
    error_ = nullptr;
    busy_ = true;
  }
  changed_.notify_all();
}

bool Background::busy() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

bool Background::failed() const {
  const std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

void Background::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
}

void Background::rethrow() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void Background::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return busy_ || end_; });
    if (!busy_) return;
    const std::function<void()> job = std::exchange(job_, nullptr);
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = std::move(error);
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace sluice
