// Measures when a GPU ran each compute op of a step, by timed events on its stream. Does nothing on
// a CPU, where the engine reads its own clock. Internal to the engine.
#pragma once

#include <functional>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/plan.hpp>

namespace sluice {

class DeviceTimer {
 public:
  // `most`: ops of a step, at most.
  DeviceTimer(Device device, std::size_t most);
  void begin(StreamView stream);
  // `op` keeps its address until read(). `follows`: since the last stop(), nothing was put on the
  // stream that it may wait for. Then the end of the last op is the start of this one, which saves
  // an event; the time in which the GPU waits for the host counts as this op's.
  void start(StreamView stream, const PlanOp& op, bool follows = false);
  void stop(StreamView stream);
  // Requires that all events are done. Calls `take` for each op in order, with times as
  // steady_seconds().
  void read(const std::function<void(const PlanOp& op, double start, double end)>& take);

 private:
  struct Span {
    const PlanOp* op = nullptr;
    bool follows = false;
    Event start, end;
  };
  Event origin_;
  std::vector<Span> spans_;
  std::size_t used_ = 0;
};

}  // namespace sluice
