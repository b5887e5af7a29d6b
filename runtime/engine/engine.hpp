// Engine: executes one rank's part of a plan, and nothing else.
//
// It executes the plan's list of posts, sends, waits, computations and releases in order, and has
// no scheduling rules. It refuses an op whose slot is not in the state that the op needs:
// Error(kPlan). A stage's first forward and first backward on a CPU must write every number of its
// outputs and of its inputs' gradients and no input, and a loss its sum and gradient, else
// Error(kUsage). The constructor allocates everything; run() allocates nothing. Threads: only the
// one that constructed it. Only waits block; they progress the transport and poll the interrupt.
//
// On a GPU, compute runs on the context's stream, and the host runs ahead of it. The host blocks
// for messages that arrive, for buffers that it reuses, and once before the optimizer, to read the
// losses. The inputs and targets of a step are copied from host memory when it starts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/base/steady_seconds.hpp"
#include "comm/group/waiter.hpp"
#include "runtime/data/batch_loader.hpp"
#include "runtime/engine/engine_config.hpp"
#include "runtime/files/trace.hpp"

namespace sluice {

// What a plan's reductions and its optimizer do. The engine decides only when they run.
class StepActions {
 public:
  virtual ~StepActions() = default;
  // Receives which gradients are final during the stage's last backward or backward_weight of the
  // step, or during each where each micro-batch has its own sums; may be null.
  virtual FinalGradients* final_gradients(int /*stage*/) { return nullptr; }
  // After such a call, where each micro-batch has its own sums.
  virtual void end_gradients(int /*stage*/) {}
  // The stage has run all F, or all W and B, of a group of micro-batches (Plan::fold_every), number
  // `leaf` of the step. Gradients that are written by the loss belong to F.
  virtual void fold_forward(int stage, int leaf) = 0;
  virtual void fold_backward(int stage, int leaf) = 0;
  virtual void reduce_grad(int stage) = 0;
  // Before reduce_tied() and measure(), and before another stage's gradients begin where replicas
  // keep parts of them. Waits for the sums in host memory of a stage whose reduce_grad() has run;
  // returns when they ran, if it knows.
  virtual std::optional<TimeSpan> end_sums(int /*stage*/) { return std::nullopt; }
  virtual void reduce_tied(int group) = 0;
  // Puts on the stream the work whose results optimizer() reads on the host. The engine waits for
  // the device between the two calls.
  virtual void measure() = 0;
  virtual void optimizer() = 0;
};

struct StepRequest {
  Phase phase = Phase::kTrain;
  std::uint64_t step = 0;
  std::uint64_t seed = 0;
  double loss_scale = 1;
  bool first_batch = true;  // of the step: gradients that stages overwrite are stale
  bool last_batch = true;   // of the step
  std::span<const SampleRange> micro_batches;  // [micro_batch], sizes as in the edge table
  std::int64_t positions = 0;                  // of every micro-batch: UnitShape::positions
  const BatchLoader::Batch* batch = nullptr;   // inputs on stage 0, targets on the last stage
  // Phase::kGenerate, on the last stage's rank: gets each micro-batch's outputs in host memory, in
  // the order of the plan; they are valid during the call. May be null.
  const std::function<void(int micro_batch, std::span<const Tensor> outputs)>* on_outputs = nullptr;
};

struct LossResult {
  double sum = 0;     // of the loss over the micro-batch's counted targets
  double weight = 0;  // their number (a mean is sum / weight over the global batch)
};

// Complete when run() returns, and in StepActions::optimizer().
struct StepOutcome {
  std::span<const LossResult> losses;  // [micro_batch], on the last stage's rank, else empty
  // In compute actions; on a CPU with the bookkeeping and the short sends between them.
  double busy_seconds = 0;
  int peak_in_flight = 0;  // the most micro-batches that were in flight at once, over all stages
  std::vector<ActionSeconds> actions;
};

class Engine : public Interrupt {
 public:
  explicit Engine(const EngineConfig& config);
  ~Engine() override;

  // Runs one step. `actions` may be null for a forward-only plan. After an exception the engine can
  // only be destroyed. The outcome is valid until the next call.
  const StepOutcome& run(const StepRequest& request, StepActions* actions);

  // Progresses this rank's messages and sums without blocking. Waits inside StepActions call it:
  // the rank that they wait for may need these messages.
  void poll() override;

  // Filled while run() runs; its address never changes.
  [[nodiscard]] const StepOutcome& outcome() const;
  // Of the last run; times as steady_seconds().
  [[nodiscard]] std::span<const TraceEvent> trace() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
