// Collects the traced steps of a run and writes them, with planned and actual tracks and an arrow
// for each message. All times are put on the clock of rank 0.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include <sluice/pipeline.hpp>

#include "comm/group/clock_offset.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/report/layer_table.hpp"
#include "runtime/report/profile.hpp"

namespace sluice {

class Timeline {
 public:
  // Collective. Compares the clocks; call it before the first step that is added. Takes a few
  // milliseconds per rank of the job.
  void begin(Pipeline& pipeline);
  // Keeps the last step's events. Not collective.
  void add(const Pipeline& pipeline);
  // Collective. Rank 0 writes the file; the planned track is the plan's simulation with the mean
  // times of the collected steps, starting where each step started; `layers` and their times stand
  // in the file. Compares the clocks again, and
  // corrects a constant drift since begin(). Returns, on every rank, the largest error in seconds
  // of a rank's clock against that of rank 0.
  double write(Pipeline& pipeline, const std::filesystem::path& path,
               const LayerTable& layers) const;

 private:
  struct Step {
    double start = 0;  // as in `events`, on this rank's clock
    std::vector<TraceEvent> events;
  };
  std::vector<Step> steps_;
  Profile profile_;
  std::optional<ClockOffset> begun_;
};

}  // namespace sluice
