// What Sluice's own commands, checkpoints and reports use of a Pipeline beyond its public members.
// Threading and errors are those of Pipeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <sluice/options.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/engine/engine.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/call.hpp"

namespace sluice {

class DataSource;
class OffloadedState;  // runtime/gradients/offloaded_state.hpp
class Pipeline;        // <sluice/pipeline.hpp>
struct OptimizerState;
struct Parameter;

// Of a layout that is planned alone: whether what needs too much memory is refused.
enum class MemoryLimit { kHolds, kIsIgnored };

// Defined in runtime/pipeline/public_calls.cpp.
class PipelineAccess {
 public:
  // Collective. The layout alone, for a dry run: of a device's memory it takes only what library
  // handles need. One process alone plans whatever job the options say: it describes all stages, as
  // if each rank had a device like its own and memory enough. Throws as the constructor of
  // Pipeline.
  [[nodiscard]] static JobLayout plan_layout(Communicator& world, const PipelineOptions& options,
                                             const StageFactory& make_stage,
                                             const DataSource& source,
                                             MemoryLimit limit = MemoryLimit::kHolds);
  // Valid as long as `pipeline`.
  [[nodiscard]] static const JobLayout& layout(const Pipeline& pipeline);
  // Throws Error(kUsage) in a callback of `pipeline`. Not collective.
  static void require_idle(const Pipeline& pipeline);
  // Collectives over the job. They end with an Error when any rank fails.
  [[nodiscard]] static Collectives& world(Pipeline& pipeline);
  // The same over the ranks that share this rank's stages, of its replica.
  [[nodiscard]] static Collectives& tensor_ranks(Pipeline& pipeline);
  // What sums and collectives over ranks hold in host memory: RankMemory::collectives plans it.
  [[nodiscard]] static std::size_t collective_bytes(const Pipeline& pipeline);
  // Collective. Runs `body`; an exception in it on any rank becomes the same Error on all ranks.
  static void guarded(Pipeline& pipeline, const std::function<void()>& body);
  // The same; where memory runs out in `body`, the Error names `who` and the plan of this rank.
  static void guarded(Pipeline& pipeline, const std::string& who,
                      const std::function<void()>& body);
  // `value`, which is a parameter's or a buffer's, as it was before the batches of a step that is
  // not complete; they change buffers. Valid until the next step. Not collective.
  [[nodiscard]] static Tensor before_open_step(const Pipeline& pipeline, const Tensor& value);
  // Collective. Compares with the other ranks that they make this call, and runs `body` as
  // guarded() does. The Error of a Refused comes out on all ranks and leaves the pipeline usable,
  // as does Error(kMismatch) where ranks make different calls.
  static void run_call(Pipeline& pipeline, Call call, const std::string& who,
                       const std::function<void()>& body);
  // Bits that ranks exchange in the record of every training step. `mine` is called once a step, by
  // the pipeline's thread, when the record is packed; empty: none. Not collective.
  static void set_step_flags(Pipeline& pipeline, std::function<std::uint32_t()> mine);
  // The bits that any rank had set in the last training step: the same on all ranks.
  [[nodiscard]] static std::uint32_t step_flags(const Pipeline& pipeline);
  // Where each replica has a part of the parameters at rest: whole values of one, for saves and
  // the like. Collective over the replicas, in one order of parameters. The values are there until
  // give_back(), or drop_others(), which is for values that were written whole. Else all three do
  // nothing.
  static void lend(Pipeline& pipeline, const Parameter& parameter);
  static void give_back(Pipeline& pipeline, const Parameter& parameter);
  static void drop_others(Pipeline& pipeline);
  // What this rank has of a parameter's values, or of a buffer's, between calls. Not collective.
  [[nodiscard]] static Tensor at_rest(Pipeline& pipeline, const Parameter& parameter);
  // As Pipeline::optimizer_state(), also of what is offloaded: its tensors are then addresses of
  // what `offloaded_state()` has, which is null else. Not collective.
  [[nodiscard]] static std::vector<OptimizerState> optimizer_state(Pipeline& pipeline);
  [[nodiscard]] static OffloadedState* offloaded_state(Pipeline& pipeline);
  // Tells the watchdog which save is the newest complete one. Not collective; any thread.
  static void saved(Pipeline& pipeline, std::uint64_t step);
  // [rank of the job]
  [[nodiscard]] static const std::vector<std::string>& hosts(const Pipeline& pipeline);
  // [rank of the job] Seconds in compute actions of the last batch; on rank 0, else empty. Valid
  // until the next batch.
  [[nodiscard]] static std::span<const double> busy_seconds(const Pipeline& pipeline);
  // This rank's timeline of the last training step; empty unless options.checks.trace.
  [[nodiscard]] static std::vector<TraceEvent> trace(const Pipeline& pipeline);
  // Measured seconds per action of the last step, on this rank; valid until the next step.
  [[nodiscard]] static const StepOutcome& last_outcome(const Pipeline& pipeline);
};

}  // namespace sluice
