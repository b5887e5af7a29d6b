// The memory of a GPU's rank: planned to the byte, taken in one piece. On the emulated CUDA, which
// knows every cudaMalloc.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/operators/context.hpp"
#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/modules.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

struct Job {
  std::string name;
  TransformerConfig model;
  PipelineOptions options;
};

// Large enough that sums run in several blocks and slices: every operator takes scratch.
TransformerConfig model_with(TransformerKind kind, DType precision) {
  TransformerConfig model = small_model();
  model.kind = kind;
  model.kv_heads = kind == TransformerKind::kLlama ? 1 : 2;
  model.precision = precision;
  model.context = 40;
  model.vocabulary = 600;
  return model;
}

Job job(const std::string& name, const TransformerConfig& model, int pipeline,
        const std::string& schedule, int chunks = 1) {
  Job result{name + ", " + schedule, model, {}};
  result.options.shape.pipeline = pipeline;
  result.options.order.schedule = schedule;
  result.options.order.chunks = chunks;
  result.options.shape.micro_batches = 4;
  result.options.shape.micro_batch_size = 2;
  result.options.expert.evaluations = {12};
  result.options.devices.choices = parse_devices("cuda");
  return result;
}

std::vector<Job> jobs() {
  constexpr auto kGpt2 = TransformerKind::kGpt2, kLlama = TransformerKind::kLlama;
  std::vector<Job> all;
  all.push_back(job("gpt2 f32", model_with(kGpt2, DType::kF32), 4, "gpipe"));
  all.push_back(job("gpt2 bf16", model_with(kGpt2, DType::kBf16), 3, "zb-h1"));
  all.push_back(job("llama f32", model_with(kLlama, DType::kF32), 3, "1f1b"));
  all.push_back(job("llama bf16", model_with(kLlama, DType::kBf16), 4, "zb-h1"));
  TransformerConfig model = model_with(kGpt2, DType::kBf16);
  all.push_back(job("one rank", model, 1, "1f1b"));
  all.push_back(job("chunks", model, 2, "zb-v", 2));
  all.push_back(job("graphs", model, 2, "1f1b"));
  all.back().options.devices.cuda_graphs = true;
  model.dropout = 0.2F;
  model.recompute = Recompute::kAttention;
  all.push_back(job("dropout, recomputed attention", model, 2, "1f1b"));
  model = model_with(kLlama, DType::kF32);
  model.dropout = 0.2F;
  model.recompute = Recompute::kBlock;
  all.push_back(job("dropout, recomputed blocks", model, 2, "zb-h1"));
  TransformerConfig mixed = model;
  mixed.recompute_blocks.assign(static_cast<std::size_t>(model.layers), Recompute::kNone);
  mixed.recompute_blocks.front() = Recompute::kBlock;
  all.push_back(job("one block recomputed", mixed, 1, "1f1b"));
  all.push_back(job("momentum", model, 2, "1f1b"));
  all.back().options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
  all.back().options.training.optimizer.momentum = 0.9F;
  TransformerConfig chunks = model_with(kGpt2, DType::kBf16);
  chunks.logit_chunks = 2;  // of the 560 rows of a micro-batch
  all.push_back(job("logits in chunks", chunks, 2, "1f1b"));
  all.back().options.shape.micro_batch_size = 14;
  all.push_back(job("logits in chunks, split", chunks, 2, "zb-h1"));
  all.back().options.shape.micro_batch_size = 14;
  TransformerConfig stream = model_with(kGpt2, DType::kBf16);
  stream.stream_precision = DType::kBf16;
  all.push_back(job("bf16 stream", stream, 2, "1f1b"));
  stream.dropout = 0.2F;
  all.push_back(job("bf16 stream, dropout, split", stream, 2, "zb-h1"));
  all.push_back(job("moments in bf16", model, 2, "1f1b"));
  all.back().options.training.optimizer.moments = DType::kBf16;
  using To = PipelineOptions::Offload::To;
  all.push_back(job("offloaded to the host", model_with(kLlama, DType::kF32), 4, "gpipe"));
  all.back().options.offload.activations = To::kHost;
  all.push_back(job("offloaded to a disk", model_with(kGpt2, DType::kBf16), 4, "gpipe"));
  all.back().options.offload = {.activations = To::kDisk,
                                .directory = std::filesystem::temp_directory_path()};
  all.push_back(job("three replicas over NCCL", model_with(kGpt2, DType::kF32), 2, "1f1b"));
  all.back().options.shape.replicas = 3;
  all.push_back(all.back());
  all.back().name = "three replicas through host memory";
  all.back().options.devices.transport = TransportChoice::kMpi;
  // Units of several 2 MiB, of which a rank has three.
  TransformerConfig large = model_with(kGpt2, DType::kF32);
  large.layers = 4;
  large.width = 512;
  large.context = 8;
  all.push_back(job("shards of parameters over NCCL", large, 2, "1f1b"));
  all.back().options.shape.replicas = 2;
  all.back().options.shape.shard = ShardLevel::kParameters;
  all.back().options.shape.shard_gather = ShardGather::kUse;
  all.push_back(all.back());
  all.back().name = "sums of each micro-batch over NCCL";
  all.back().options.training.gradient_order = GradientOrder::kMicroBatch;
  all.push_back(all.back());
  all.back().name = "sums of each micro-batch through host memory";
  all.back().options.shape.shard = ShardLevel::kGradients;
  all.back().options.shape.shard_gather = ShardGather::kAuto;
  all.back().options.devices.transport = TransportChoice::kMpi;
  all.push_back(all.back());
  all.back().options.shape.shard = ShardLevel::kParameters;
  all.back().options.shape.shard_gather = ShardGather::kUse;
  all.back().options.training.gradient_order = GradientOrder::kStep;
  all.back().name = "shards of bf16 parameters through host memory";
  all.back().model.precision = DType::kBf16;
  all.back().options.devices.transport = TransportChoice::kMpi;
  all.push_back(all.back());
  all.back().name = "shards of bf16 parameters that are gathered once a step";
  all.back().options.shape.shard_gather = ShardGather::kStep;
  all.push_back(job("four shards", model_with(kGpt2, DType::kBf16), 1, "1f1b"));
  all.back().options.shape.tensor_shards = 4;
  all.push_back(job("two tensor ranks over NCCL", model_with(kLlama, DType::kF32), 2, "zb-h1"));
  all.back().options.shape.tensor = 2;
  all.back().options.shape.tensor_shards = 4;
  all.push_back(all.back());
  all.back().name = "two tensor ranks through host memory";
  all.back().options.devices.transport = TransportChoice::kMpi;
  return all;
}

