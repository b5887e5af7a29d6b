// Ends a process that waits inside MPI's start for other hosts, where no error can be thrown.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/doctor/network_facts.hpp"

namespace sluice {

// Unless stop() or the destructor comes within `seconds`, a thread of this object writes what
// `text()` returns as one line of error to standard error, and ends the process with the exit code
// of ErrorCode::kPeer. An empty text is not written. The thread calls neither MPI nor anything
// else of the caller.
class StartWatch {
 public:
  StartWatch(double seconds, std::function<std::string()> text);
  ~StartWatch();
  StartWatch(const StartWatch&) = delete;
  StartWatch& operator=(const StartWatch&) = delete;

  // From one thread.
  void stop();

 private:
  void watch(double seconds, const std::function<std::string()>& text);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

// What a host says that waits for others: its interfaces, those that MPI should not use, and the
// network to choose.
[[nodiscard]] std::string no_start_text(const std::string& host, double seconds,
                                        const NetworkFacts& facts);

}  // namespace sluice
