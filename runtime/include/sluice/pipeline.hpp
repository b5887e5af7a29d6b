// Pipeline: a model in stages over the ranks of a world, trained step by step.
//
// A program gives it a world, a factory for stages, either a BatchSpec or a DataSource, and
// options. It calls train_step() with a batch, or without one where the source has them. Several
// pipelines may exist in one process.
//
// Threads: one thread per rank makes all calls of a pipeline. MPI_THREAD_FUNNELED suffices where
// this thread initialised MPI. There a call of another thread that needs other ranks is
// Error(kUsage), on this rank alone, before anything happens. With MPI_THREAD_MULTIPLE several
// threads may have pipelines at the same time, each over a world of its own that was made
// before.
// Construction is collective over all ranks. So is every member function, except those that say
// otherwise.
//
// Callbacks: what a pipeline calls of the program's while it works, such as a stage, a loss, an
// optimizer, a source, on_outputs, or ProgramState of a Checkpointer, may only read from it:
// step(), usable(), failure(), share(), parameters(), buffers(), optimizer_state(), compute(). All
// other calls of it are Error(kUsage) there, collective ones of <sluice/checkpoint.hpp> too, and
// none may destroy it.
//
// Errors: some calls are refused. All ranks throw the same Error before or after the work of the
// call, and the pipeline is as it was before:
//   Error(kUsage), Error(kMismatch): what ranks pass does not fit, or differs between them
//   of any code: what a rank throws while it looks at what was passed, such as a source that cannot
//   tell its shapes, or a class that the model does not have: Error(kData), which names the sample,
//   counted over all replicas
//   Error(kNumeric), Error(kData) at the end of a step: its loss or a gradient is not finite, or no
//   target counts. The step's gradients are dropped.
// Any other error, of whichever code, ends the pipeline on all ranks, with the same Error, which
// names the rank that failed. A rank that has done its part of a step before another one fails in
// the update may learn it in its next call, at the latest in close(). usable() tells the two apart:
// then usable() is false, failure() is that error, and only the destructor may follow. It does not
// wait: `world` keeps the memory of messages that are still open.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/tensor.hpp>
#include <sluice/world.hpp>

#pragma GCC visibility push(default)
namespace sluice {

class ComputeContext;  // <sluice/compute.hpp>
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
  bool skipped = false;         // its loss or gradient was not finite, and no parameter changed
  double seconds = 0;           // of the whole step, optimizer included
  double pipeline_seconds = 0;  // from the step's start to the norm, of the slowest rank
  double bubble_measured = 0;   // idle share of pipeline_seconds over all ranks
  // [pipeline rank] of replica 0 and its tensor rank 0: micro-batches, and planned memory.
  std::vector<int> peak_in_flight;
  std::vector<std::int64_t> peak_bytes;
};

// Over the counted targets, the same on all ranks.
struct EvaluationReport {
  double loss = 0;     // mean
  double targets = 0;  // their number
};

struct InferOptions {
  static constexpr int kWhereMade = -1, kEveryRank = -2;
  // The rank of `world` that gets all replicas' outputs, in the order of the samples. kWhereMade:
  // each replica's outputs stay on the rank of its last stage. Of several ranks that share that
  // stage (PipelineOptions::Shape::tensor), the first one's outputs count.
  int to = kWhereMade;
  // Gets the outputs of each micro-batch when they are there, in ascending order, on the rank of
  // each replica where they are made, in the thread that called infer(). They are valid during the
  // call. `samples` counts over all replicas. What it throws ends the pipeline like an exception of
  // a stage. infer() then returns nothing.
  std::function<void(SampleRange samples, std::span<const Tensor> outputs)> on_outputs = {};
};

