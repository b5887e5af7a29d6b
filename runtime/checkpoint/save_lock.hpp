// DIR/lock: one job at a time saves into a directory.
//
// The file holds host, boot id, pid namespace, process and its start time, job id (of the
// environment: Slurm's, PBS's, Kubernetes') and since when. A thread renews its modification time
// every few seconds.
// A lock is stale where its process is gone (same boot id and pid namespace), or has the same
// non-empty job id and is of another start of this job, or was not renewed while this watched it
// for kWatch. A stale lock is taken over.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace sluice {

class SaveLock {
 public:
  static constexpr auto kRenew = std::chrono::seconds(3);
  static constexpr auto kWatch = std::chrono::seconds(12);

  // Takes DIR/lock; DIR exists. Throws Error(kIo) that names the host, process, job and age of the
  // one that holds it. `watch`: how long to watch a lock whose process cannot be looked at (tests
  // shorten it). `note` is called once before it waits, with a line that says so.
  explicit SaveLock(const std::filesystem::path& directory,
                    std::chrono::milliseconds watch = kWatch,
                    const std::function<void(const std::string&)>& note = {});
  // Removes the lock, if it is still this one's. A fork'ed child does not.
  ~SaveLock();
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;

  // Throws Error(kIo) where the lock is gone or another job's: nothing may be published then.
  void require_held() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
