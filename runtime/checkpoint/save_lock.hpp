// DIR/lock: one job at a time saves into a directory.
//
// The file names host, process and since when. A thread renews its modification time every few
// seconds. A lock is stale, and is taken over, at once where its process is gone from this host,
// and else where it is not renewed while this one watches it for kWatch.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>

namespace sluice {

class SaveLock {
 public:
  static constexpr auto kRenew = std::chrono::seconds(3);
  static constexpr auto kWatch = std::chrono::seconds(12);

  // Takes DIR/lock; DIR exists. Throws Error(kIo) that names the host and the process of the one
  // that holds it, and since when. `watch`: how long to watch a lock whose process cannot be looked
  // at (tests shorten it). `note` is called once before it waits, with a line that says so.
  explicit SaveLock(const std::filesystem::path& directory,
                    std::chrono::milliseconds watch = kWatch,
                    const std::function<void(const std::string&)>& note = {});
  // Removes the lock, if it is still this one's.
  ~SaveLock();

  // Throws Error(kIo) where the lock is gone or another job's: nothing may be published then.
  void require_held() const;

 private:
  void renew(const std::stop_token& stop) const;

  std::filesystem::path path_;
  std::string text_;
  std::jthread thread_;
};

}  // namespace sluice
