// Engine: executes one rank's part of a plan, and nothing else.
//
// The plan's list of posts, sends, waits, computations and releases is followed to the letter; the
// engine has no scheduling rule of its own and refuses (Error(kPlan)) an op whose slot is not in
// the state the op needs. Everything is allocated on construction; run() allocates nothing.
// Threading: one thread, the one that constructed it. Only the waits block; they drive the
// transport and poll the interrupt.
//
// On a GPU compute goes on the context's stream and the host runs ahead of it: it blocks for
// messages that arrive, for buffers that are to be used again, and once before the optimizer, when
// the step's losses are read. Data are loaded into host memory and copied in when the step starts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/group/waiter.hpp"
#include "runtime/data/batch_loader.hpp"
#include "runtime/engine/engine_config.hpp"
#include "runtime/files/trace.hpp"

namespace sluice {

// What a plan's reductions and its optimizer do; the engine only says when.
class StepActions {
 public:
  virtual ~StepActions() = default;
  // Who wants to know, in the stage's last backward or backward_weight of the step, which of its
  // gradients are final; null: nobody.
  virtual FinalGradients* final_gradients(int /*stage*/) { return nullptr; }
  virtual void reduce_grad(int stage) = 0;
  virtual void reduce_tied(int group) = 0;
  // Puts on the stream what optimizer() will read on the host; the engine then waits for the
  // device, once.
  virtual void measure() = 0;
  virtual void optimizer() = 0;
};

struct StepRequest {
  Phase phase = Phase::kTrain;
  std::uint64_t step = 0;
  std::uint64_t seed = 0;
  double loss_scale = 1;
  std::span<const SampleRange> micro_batches;  // [micro_batch], sizes as in the edge table
  const BatchLoader::Batch* batch = nullptr;   // inputs on stage 0, targets on the last stage
};

struct LossResult {
  double sum = 0;     // of the loss over the micro-batch's counted targets
  double weight = 0;  // their number (a mean is sum / weight over the global batch)
};

// Times, losses and outputs are there when run() returns, and for StepActions::optimizer().
struct StepOutcome {
  std::span<const LossResult> losses;  // [micro_batch], on the last stage's rank, else empty
  double busy_seconds = 0;  // in compute actions, on the CPU with the bookkeeping between two
  int peak_in_flight = 0;   // chunks held at once, counted while running
  std::vector<ActionSeconds> actions;
};

class Engine : public Interrupt {
 public:
  explicit Engine(const EngineConfig& config);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // One step. `actions` may be null for a forward-only plan. After an exception the engine can only
  // be destroyed. The outcome stays valid until the next call.
  const StepOutcome& run(const StepRequest& request, StepActions* actions);

  // Drives what is under way, never blocking: for whoever waits within a call that run() makes,
  // since the rank it waits for may wait for this one's messages.
  void poll() override;

  // Filled by run() as it goes; its address never changes.
  [[nodiscard]] const StepOutcome& outcome() const;
  // The last stage's outputs of the last micro-batch of the last run that generated, on its rank,
  // in host memory; else empty.
  [[nodiscard]] std::span<const Tensor> outputs() const;
  // Of the last run; times in seconds of the steady clock.
  [[nodiscard]] std::span<const TraceEvent> trace() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
