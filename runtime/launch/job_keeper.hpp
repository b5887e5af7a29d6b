// The process between a supervisor and a launcher (job_process.hpp has the contract).
#pragma once

namespace sluice {

// What the supervisor writes to the keeper.
inline constexpr char kStopJob = 's', kEndJob = 'e', kKillJob = 'k', kTellJob = 't';

// What the keeper writes to the supervisor, once or twice.
struct KeeperAnswer {
  enum class Kind : int { kNotStarted, kEnded } kind = Kind::kEnded;
  int value = 0;  // errno; status of waitpid()
};

struct KeeperTask {
  const char* const* words = nullptr;        // end with null
  const char* const* environment = nullptr;  // likewise
  int commands = -1;                         // to read; the end of file: the supervisor is gone
  int answers = -1;                          // to write
  int errors = -1;                           // standard error of the job, to write
  int unread = -1;                           // the other end of it
  double grace = 0;
};

// To be called in a child that has just been forked. Starts the launcher and returns the exit code
// of the keeper when nothing of the job is left.
int keep_job(const KeeperTask& task) noexcept;

// Sends the signal to every child of this process. False where it has none.
bool signal_children(int signal) noexcept;

}  // namespace sluice
