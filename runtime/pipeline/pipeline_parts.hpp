// What a pipeline is made of, in the order in which it is made: the job, its layout, stages,
// memory, communicators, engines. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/stage.hpp>

#include "runtime/engine/device_batch.hpp"
#include "runtime/engine/engine.hpp"
#include "runtime/engine/sharded_values.hpp"
#include "runtime/engine/slots.hpp"
#include "runtime/engine/state_store.hpp"
#include "runtime/gradients/step_record.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/group/group_collective.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/pipeline/batch_feed.hpp"
#include "runtime/pipeline/plan_cache.hpp"
#include "runtime/planning/build_layout.hpp"
#include "runtime/watchdog/watchdog.hpp"

namespace sluice {

struct PipelineParts {
  // Where batches of train_step() come from.
  struct Batches {
    std::unique_ptr<const DataSource> own;  // shapes alone; null where the caller has a source
    const DataSource* source = nullptr;     // shapes, and batches unless `own`
    Feed feed = Feed::kPerStage;
  };
  // Collective over `world`.
  PipelineParts(Communicator& world, const PipelineOptions& options_in,
                const StageFactory& make_stage, Batches batches_in);
  ~PipelineParts() { end(); }

  // Before anything that lies on a device goes: ends NCCL, whose kernels may wait for messages that
  // never come after an error, for freeing a GPU's memory waits for kernels.
  void end() noexcept;

  // Runs `body`. Where the memory of the device, or of the host, is not enough, the Error names
  // `who` and the plan's table.
  template <typename Body>
  void rethrow_oom_with_plan(const std::string& who, const Body& body) const {
    try {
      body();
    } catch (const OutOfMemory& error) {
      throw_with_plan(who, error);
    } catch (const std::bad_alloc&) {
      throw_with_plan(who, Error(ErrorCode::kDevice, "out of host memory"));
    }
  }
  // The same for every error of this rank's device: libraries do not say that memory was the
  // reason. Errors of other ranks are not changed.
  template <typename Body>
  void rethrow_device_error_with_plan(const std::string& who, const Body& body) const {
    try {
      body();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDevice || error.rank() >= 0) throw;
      throw_with_plan(who, error);
    }
  }
  // The plan of a step that is smaller than the largest.
  Plan plan_smaller(int micro_batches) const;
  // Collective over the pipeline: micro-batches of this shape may come.
  void need_size(UnitShape shape);
  // Throws what this rank's stages find in a batch before its first message. `before`: samples of
  // the step's earlier batches. Returns how many targets count here: the sums over the
  // micro-batches of each of `shares`, which have equally many, joined by their tree.
  double check_batch(const BatchLoader::Batch& batch, std::span<const SampleRange> ranges,
                     std::int64_t before, bool targets, int shares = 1);

  PipelineOptions options;
  JobContext job;
  PolledDeviceWait device_wait{*job.world.watch};
  JobLayout layout;
  std::shared_ptr<SlotStore> slots = std::make_shared<SlotStore>();
  std::vector<std::unique_ptr<Stage>> stages;
  bool lacks_loss = false;  // the last stage is here, and is not a LossStage
  std::vector<StageBinding> bindings;
  std::unique_ptr<ComputeContext> compute;
  std::unique_ptr<HostMirror> mirror;
  // Within actions; null: one rank.
  std::unique_ptr<GroupCollective> over_replicas, over_tensor_ranks;
  std::unique_ptr<NcclRoutes> nccl;
  std::unique_ptr<DeviceBatch> device_batch;
  HostBuffer staged;                       // of all engines
  std::unique_ptr<StateStore> store;       // likewise; null: nothing is offloaded
  std::unique_ptr<ShardedValues> sharded;  // likewise; null: parameters are whole
  // Of gradients, as GradientMemory; null: each stage's have memory of their own.
  std::shared_ptr<PartialMemory> gradients;
  Batches batches;
  PlanCache training{job.place.here.pipeline, [this](int n) { return plan_smaller(n); },
                     [this](const Plan& plan) { return make_engine(plan, /*trains=*/true); }};
  PlanCache forward{job.place.here.pipeline, [this](int n) { return plan_forward(layout, n); },
                    [this](const Plan& plan) { return make_engine(plan, /*trains=*/false); }};
  Engine* engine = nullptr;  // of the last training step, at first of the largest
  std::unique_ptr<BatchFeed> feed;
  std::unique_ptr<TiedUses> tied;
  StepState step;
  std::vector<double> counted;         // targets of each share: check_batch()
  std::unique_ptr<Watchdog> watchdog;  // null: options.watch is off

 private:
  [[noreturn]] void throw_with_plan(const std::string& who, const Error& error) const;
  void take_memory();
  // The interfaces of a stage. Throws Error(kUsage) where one is missing.
  StageBinding bind(Stage& stage, int index);
  void place_gradients();
  // Whether pages of gradients come with the first step.
  [[nodiscard]] bool gives_gradients_back() const;
  void prepare_stages();
  // The parameters of a stage, before prepare().
  void allocate(ParameterSet& set, const StageSetup& setup, int stage);
  void make_nccl();
  void make_store();
  [[nodiscard]] DeviceBatch::Capacity batch_capacity() const;
  // Only a training engine records traces and CUDA graphs.
  std::unique_ptr<Engine> make_engine(const Plan& plan, bool trains);
  void start_watchdog();
};

}  // namespace sluice
