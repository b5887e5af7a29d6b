// Pipeline: a model in stages over the ranks of a communicator, trained step by step.
//
// A program gives it a communicator, options, a factory for stages and a source of data, and calls
// train_step(). Several pipelines may exist in one process.
//
// Threads: one thread per rank makes all calls. MPI_THREAD_FUNNELED suffices where this thread
// initialised MPI; else Error(kUsage). Construction is collective over all ranks. So is every
// member function, except those that only read.
//
// Errors: when a rank fails, every rank throws the same Error, which names the rank. The pipeline
// can then only be destroyed, which does not wait: `world` keeps the memory of messages that are
// still open. These errors leave the pipeline as it was before the call, on all ranks:
//   Error(kNumeric) of train_step(): the loss or a gradient is not finite
//   Error(kMismatch) of train_step(): the ranks have set different learning rates
//   Error(kUsage) of a closed pipeline, and of a call that options.training.inference excludes
//   Error(kUsage) of evaluate() and infer() for arguments that do not fit or differ between ranks
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/options.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

class ComputeContext;  // <sluice/compute.hpp>
class DataSource;      // <sluice/data.hpp>
class PipelineAccess;  // runtime/pipeline/pipeline_access.hpp
struct LearningRate;   // <sluice/parameter.hpp>
struct OptimizerState;
struct Parameter;

// The same on all ranks, except `seconds`, which is this rank's, and the vectors, which only rank 0
// has.
struct StepReport {
  std::uint64_t step = 0;
  double loss = 0;       // mean over the counted targets of the global batch
  double targets = 0;    // their number
  double grad_norm = 0;  // before clipping
  double learning_rate = 0;
  bool skipped = false;             // its loss or gradient was not finite, and no parameter changed
  double seconds = 0;               // of the whole step, optimizer included
  double pipeline_seconds = 0;      // from the step's start to the norm, of the slowest rank
  double bubble_measured = 0;       // idle share of pipeline_seconds over all ranks
  std::vector<int> peak_in_flight;  // [pipeline rank] micro-batches, of replica 0
  std::vector<std::int64_t> peak_bytes;  // [pipeline rank] planned memory
};

class Pipeline {
 public:
  // Makes this rank's stages and everything that they need. `world` and `source` must outlive the
  // pipeline. Throws Error(kUsage) for options that cannot work, with the nearest legal values.
  Pipeline(Communicator& world, const PipelineOptions& options, const StageFactory& make_stage,
           const DataSource& source);
  // Aborts NCCL's communicators unless close() was called. Waits for no other rank.
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Trains on the batch of step() + 1. Where the loss or a gradient is not finite, parameters and
  // optimizer state stay as they are. With options.training.skip_nonfinite the step counts as done,
  // its batch as used, and the report says `skipped`. Else it is Error(kNumeric) and step() stays:
  // the next call takes the same batch again, unless set_step(step() + 1) passes over it.
  StepReport train_step();
  // The learning rate from the next step on, in place of options.training.learning_rate; as a
  // number it is constant. Not collective, but every rank sets the same: a step before which they
  // differ is Error(kMismatch) on all ranks and changes nothing. Throws Error(kUsage) for a value
  // that is not finite or below 0. Not part of a save.
  void set_learning_rate(double rate);
  void set_learning_rate(const LearningRate& rate);
  // Mean loss over the first `samples` samples of the source, forward only. `samples` is one of
  // options.training.evaluations. May be called between any two steps.
  [[nodiscard]] double evaluate(std::int64_t samples);
  // One forward pass, where options.training.inference is set. `inputs` are stage 0's, equal on all
  // ranks: one micro-batch of micro_batch_size samples. Returns the last stage's outputs in host
  // memory on its rank, else nothing. They are valid until the next call.
  [[nodiscard]] std::span<const Tensor> infer(std::span<const Tensor> inputs);

  // The orderly end: waits until NCCL has finished on all ranks, and frees its communicators. After
  // it, functions that compute and values_changed() are Error(kUsage); the others still work.
  void close();

  // The number of steps done, skipped ones included. Not collective.
  [[nodiscard]] std::uint64_t step() const;
  // The next train_step() is number step + 1. Not collective; all ranks set the same number.
  void set_step(std::uint64_t step);

  // This rank's parameters, in order of stage; owned by its stages. Not collective. After values
  // are written, every rank calls values_changed().
  struct Owned {
    int stage = 0;
    bool owner = true;  // false: not the first use of a tied parameter
    Parameter* parameter = nullptr;
  };
  [[nodiscard]] std::vector<Owned> parameters();
  // Tied copies take their owner's value. Stages discard their copies in other precisions.
  void values_changed();
  // Views of the optimizer's tensors of this rank's parameters. Not collective.
  [[nodiscard]] std::vector<OptimizerState> optimizer_state();

  // What this rank's stages compute with. Not collective.
  [[nodiscard]] ComputeContext& compute();

 private:
  friend class PipelineAccess;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
#pragma GCC visibility pop
