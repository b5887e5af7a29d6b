// The frame of every program with MPI: the examples, the commands of `sluice`, and yours. And how
// signals ask it to stop.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <type_traits>

#include <sluice/world.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// Runs `body` with MPI up; returns the process's exit code. If run_main() itself initialises MPI,
// all ranks first tell rank 0 who they are. Ranks that do not answer are Error(kPeer), ranks of
// another build of Sluice or another MPI library Error(kMismatch). Each part of the start may take
// 60 s, or the seconds in the environment variable SLUICE_START_TIMEOUT; 0 means no limit.
//
// An error is printed once in the whole
// job, by the rank that saw it first. Where every rank throws the same Error(kUsage), all of them
// return its exit code and MPI ends normally; any other error ends the job on every rank within
// about two seconds by MPI_Abort with exit_code(code). An exception that is no Error has the code
// kUser; std::filesystem::filesystem_error has kIo. Nothing escapes.
int run_main(int argc, char** argv, const std::function<void(World& world)>& body);

// Makes signals a request to stop, for a program that stops at the end of a step.
//
// The first SIGUSR1, SIGTERM, SIGINT or SIGHUP is the request. Its handler gives the others their
// default action, so a second one ends the process at once. A SIGHUP does not, which a terminal
// that closes may send twice; one that was ignored, as by nohup, stays so. For all but SIGUSR1 the
// handler also writes a line to standard error: this process's rank, the signal, and what
// describe() was given. When one rank of a job dies, the launcher sends SIGTERM to the others.
// Their step then never ends, nothing is saved, and SIGKILL follows: the line is what they report.
//
// One object may exist in a process; a second is Error(kUsage). The destructor restores the
// previous actions. One thread constructs, describes and destroys; signals may come on any. A
// handler runs on the alternate stack of its thread, if it has one.
class StopSignals {
 public:
  // The request is only seen by requested().
  StopSignals() : StopSignals([]() noexcept {}) {}
  // `stop` is a noexcept function object of references and plain values. It is copied, and called
  // once, in the signal handler: it may only do what is async-signal-safe, such as
  // Checkpointer::request_stop() or a store to a lock-free atomic.
  template <typename Stop>
  explicit StopSignals(const Stop& stop)
      : StopSignals(
            [](const void* copy) noexcept {
              (*std::launder(reinterpret_cast<const Stop*>(copy)))();
            },
            copy_of(stop)) {
    static_assert(std::is_nothrow_invocable_v<const Stop&>);
  }
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Before each step: what the line names, that is the step that begins and the last complete save.
  // `save` may be empty.
  void describe(std::uint64_t step, const std::filesystem::path& save);
  // Whether a signal has come to this process. Ranks may differ: they have to agree before they
  // act, as Checkpointer::stop_requested() does.
  [[nodiscard]] bool requested() const noexcept;

 private:
  struct Copy {
    alignas(std::max_align_t) std::array<std::byte, 64> bytes;
  };
  template <typename Stop>
  static Copy copy_of(const Stop& stop) {
    static_assert(std::is_trivially_copyable_v<Stop> && sizeof(Stop) <= sizeof(Copy::bytes));
    Copy copy{};
    new (copy.bytes.data()) Stop(stop);
    return copy;
  }
  StopSignals(void (*call)(const void* copy) noexcept, const Copy& stop);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Makes signals tell where the process is in its pipelines. For a program that wants it: the
// commands of `sluice` have one, a pipeline never installs a handler.
//
// SIGSEGV, SIGBUS, SIGFPE and SIGABRT write one line to standard error for each pipeline: rank,
// host, stages, action and step. Then the handler that was there before runs, or the process ends
// by the signal. SIGUSR2 asks the watchdog of each pipeline for its table of ranks
// (PipelineOptions::Watch). Handlers call only what is async-signal-safe, on an alternate stack of
// the thread that constructs this.
//
// One object may exist in a process; a second is Error(kUsage). Construct it after MPI is up, whose
// own handlers then run after these. The destructor restores the previous actions.
class PlaceSignals {
 public:
  PlaceSignals();
  ~PlaceSignals();
  PlaceSignals(const PlaceSignals&) = delete;
  PlaceSignals& operator=(const PlaceSignals&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
#pragma GCC visibility pop