class Pipeline {
 public:
  // For batches of the caller. options.shape says how large a step's batch may be:
  // batch_size samples over all replicas, in micro-batches of micro_batch_size.
  Pipeline(World& world, const StageFactory& make_stage, const BatchSpec& batches,
           const PipelineOptions& options = {});
  // Makes this rank's stages and everything that they need. `world` and `source` must outlive the
  // pipeline. The source is asked for a batch ahead, also for the one after the last step. Throws
  // Error(kUsage) for options that cannot work, with the nearest legal values.
  Pipeline(World& world, const StageFactory& make_stage, const DataSource& source,
           const PipelineOptions& options = {});
  // Aborts NCCL's communicators unless close() was called. Waits for no other rank, and for at most
  // 10 seconds for the call of the source that is under way. A source that returns later, if ever,
  // must live until then.
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // A loader of what this rank passes of each batch: samples of its virtual replicas, inputs on the
  // ranks of first stages, targets on those of last ones, or all of it on rank 0. options.share is
  // ignored. The pipeline may go before it. Throws Error(kMismatch) where ranks have options or
  // data sets that differ in size, and Error(kUsage) where items are unlike the pipeline's samples,
  // on all ranks.
  [[nodiscard]] DataLoader loader(std::shared_ptr<const Dataset> data, LoaderOptions options);

  // What this rank passes of each batch, and with Feed::kPerStage of which virtual replicas; all
  // ranks that share a stage pass the same. Not collective.
  [[nodiscard]] BatchShare share() const;

  // --- one step in one call ---
  // Trains on `batch`, which has at least one sample for each virtual replica. With
  // Feed::kPerStage each replica's share of it is divided among its virtual replicas, larger parts
  // first; share() gives shares with which that is the same for every number of replicas. It has
  // fewer samples than the largest batch if the caller likes: the last micro-batch of a virtual
  // replica may be smaller, and there may be fewer micro-batches. A size of micro-batches that did
  // not occur before, or a number of them that is neither the largest nor one of the last eight, is
  // planned and verified first; after that a step allocates no memory. With options.order.given all
  // steps have its number of micro-batches; a batch that makes fewer is Error(kUsage). The loss is
  // the mean over the counted targets of the whole batch, and of all batches since the last step
  // that went to accumulate().
  //
  // Where the loss or a gradient is not finite, parameters and optimizer state stay as they are.
  // With options.training.skip_nonfinite the step counts as done, and the report says `skipped`.
  // Else it is Error(kNumeric), and step() stays.
  StepReport train_step(const Batch& batch);
  // The same on the source's batch of step() + 1. After Error(kNumeric), or Error(kData) that
  // leaves the pipeline usable, the next call takes the same batch again, unless set_step(step() +
  // 1) passes over it.
  StepReport train_step();

  // --- one step in several calls ---
  // Adds a batch to the gradients of the next step. Its samples count as much as those of the
  // step's other batches. The report is that of the step so far, without a gradient norm. A loss
  // that is not finite ends the step here, and drops its earlier batches: Error(kNumeric), or a
  // report that says `skipped`. Error(kUsage) where there are more virtual replicas than replicas:
  // each would need gradients of its own.
  StepReport accumulate(const Batch& batch);
  // The last batch of a step: after it the gradients are those of the mean loss over the step's
  // batches, summed over replicas and over the uses of tied parameters, on each parameter's owner
  // (parameters()). The caller may read and change them, equally on all replicas, and what is not
  // divided equally on all ranks that share a stage. optimizer_step() or drop_gradients() follows.
  StepReport forward_backward(const Batch& batch);
  // Updates parameters from the gradients as they are now, with options.training.clip. The report
  // has the norm that it found. Throws Error(kUsage) unless forward_backward() came before.
  StepReport optimizer_step();
  // Forgets the step's batches so far: the next call begins the step anew.
  void drop_gradients();

