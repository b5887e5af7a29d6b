// Pipeline: a model in stages over the ranks of a communicator, trained step by step.
//
// The whole of what an embedding program needs: hand in a communicator, options, a factory for
// stages and a source of data; call train_step(). Construction and every call are collective over
// all ranks, from one thread per rank (MPI_THREAD_FUNNELED suffices where that thread initialised
// MPI; else it is Error(kUsage)). Several pipelines may live in one process.
//
// Errors: when any rank fails, every rank throws the same Error with its origin; the pipeline is
// then unusable but can be destroyed at once: memory of messages that are still under way outlives
// it, in the keeping of `world`. A step whose loss or gradient is not finite is Error(kNumeric) on
// all ranks before any parameter moved.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/options.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

class ComputeContext;  // <sluice/compute.hpp>
class DataSource;      // <sluice/data.hpp>
class PipelineAccess;  // runtime/pipeline/pipeline_access.hpp
struct OptimizerState;  // <sluice/parameter.hpp>
struct Parameter;       // <sluice/parameter.hpp>

// The same on all ranks, but for `seconds`, this rank's own, and the vectors, which only rank 0
// has.
struct StepReport {
  std::uint64_t step = 0;
  double loss = 0;       // mean over the global batch's counted targets
  double targets = 0;    // their number
  double grad_norm = 0;  // before clipping
  double learning_rate = 0;
  double seconds = 0;                    // the whole step, optimizer included
  double pipeline_seconds = 0;           // from its start to the norm: what the schedule takes
  double bubble_measured = 0;            // idle share of pipeline_seconds over all ranks
  std::vector<int> peak_in_flight;       // [pipeline rank] of replica 0
  std::vector<std::int64_t> peak_bytes;  // [pipeline rank]
};

class Pipeline {
 public:
  // Builds this rank's stages and everything they need. `source` must outlive the pipeline.
  // Throws Error(kUsage) for layouts that cannot work, with the nearest that can.
  Pipeline(Communicator& world, const PipelineOptions& options, const StageFactory& make_stage,
           const DataSource& source);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  StepReport train_step();
  // Mean loss over the source's first `samples` samples, forward only; `samples` is one of
  // options.training.evaluations. May be called between any two steps.
  [[nodiscard]] double evaluate(std::int64_t samples);
  // Inference: one forward of stage 0's `inputs` (equal on all ranks; one micro-batch of
  // micro_batch_size samples). The last stage's outputs on its rank, else empty; valid until the
  // next call.
  [[nodiscard]] std::span<const Tensor> infer(std::span<const Tensor> inputs);

  // The orderly end, once everything is computed that shall be: NCCL does what is under way, on all
  // ranks, and its communicators are freed. What computes, and values_changed(), is Error(kUsage)
  // from then on; parameters, world() and what reads stay. Optional: a pipeline that is destroyed
  // without, as after an Error, aborts NCCL's communicators, alone and without waiting for anybody.
  void close();

  // Steps done; train_step() runs number step() + 1.
  [[nodiscard]] std::uint64_t step() const;
  void set_step(std::uint64_t step);

  // This rank's parameters. Whoever writes values calls values_changed() on every rank afterwards.
  struct Owned {
    int stage = 0;
    bool owner = true;  // false: a further use of a tied parameter
    Parameter* parameter = nullptr;
  };
  [[nodiscard]] std::vector<Owned> parameters();
  // Collective: tied copies take their owner's value, stages forget copies in other precisions.
  void values_changed();
  [[nodiscard]] std::vector<OptimizerState> optimizer_state();

  // What this rank's stages compute with.
  [[nodiscard]] ComputeContext& compute();

 private:
  friend class PipelineAccess;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