StageFactory transformer(const TransformerConfig& model) { return Transformer(model); }

void run(const Job& job, const std::function<void(Communicator&, const DataSource&)>& body) {
  const auto source = synthetic_tokens(job.model);
  const PipelineOptions::Shape& shape = job.options.shape;
  run_loopback(shape.pipeline * shape.replicas * shape.tensor,
               [&](Communicator& comm) { body(comm, *source); });
}

std::size_t mine(Communicator& comm) { return emulated::allocations(comm.rank()).size(); }

class JobMemoryTest : public ::testing::TestWithParam<Job> {};

// Each rank has a GPU of its own.
TEST_P(JobMemoryTest, IsWhatWasPlannedToTheByteInOnePiece) {
  const Job& each = GetParam();
  const PipelineOptions::Shape& shape = each.options.shape;
  struct Used {
    std::size_t of_arena = 0, of_device = 0;
  };
  std::vector<Used> used(static_cast<std::size_t>(shape.pipeline * shape.replicas * shape.tensor));
  run(each, [&](Communicator& comm, const DataSource& source) {
    const std::size_t before = mine(comm);
    const Device device{DeviceKind::kCuda, comm.rank()};
    const std::size_t free = properties_of(device).free_memory;
    Pipeline pipeline(comm, transformer(each.model), source, each.options);
    const int steps = each.options.devices.cuda_graphs ? 3 : 2;  // called twice, then replayed
    for (int step = 0; step < steps; ++step) (void)pipeline.train_step();
    (void)pipeline.evaluate(source, 12);
    const std::string where = each.name + ", rank " + std::to_string(comm.rank());
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    const RankMemory& planned = layout.memory.of(layout.place.here);
    ASSERT_EQ(pipeline.compute().device().index, comm.rank());
    EXPECT_EQ(ContextAccess::workspace_peak(pipeline.compute()), layout.memory.operator_bytes)
        << where;
    EXPECT_EQ(emulated::allocations(comm.rank())[before], planned.arena()) << where;
    EXPECT_EQ(mine(comm), before + 1) << where;
    const DeviceMemory::Figures figures = pipeline.compute().memory().figures();
    EXPECT_EQ(figures.peak, figures.used) << where;
    used[static_cast<std::size_t>(comm.rank())] = {figures.used,
                                                   free - properties_of(device).free_memory};
    PipelineAccess::world(pipeline).barrier();
    Used most;  // of the replicas, whose shards differ
    for (const int rank : layout.place.topology.group(Axis::kReplica, layout.place.here)) {
      const Used& other = used[static_cast<std::size_t>(rank)];
      most = {std::max(most.of_arena, other.of_arena), std::max(most.of_device, other.of_device)};
    }
    EXPECT_EQ(most.of_device, planned.total() - planned.libraries) << where;
    // A rank that multiplies nothing, one of an embedding alone, leaves the matmuls' scratch.
    const std::size_t idle = planned.arena() - most.of_arena;
    if (layout.place.here.pipeline > 0 || idle != library_bytes(DeviceKind::kCuda)) {
      EXPECT_EQ(idle, 0U) << where;
    }
  });
}

