// RecordedCalls: the calls of a plan's stages, replayed as CUDA graphs where that is asked for.
// Internal to the engine.
//
// The first time an action comes up its call is made; the second time it is made again and recorded
// (by then every library handle and kernel is there); from then on the record is put on the stream
// in its place. What differs between steps, their number and the loss scale, is kept on the device
// and read there. A call whose phase or samples are not those of the record is made, and so is one
// that tells final gradients: the sums that this starts are the host's work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/stage.hpp>

#include "comm/device/device_graph.hpp"

namespace sluice {

class RecordedCalls {
 public:
  // Of a GPU's memory, where anything is to be recorded.
  static constexpr std::size_t kDeviceBytes = 16;

  // `actions`: how many there are. Nothing is ever recorded unless `wanted` and on a GPU.
  RecordedCalls(ComputeContext& compute, std::size_t actions, bool wanted);

  // Before a step's first action: puts its values where recorded work reads them. Does not block;
  // what the step before put on the stream must be done.
  void begin_step(std::uint64_t step, double loss_scale);
  // The step's values as a StageContext has them.
  [[nodiscard]] StepValue<std::uint64_t> step() const { return step_; }
  [[nodiscard]] StepValue<double> loss_scale() const { return loss_scale_; }

  // Makes `call`, the calls of `stage` that are action number `action`, or replays it. Throws what
  // the call throws; Error(kDevice) where it cannot be recorded.
  template <typename Call>
  void run(std::size_t action, const Stage& stage, const StageContext& ctx, const Call& call) {
    if (entries_.empty() || !stage.graph_capturable() || ctx.final_gradients != nullptr)
        [[likely]] {
      call();
    } else if (!replay(entries_[action], ctx)) {
      make(entries_[action], ctx, call);
    }
  }

 private:
  struct Entry {
    Graph graph;
    Phase phase = Phase::kTrain;
    SampleRange samples;
    int calls = 0;  // made with this phase and these samples
    // Of the context, where the graph's kernels find it; it moves where a stage described too
    // little, and the call is made from then on.
    const std::byte* workspace = nullptr;
    [[nodiscard]] bool fits(const StageContext& ctx) const;
  };
  struct Values {
    std::uint64_t step = 0;
    double loss_scale = 1;
  };

  [[nodiscard]] bool replay(const Entry& entry, const StageContext& ctx) const;
  void make(Entry& entry, const StageContext& ctx, const std::function<void()>& call);

  ComputeContext& compute_;
  std::vector<Entry> entries_;  // [action]; empty where nothing is recorded
  static_assert(sizeof(Values) == kDeviceBytes);
  StepValue<std::uint64_t> step_;
  StepValue<double> loss_scale_;
  HostBuffer staged_;  // Values, on their way to
  Buffer on_device_;   // Values
};

}  // namespace sluice
