// What the actions of steps take (Profile), and what the layers of a run's stages do. Timeline
// collects the traced steps of a run and writes them, with planned and actual tracks and an arrow
// for each message. All times are put on the clock of rank 0.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/simulate.hpp>

#include "comm/group/clock_offset.hpp"
#include "runtime/engine/engine_config.hpp"
#include "runtime/files/trace.hpp"

namespace sluice {

struct StepOutcome;  // runtime/engine/engine.hpp

// The mean seconds of a stage's actions; what Profile::gather() says of I and W holds here.
[[nodiscard]] StageTimes mean_times(const ActionSeconds& sums);

// Adds up the outcomes of steps; one per rank.
class Profile {
 public:
  void add(const StepOutcome& outcome);
  // Collective: mean seconds per action of every global stage of replica 0, on every rank. Where no
  // backward was split, all of it counts as input half, and the weight half is 0. Where some were,
  // the mean weight half is subtracted from the others.
  [[nodiscard]] std::vector<StageTimes> gather(Pipeline& pipeline) const;

 private:
  std::vector<ActionSeconds> sums_;
};

struct LayerTable {
  std::vector<int> first_layer;   // stage s owns layers [first_layer[s], first_layer[s + 1])
  std::vector<StageTimes> costs;  // [layer] in any unit, at least one entry
  int tensor_ranks = 1, tensor_shards = 1;  // of the run
  // [layer] What tensor ranks that share it pass each other in a training, of an all-gather the
  // parts of all ranks; the costs have none of it where tensor_ranks is 1. Empty: not known.
  std::vector<StageCollectives> collectives = {};
};

// {"first": first_layer, "times": [[forward, backward_input, backward_weight], ...]}, one entry per
// layer. The times are milliseconds: what its stage took, `stages` in seconds, divided among the
// stage's layers in proportion to their costs. Without `stages` they are the costs. Where
// collectives are known, also "tensor_ranks", "tensor_shards" and "collectives": of each layer the
// lists of F, I and W, as ["sum", bytes].
[[nodiscard]] std::string to_json_text(const LayerTable& table,
                                       std::span<const StageTimes> stages = {});

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