// Stages in inference run forward alone, also when they warm up: no memory for gradients is planned
// or taken. (Operands of the warm-up find no room that training's state would fill later: they lie
// outside for a while.)
void check_inference(int ranks) {
  Job each = job("gpt2 bf16", model_with(TransformerKind::kGpt2, DType::kBf16), ranks, "1f1b");
  const std::size_t table =
      parameter_bytes(std::int64_t{each.model.vocabulary} * each.model.width);  // of the embedding
  each.options.training.inference = true;
  run(each, [&](Communicator& comm, const DataSource& source) {
    const std::size_t before = mine(comm);
    Pipeline pipeline(comm, transformer(each.model), source, each.options);
    (void)pipeline.evaluate(source, 12);
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    const RankMemory& planned = layout.memory.of(layout.place.here);
    EXPECT_EQ(planned.gradients, 0U);
    EXPECT_EQ(emulated::allocations(comm.rank())[before], planned.arena());
    const DeviceMemory::Figures figures = pipeline.compute().memory().figures();
    EXPECT_EQ(figures.peak, figures.used);
    EXPECT_EQ(figures.used, planned.arena());
    PipelineOptions trains = each.options;
    trains.training.inference = false;
    const MemoryTable training =
        PipelineAccess::plan_layout(comm, trains, transformer(each.model), source).memory;
    EXPECT_EQ(training.ranks[static_cast<std::size_t>(layout.place.here.pipeline)].parameters,
              planned.parameters + (ranks == 1 ? table : 0));
  });
}

TEST(DeviceMemoryPlanTest, HasNoGradientsInInference) { check_inference(2); }

TEST(DeviceMemoryPlanTest, HoldsATiedEmbeddingOnceInInferenceOnOneRank) { check_inference(1); }

