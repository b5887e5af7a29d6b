// One thread that runs one job at a time and never calls MPI.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace sluice {

class Background {
 public:
  // Its thread takes no signals: they are the program's.
  Background();
  // Waits for the running job.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Requires: not busy. `job` and what it refers to live until it is done.
  void start(std::function<void()> job);
  [[nodiscard]] bool busy() const;
  void wait();
  // Whether the last job threw, and nobody has taken it yet.
  [[nodiscard]] bool failed() const;
  // Throws what the last job threw, once; else returns. Requires: not busy.
  void rethrow();

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  std::exception_ptr error_;
  bool busy_ = false, end_ = false;
  std::thread thread_;
};

}  // namespace sluice
