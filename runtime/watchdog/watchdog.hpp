// The watchdog of a pipeline: a thread on each rank that says who has stopped, died or waits for
// ever, when the thread that drives the pipeline cannot (runtime/README.md, "When it hangs").
//
// The thread never uses MPI. It reads what this rank does from its ActivityBoard, and neither
// allocates nor locks anything that the driving thread uses.
#pragma once

#include <memory>

#include <sluice/options.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/watchdog/watcher.hpp"

namespace sluice {

class Watchdog {
 public:
  // Collective over `world`, whose ranks are those of `job`; `options` are the same on all ranks.
  // Connects the ranks, for at most five seconds. Where that fails, the first rank says so on
  // standard error, and no rank watches another. Throws Error(kUsage) for options that cannot work.
  Watchdog(Collectives& world, WatchedJob job, const PipelineOptions::Watch& options);
  // Not collective. Says goodbye to the other ranks; takes at most two seconds and a half.
  ~Watchdog();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws Error(kUsage) that names the option and what is legal.
void require_sensible(const PipelineOptions::Watch& options);

}  // namespace sluice