std::string name_of_job(const ::testing::TestParamInfo<Job>& info) {
  std::string name = info.param.name;
  std::erase_if(name,
                [](char letter) { return std::isalnum(static_cast<unsigned char>(letter)) == 0; });
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, JobMemoryTest, ::testing::ValuesIn(jobs()), name_of_job);

// The last micro-batch is smaller, and so are some of evaluation's: planned for the largest.
TEST(DeviceMemoryPlanTest, HoldsSmallerMicroBatchesToo) {
  Job uneven = job("uneven", model_with(TransformerKind::kGpt2, DType::kF32), 2, "1f1b");
  uneven.options.shape.batch_size = 7;
  uneven.options.expert.evaluations = {5, 131};
  run(uneven, [&](Communicator& comm, const DataSource& source) {
    const std::size_t before = mine(comm);
    Pipeline pipeline(comm, transformer(uneven.model), source, uneven.options);
    (void)pipeline.train_step();
    (void)pipeline.evaluate(source, 131);
    (void)pipeline.evaluate(source, 5);
    EXPECT_EQ(ContextAccess::workspace_peak(pipeline.compute()),
              PipelineAccess::layout(pipeline).memory.operator_bytes);
    EXPECT_EQ(mine(comm), before + 1);
  });
}

TEST(DeviceMemoryPlanTest, ADryRunTakesNothing) {
  const Job dry = job("dry", model_with(TransformerKind::kLlama, DType::kBf16), 2, "1f1b");
  run(dry, [&](Communicator& comm, const DataSource& source) {
    const std::size_t before = mine(comm);
    const JobLayout layout =
        PipelineAccess::plan_layout(comm, dry.options, transformer(dry.model), source);
    EXPECT_GT(layout.memory.ranks.front().operators, layout.memory.operator_bytes);
    EXPECT_EQ(mine(comm), before);
  });
}

// The first of two stages, with a changed description or changed allocations.
class ChangedStage : public Stage, public SplitBackward {
 public:
  explicit ChangedStage(const TransformerConfig& model)
      : stage_(Transformer(model).stage_of({{0, 3, 4}}, 0)) {}
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    return stage_->describe(inputs, compute);
  }
  void prepare(const StageSetup& setup) override { stage_->prepare(setup); }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    stage_->forward(ctx, inputs, outputs);
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    stage_->backward(ctx, grad_outputs, grad_inputs);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override {
    split().backward_input(ctx, grad_outputs, grad_inputs);
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override {
    split().backward_weight(ctx, grad_outputs);
  }
  ParameterSet* parameters() override { return stage_->parameters(); }

 private:
  [[nodiscard]] SplitBackward& split() { return dynamic_cast<SplitBackward&>(*stage_); }
  std::unique_ptr<Stage> stage_;
};

template <typename First, typename... Arguments>
StageFactory first_and_last(const TransformerConfig& model, Arguments... arguments) {
  return [=](int stage, int) -> std::unique_ptr<Stage> {
    if (stage == 0) return std::make_unique<First>(model, arguments...);
    return Transformer(model).stage_of({{0, 3, 4}}, stage);
  };
}

// Describes the states of its micro-batches, and no other memory.
class SilentStage : public ChangedStage {
 public:
  using ChangedStage::ChangedStage;
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription silent, description = ChangedStage::describe(inputs, compute);
    silent.outputs = description.outputs;
    silent.input_gradients = description.input_gradients;
    silent.state_bytes_until_input = description.state_bytes_until_input;
    silent.state_bytes_until_weight = description.state_bytes_until_weight;
    silent.gradient_bytes_until_weight = description.gradient_bytes_until_weight;
    return silent;
  }
};