  // The learning rate from the next update on, in place of options.training.learning_rate; as a
  // number it is constant. Not collective, but every rank sets the same: a step before which they
  // differ is Error(kMismatch) on all ranks and changes nothing. Throws Error(kUsage) for a value
  // that is not finite or below 0, or that f32 cannot hold, also times the factor of a group; a
  // step whose rate grows so far is Error(kUsage) on all ranks. Not part of a save.
  void set_learning_rate(double rate);
  void set_learning_rate(const LearningRate& rate);
  // --- without training, between any two steps ---
  // Loss of a batch of any number of samples, forward only. Error(kUsage) for a last stage without
  // a loss, which is legal with options.training.inference. A loss that is not finite comes back.
  [[nodiscard]] EvaluationReport evaluate(const Batch& batch);
  // Loss of the first `samples` samples of `source`, whose tensors are like the pipeline's. It may
  // be the pipeline's own.
  [[nodiscard]] EvaluationReport evaluate(const DataSource& source, std::int64_t samples);
  // Outputs of the last stage for any number of samples, without a loss. All micro-batches are in
  // flight one after the other. Targets of `batch` are ignored. Returns host memory, dimension 0
  // joined over the micro-batches, where `options` says, else nothing; it is valid until the next
  // call.
  //
  // Where the data counts positions (DataSource::position_dimension()), inputs may have fewer than
  // it says, at least one, as many on all ranks: Error(kUsage) otherwise. Stages then see these
  // alone. A number of positions that did not occur before is described and prepared first: a stage
  // that needs more memory for it than for all positions is Error(kUsage). What is prepared stays,
  // on a CPU about 0.1 MB for each number.
  [[nodiscard]] std::span<const Tensor> infer(const Batch& batch, const InferOptions& options = {});

  // Whether the pipeline can be used; not after close(). Not collective.
  [[nodiscard]] bool usable() const;
  // The error that ended the pipeline, or null. Not collective.
  [[nodiscard]] const Error* failure() const;

  // The orderly end: waits until NCCL has finished on all ranks, and frees its communicators. After
  // it, functions that compute and values_changed() are Error(kUsage); the others still work.
  void close();

  // The number of steps done, skipped ones included. Not collective.
  [[nodiscard]] std::uint64_t step() const;
  // The next train_step() is number step + 1. Not collective; all ranks set the same number: a step
  // or a save before which they differ is Error(kMismatch) on all ranks and changes nothing. Throws
  // Error(kUsage) above kMostSteps, and in the middle of a step.
  void set_step(std::uint64_t step);
  static constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 52;

  // This rank's parameters, in order of stage; owned by its stages. All ranks that share a stage
  // have those of it, whole or in slices. Not collective. After values are written, every rank
  // calls values_changed(). With ShardLevel::kParameters a value has, between calls, what this
  // rank's replica updates of it alone, elsewhere any content; state() has it whole.
  struct Owned {
    int stage = 0;
    bool owner = true;  // false: not the first use of a tied parameter
    Parameter* parameter = nullptr;
  };
  [[nodiscard]] std::vector<Owned> parameters();
  // The same of ParameterSet::add_buffer(); values may be written without values_changed().
  [[nodiscard]] std::vector<Owned> buffers();
  // Tied copies take their owner's value. Stages discard their copies in other precisions.
  void values_changed();
  // All parameters and buffers of the model by name, whole, in host memory, on every rank. For
  // small models, and for values that come from elsewhere; a checkpoint needs less memory.
  [[nodiscard]] std::map<std::string, HostTensor> state();
  // The other way: each rank takes what it owns, of divided parameters its slice; other names do no
  // harm. Throws Error(kUsage) on all ranks for a name that is missing or a shape that differs;
  // then nothing changes.
  void set_state(const std::map<std::string, HostTensor>& values);
  // Views of the optimizer's tensors of what this rank updates. Throws Error(kUsage) where they are
  // offloaded (PipelineOptions::Offload). Not collective.
  [[nodiscard]] std::vector<OptimizerState> optimizer_state();

  // [stage] StageDescription::note, the same on all ranks; empty where a stage has nothing to say.
  // Not collective.
  [[nodiscard]] std::vector<std::string> notes() const;
  // What this rank's stages compute with. Not collective.
  [[nodiscard]] ComputeContext& compute();

 private:
  friend class PipelineAccess;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct StepTimeline;  // <sluice/simulate.hpp>

// The last training step as it ran, beside its plan, for draw_timeline() and draw_svg():
//
//   options.checks.trace = true;
//   ...
//   const StepTimeline last = step_timeline(pipeline);
//   if (world.rank() == 0) std::cout << draw_timeline(last.schedule, last.measured);
//
// Collective, the same on every rank. Takes a few milliseconds per rank, which compare their
// clocks. Throws Error(kUsage) on all ranks without options.checks.trace, and before the first
// step; the pipeline goes on. On a GPU the times are those of the device.
[[nodiscard]] StepTimeline step_timeline(Pipeline& pipeline);

}  // namespace sluice
#pragma GCC visibility pop
