// When a GPU ran each compute op of a step, by timed events on its stream; nothing on a CPU, whose
// ops the engine times itself. Internal to the engine.
#pragma once

#include <functional>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/plan.hpp>

namespace sluice {

class DeviceTimer {
 public:
  // `most`: ops of a step.
  DeviceTimer(Device device, std::size_t most);
  void begin(StreamView stream);
  // `op` stays where it is until read(). `follows`: nothing was put on the stream since the last
  // stop() that it may have waited for; then that op's end is the start of this one, one event
  // less. What the GPU waits there for the host counts as this op's.
  void start(StreamView stream, const PlanOp& op, bool follows = false);
  void stop(StreamView stream);
  // Once all events are done: each op with its seconds of the steady clock, in order.
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