TEST(DeviceMemoryPlanTest, AStageThatDescribesTooLittleTrainsOnMemoryApart) {
  const Job each = job("silent", model_with(TransformerKind::kLlama, DType::kBf16), 2, "zb-h1");
  std::vector<double> told, silent;
  const auto losses = [&](const StageFactory& factory, std::vector<double>& into, bool fits) {
    run(each, [&](Communicator& comm, const DataSource& source) {
      Pipeline pipeline(comm, factory, source, each.options);
      for (int step = 0; step < 3; ++step) {
        const double loss = pipeline.train_step().loss;
        if (comm.rank() == 0) into.push_back(loss);
      }
      const DeviceMemory::Figures figures = pipeline.compute().memory().figures();
      EXPECT_EQ(figures.outside_arena == 0, fits || comm.rank() > 0);
      EXPECT_EQ(figures.outside_arena_bytes == 0, fits || comm.rank() > 0);
    });
  };
  losses(first_and_last<ChangedStage>(each.model), told, true);
  losses(first_and_last<SilentStage>(each.model), silent, false);
  EXPECT_EQ(told, silent);
}

// Allocates its state itself: it is in the table, but not in the arena.
class ApartStage : public ChangedStage {
 public:
  using ChangedStage::ChangedStage;
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = ChangedStage::describe(inputs, compute);
    description.own_memory = true;
    return description;
  }
};

TEST(DeviceMemoryPlanTest, MemoryOfAStagesOwnIsInTheTableAndNotInTheBlock) {
  const Job each = job("apart", model_with(TransformerKind::kGpt2, DType::kBf16), 2, "1f1b");
  run(each, [&](Communicator& comm, const DataSource& source) {
    const auto planned = [&](const StageFactory& factory) {
      return PipelineAccess::plan_layout(comm, each.options, factory, source).memory.ranks.front();
    };
    const RankMemory usual = planned(first_and_last<ChangedStage>(each.model));
    const RankMemory apart = planned(first_and_last<ApartStage>(each.model));
    EXPECT_EQ(apart.total(), usual.total());
    EXPECT_THAT(to_string(apart), ::testing::HasSubstr(fmt::format(
                                      "of these outside the rank's arena {:.1f}, in MiB",
                                      static_cast<double>(apart.outside_arena) / (1 << 20))));
    EXPECT_LE(apart.arena() + usual.activations + usual.workspace, usual.arena());
  });
}

// Takes more than any device has: in prepare() if `at_once`, else in the second step.
class HungryStage : public ChangedStage {
 public:
  HungryStage(const TransformerConfig& model, bool at_once)
      : ChangedStage(model), at_once_(at_once) {}
  void prepare(const StageSetup& setup) override {
    ChangedStage::prepare(setup);
    if (at_once_) more_ = setup.compute->memory().allocate(kBytes);
  }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    if (ctx.step == 2) (void)ctx.compute.workspace(kBytes);
    ChangedStage::forward(ctx, inputs, outputs);
  }
  static constexpr std::size_t kBytes = std::size_t{1} << 40;

 private:
  bool at_once_;
  Buffer more_;
};

std::string host_name() {
  std::array<char, 256> name{};
  EXPECT_EQ(gethostname(name.data(), name.size() - 1), 0);
  return name.data();
}

TEST(DeviceMemoryPlanTest, AnErrorSaysWhoAskedForHowMuchAndShowsTheTable) {
  const std::string host = host_name();
  const Job each = job("hungry", model_with(TransformerKind::kGpt2, DType::kF32), 2, "1f1b");
  for (const bool at_once : {true, false}) {
    run(each, [&](Communicator& comm, const DataSource& source) {
      std::string said;
      try {
        Pipeline pipeline(comm, first_and_last<HungryStage>(each.model, at_once), source,
                          each.options);
        for (int step = 0; step < 2; ++step) (void)pipeline.train_step();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kDevice);
        said = error.what();
      }
      for (const std::string& part :
           {(at_once ? "the stages on cuda:0 of " : "step 2 on cuda:0 of ") + host + ": ",
            std::string(at_once ? "stage 0, prepare(): " : "stage 0, forward of micro-batch 0: "),
            "cannot allocate " + std::to_string(HungryStage::kBytes) + " bytes",
            std::string("the plan of this rank: parameters ")}) {
        EXPECT_NE(said.find(part), std::string::npos) << part << " in: " << said;
      }
    });
  }
}

