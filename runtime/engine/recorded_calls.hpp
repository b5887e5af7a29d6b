// Records the calls of a plan's stages as CUDA graphs, and replays them. Internal to the engine.
//
// The first time an action runs, its call is made. Every library handle and kernel exists by then,
// so at the end of that step, while no kernel of the device waits for another rank, the call is
// recorded: making a graph may take memory of the device. After that the graph is launched in its
// place. Values that differ between steps, the step's number and the loss scale, are read from
// device memory. A call is made, not replayed, if its phase, samples or positions differ from the
// record, if it would add to a gradient that the record overwrites or the other way round, or if
// the host takes part: it reports final gradients, or makes collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/stage.hpp>

#include "comm/device/device_graph.hpp"

namespace sluice {

class RecordedCalls {
 public:
  // Device memory that is taken where calls are recorded.
  static constexpr std::size_t kDeviceBytes = 16;

  // `actions`: their number. Records only on a GPU, and only if `wanted`.
  RecordedCalls(ComputeContext& compute, std::size_t actions, bool wanted);

  // Before a step's first action: copies its values to the device. Does not block. The previous
  // step's work must be done.
  void begin_step(std::uint64_t step, double loss_scale);
  // The step's values for a StageContext.
  [[nodiscard]] StepValue<std::uint64_t> step() const { return step_; }
  [[nodiscard]] StepValue<double> loss_scale() const { return loss_scale_; }

  // Makes or replays `call`, which is what `stage` does in action number `action`. Throws what the
  // call throws. `on_host`: the host takes part in it.
  template <typename Call>
  void run(std::size_t action, Stage& stage, const StageContext& ctx, bool on_host,
           const Call& call) {
    if (entries_.empty() || on_host || !stage.graph_capturable()) [[likely]] {
      call();
    } else if (!replay(entries_[action], ctx)) {
      call();
      note(entries_[action], ctx);
    }
  }

  // True once, where calls are to be recorded: the caller passes each that it has run to record().
  [[nodiscard]] bool begin_recording() { return std::exchange(to_record_, false); }
  // Records `call`, as given to run(). Error(kDevice) where it cannot be recorded.
  void record(std::size_t action, Stage& stage, const StageContext& ctx,
              const std::function<void()>& call);

 private:
  struct Entry {
    Graph graph;
    Phase phase = Phase::kTrain;
    UnitShape shape;
    std::int64_t first_sample = 0, first_position = 0;
    bool is_made = false;  // with this phase, shape and these first ones
    // Where the graph's kernels find the context's workspace. If that moves, because a stage
    // described too little, the call is made.
    const std::byte* workspace = nullptr;
    // The gradients that the call writes, and whether it overwrites them.
    struct Written {
      Parameter* parameter;
      bool overwritten;
    };
    std::vector<Written> gradients;
    [[nodiscard]] bool fits(const StageContext& ctx) const;
  };
  struct Values {
    std::uint64_t step = 0;
    double loss_scale = 1;
  };

  [[nodiscard]] bool replay(const Entry& entry, const StageContext& ctx) const;
  static void note(Entry& entry, const StageContext& ctx);

  ComputeContext& compute_;
  std::vector<Entry> entries_;  // [action]; empty where nothing is recorded
  bool to_record_ = false;
  static_assert(sizeof(Values) == kDeviceBytes);
  StepValue<std::uint64_t> step_;
  StepValue<double> loss_scale_;
  HostBuffer staged_;  // Values to copy to the device
  Buffer on_device_;   // Values
};

}  // namespace sluice
