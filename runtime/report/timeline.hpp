// Collects the traced steps of a run and writes them, with planned and actual tracks.
#pragma once

#include <filesystem>
#include <vector>

#include <sluice/pipeline.hpp>

#include "runtime/files/trace.hpp"
#include "runtime/report/profile.hpp"

namespace sluice {

class Timeline {
 public:
  // Keeps the last step's events. Not collective.
  void add(const Pipeline& pipeline);
  // Collective. Rank 0 writes the file; the planned track is the plan's simulation with the mean
  // times of the collected steps, starting where each step started.
  void write(Pipeline& pipeline, const std::filesystem::path& path) const;

 private:
  struct Step {
    double start = 0;
    std::vector<TraceEvent> events;
  };
  std::vector<Step> steps_;
  Profile profile_;
};

}  // namespace sluice