// The error names the buffer that gets no page-locked memory.
TEST(DeviceMemoryPlanTest, SoDoesAnErrorOfPageLockedMemory) {
  std::set<std::string> blamed;
  for (const int depth : {1, 2}) {
    Job each = job("locked", model_with(TransformerKind::kGpt2, DType::kF32), depth, "1f1b");
    each.options.devices.transport = TransportChoice::kMpi;
    each.options.expert.evaluations = {};
    for (const std::size_t most : {1UL, 64UL, 4096UL, 65536UL}) {
      emulated::set_most_host_memory(most);
      run(each, [&](Communicator& comm, const DataSource& source) {
        try {
          Pipeline pipeline(comm, transformer(each.model), source, each.options);
          (void)pipeline.train_step();
          pipeline.values_changed();
        } catch (const Error& error) {
          const std::string said = error.what(), gpu = "cuda:" + std::to_string(error.rank());
          EXPECT_EQ(error.code(), ErrorCode::kDevice);
          EXPECT_THAT(said, ::testing::MatchesRegex(fmt::format(
                                ".* on {0} of {1}: .*cannot allocate [0-9]+ bytes of page-locked "
                                "host memory for {0}: out of memory; the plan of this rank: "
                                "parameters .*",
                                gpu, host_name())));
          if (comm.rank() == 0) blamed.insert(said.substr(0, said.find(" on cuda:")));
        }
      });
    }
  }
  emulated::set_most_host_memory(SIZE_MAX);
  EXPECT_THAT(blamed, ::testing::IsSupersetOf({"messages", "the batches", "step 1"}));
}

TEST(DeviceMemoryPlanTest, SoDoesAnErrorOfTheMatmulLibrary) {
  const Job each = job("matmuls", model_with(TransformerKind::kGpt2, DType::kF32), 1, "1f1b");
  run(each, [&](Communicator& comm, const DataSource& source) {
    emulated::set_cublas_status(CUBLAS_STATUS_NOT_INITIALIZED);
    expect_error(ErrorCode::kDevice,
                 {"the libraries on cuda:0 of " + host_name() +
                  ": cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED; the plan of this rank: not "
                  "made yet"},
                 [&] { Pipeline(comm, transformer(each.model), source, each.options); });
    emulated::set_cublas_status(CUBLAS_STATUS_SUCCESS);
    Pipeline pipeline(comm, transformer(each.model), source, each.options);
    emulated::set_cublas_status(CUBLAS_STATUS_ALLOC_FAILED);
    expect_error(ErrorCode::kDevice,
                 {"step 1 on cuda:0 of " + host_name() + ": stage 0, forward of micro-batch 0: ",
                  ": CUBLAS_STATUS_ALLOC_FAILED (",
                  " bytes are free); the plan of this rank: ", "parameters "},
                 [&] { (void)pipeline.train_step(); });
    emulated::set_cublas_status(CUBLAS_STATUS_SUCCESS);
  });
}

TEST(DeviceMemoryPlanTest, SoDoesAKernelThatCannotBeLoaded) {
  const Job each = job("kernels", model_with(TransformerKind::kGpt2, DType::kF32), 1, "1f1b");
  run(each, [&](Communicator& comm, const DataSource& source) {
    Pipeline pipeline(comm, transformer(each.model), source, each.options);
    emulated::set_kernel_status(0, cudaErrorMemoryAllocation);
    expect_error(
        ErrorCode::kDevice,
        {"step 1 on cuda:0 of " + host_name() + ": stage 0, forward of micro-batch 0: launching ",
         ": out of memory; the plan of this rank: parameters "},
        [&] { (void)pipeline.train_step(); });
    emulated::set_kernel_status(0, cudaSuccess);
  });
}

