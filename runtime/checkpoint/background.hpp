// One job at a time on a thread that never calls MPI.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "comm/base/threads.hpp"

namespace sluice {

// The thread takes no signals: they are the program's. The destructor waits for the running job.
class Background {
 public:
  ~Background() { wait(); }

  // Requires: not busy. `job` and what it refers to live until it is done.
  void start(std::function<void()> job) {
    wait();
    error_ = nullptr;
    busy_ = true;
    thread_ = start_thread("writer of saves", [this, job = std::move(job)] {
      try {
        job();
      } catch (...) {
        error_ = std::current_exception();
      }
      busy_ = false;
    });
  }
  [[nodiscard]] bool busy() const { return busy_; }
  void wait() {
    if (thread_.joinable()) thread_.join();
  }
  // Whether the last job threw, and nobody has taken it yet.
  [[nodiscard]] bool failed() const { return !busy_ && error_ != nullptr; }
  // Throws what the last job threw, once; else returns. Requires: not busy.
  void rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::atomic<bool> busy_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace sluice