// Runs out of memory in describe(), as a matmul library may that plans its matmuls.
class StartledStage : public ChangedStage {
 public:
  using ChangedStage::ChangedStage;
  StageDescription describe(std::span<const TensorSpec> /*inputs*/,
                            ComputeContext& /*compute*/) const override {
    throw OutOfMemory("no room for a plan");
  }
};

TEST(DeviceMemoryPlanTest, AnErrorBeforeThereIsATableNamesRankAndHost) {
  const Job each = job("plans", model_with(TransformerKind::kGpt2, DType::kF32), 2, "1f1b");
  run(each, [&](Communicator& comm, const DataSource& source) {
    expect_error(
        ErrorCode::kDevice,
        {"the layout on cuda:0 of " + host_name() + ": stage 0, describe() of ",
         ": no room for a plan; the plan of this rank: not made yet"},
        [&] { Pipeline(comm, first_and_last<StartledStage>(each.model), source, each.options); });
  });
}

// NCCL reports a full GPU as it reports every CUDA call that fails.
TEST(DeviceMemoryPlanTest, AnErrorOfACommunicatorThatCannotBeMadeShowsTheTable) {
  Job edges = job("edges", model_with(TransformerKind::kGpt2, DType::kF32), 2, "1f1b");
  Job sums = job("sums", edges.model, 1, "1f1b");
  sums.options.shape.replicas = 2;
  emulated::set_communicator_status(ncclUnhandledCudaError);
  for (const Job& each : {edges, sums}) {
    run(each, [&](Communicator& comm, const DataSource& source) {
      expect_error(ErrorCode::kDevice,
                   {"NCCL's communicators on cuda:", " of " + host_name() + ": NCCL of the ",
                    "making a communicator failed: unhandled cuda error",
                    "; the plan of this rank: parameters "},
                   [&] { Pipeline(comm, transformer(each.model), source, each.options); });
    });
  }
  emulated::set_communicator_status(ncclSuccess);
}

TEST(DeviceMemoryPlanTest, AnErrorOfAPeerThatIsGoneShowsNoTable) {
  const Job each = job("peer", model_with(TransformerKind::kGpt2, DType::kF32), 2, "1f1b");
  emulated::set_communicator_status(ncclRemoteError);
  run(each, [&](Communicator& comm, const DataSource& source) {
    try {
      const Pipeline pipeline(comm, transformer(each.model), source, each.options);
      ADD_FAILURE() << "made without its peer";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPeer);
      EXPECT_THAT(error.what(), ::testing::StartsWith("NCCL of the pipeline, rank "));
      EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("the plan of this rank")));
    }
  });
  emulated::set_communicator_status(ncclSuccess);
}

TEST(DeviceMemoryPlanTest, AnErrorOfLoadingSaysWhatWasLoadedAndShowsTheTable) {
  const Job each = job("loading", model_with(TransformerKind::kGpt2, DType::kF32), 1, "1f1b");
  const std::filesystem::path directory =
      std::filesystem::path(::testing::TempDir()) / fmt::format("sluice_load_{}", getpid());
  run(each, [&](Communicator& comm, const DataSource& source) {
    Pipeline pipeline(comm, transformer(each.model), source, each.options);
    (void)pipeline.train_step();
    save_checkpoint(pipeline, {.directory = directory});
    emulated::set_most_host_memory(1);
    expect_error(
        ErrorCode::kDevice,
        {"loading the checkpoint on cuda:0 of " + host_name() + ": cannot allocate ",
         " bytes of page-locked host memory for cuda:0", "; the plan of this rank: parameters "},
        [&] { load_checkpoint(pipeline, directory); });
    emulated::set_most_host_memory(SIZE_MAX);
  });
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace sluice::testing
