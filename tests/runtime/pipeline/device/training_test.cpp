// Training on GPUs: the bits of one rank on a GPU at every depth and schedule, CPUs and GPUs in one
// pipeline, sums over replicas, and what is refused. Ranks are threads, or the job's own under
// mpirun. On a machine without a GPU the emulated CUDA runs all of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/topology.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/job_layout.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/stages/transformer/small_models.hpp"
#ifdef SLUICE_EMULATED
#include <cuda_runtime_api.h>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/modules.hpp"
#endif
#ifdef SLUICE_UNDER_MPI
#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/gpus/gpus_of_job.hpp"
#endif

namespace sluice::testing {
namespace {

TrainingCase short_case(const char* name) {
  TrainingCase result = named(name);
  result.micro_batches = 4;
  result.micro_batch_size = 1;
  result.steps = 2;
  return result;
}

std::vector<TrainingCase> cases() {
  std::vector<TrainingCase> all;
  all.push_back(short_case("tied, dropout"));
  all.back().model.dropout = 0.2F;
  all.push_back(short_case("untied bf16, moments too, smaller last micro-batch"));
  all.back().moments = DType::kBf16;
  all.back().model.tied = false;
  all.back().model.precision = DType::kBf16;
  all.back().micro_batch_size = 2;
  all.back().batch_size = 7;
  all.push_back(short_case("bf16, dropout"));
  all.back().model.precision = DType::kBf16;
  all.back().model.dropout = 0.2F;
  all.push_back(short_case("logits in chunks"));
  all.back().model.width = 16;
  all.back().model.logit_chunks = 2;  // of the 528 rows of a micro-batch
  all.back().micro_batches = 2;
  all.back().micro_batch_size = 33;
  all.push_back(short_case("llama, recomputed"));
  all.back().model.kind = TransformerKind::kLlama;
  all.back().model.kv_heads = 1;
  all.back().model.recompute = Recompute::kBlock;
  all.push_back(short_case("bf16 stream"));  // the last matmul of a branch adds to the residual
  all.back().model.precision = all.back().model.stream_precision = DType::kBf16;
  all.push_back(short_case("bf16 stream, dropout"));
  all.back().model.precision = all.back().model.stream_precision = DType::kBf16;
  all.back().model.dropout = 0.2F;
  all.push_back(short_case("llama with all its options"));
  set_options_of_llama(all.back().model);
  return all;
}

void expect_close(Communicator& comm, const std::string& where, const TrainingOutcome& expected,
                  const TrainingOutcome& actual, double tolerance) {
  if (comm.rank() != 0) return;
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(expected.losses[i], actual.losses[i], tolerance) << where << ", step " << i;
    EXPECT_NEAR(expected.norms[i], actual.norms[i], tolerance * 10) << where << ", step " << i;
  }
}

class DeviceTrainingTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { SLUICE_NEED_A_GPU(); }
};

// Gradients are NaN before each step, which overwrites them. The first case under all schedules,
// the others under one that splits the backward pass: the emulation is slow.
TEST_P(DeviceTrainingTest, EveryDepthAndScheduleGivesTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    bool all = true;
    for (TrainingCase what : cases()) {
      const TrainingOutcome expected = alone(comm, what, {.devices = "cuda:0"});
      what.before_step = [](Pipeline& pipeline) { (void)spoil_old_gradients(pipeline); };
      for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-v"}) {
        if (!all && std::string(schedule) != "zb-h1") continue;
        const Layout layout{.pipeline = GetParam(),
                            .schedule = schedule,
                            .chunks = std::string(schedule) == "zb-v" ? 2 : 1,
                            .devices = "cuda:0"};
        expect_same(comm, what.name + ", " + schedule, expected, train(comm, what, layout));
      }
      all = false;
    }
  });
}

TEST_P(DeviceTrainingTest, OffloadedActivationsGiveTheBitsOfOneRankThatKeeps) {
  using To = PipelineOptions::Offload::To;
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = short_case("offloaded activations");
    what.micro_batches = 7;
    const TrainingOutcome expected = alone(comm, what, {.devices = "cuda:0"});
    for (const To to : {To::kHost, To::kDisk}) {
      Layout layout{.pipeline = GetParam(), .devices = "cuda:0", .offload = {.activations = to}};
      if (to == To::kDisk) layout.offload.directory = std::filesystem::temp_directory_path();
      for (const char* schedule : {"gpipe", "1f1b"}) {
        layout.schedule = schedule;
        layout.cuda_graphs = to == To::kHost && layout.schedule == "gpipe";
        expect_same(comm, what.name + ", " + schedule, expected, train(comm, what, layout));
      }
    }
  });
}

TEST_P(DeviceTrainingTest, LossesAreTheCpusToRounding) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const TrainingCase& what : cases()) {
      const bool bf16 = what.model.precision == DType::kBf16;
      const TrainingOutcome cpu = alone(comm, what, {});
      const Layout layout{.pipeline = GetParam(), .devices = "cuda"};
      expect_close(comm, what.name, cpu, train(comm, what, layout), bf16 ? 2e-2 : 1e-5);
    }
  });
}

// Makes a value of the job's last rank NaN, or gives it back what it was. Collective.
void set_value(Communicator& comm, Pipeline& pipeline, float value, float& old) {
  if (comm.rank() == comm.size() - 1) {
    const auto all = pipeline.parameters();
    const auto owned = std::find_if(all.begin(), all.end(), [](const auto& p) { return p.owner; });
    float* const at = owned->parameter->value.as<float>();
    const Device device = pipeline.compute().device();
    pipeline.compute().stream().synchronize();  // the last update may still run
    copy_now(device, &old, at, sizeof(float));
    copy_now(device, at, &value, sizeof(float));
  }
  pipeline.values_changed();
}

// Five steps. The fourth, in which graphs are replayed, is not finite, or is passed over.
TrainingOutcome train_past_nan(Communicator& comm, const TrainingCase& what, const Layout& layout,
                               bool skip) {
  constexpr std::uint64_t kBadStep = 4;
  PipelineOptions options;
  options.shape.pipeline = layout.pipeline;
  options.shape.replicas = layout.replicas;
  options.shape.micro_batches = what.micro_batches;
  options.order.schedule = layout.schedule;
  options.order.chunks = layout.chunks;
  options.devices.choices = parse_devices(layout.devices);
  options.devices.transport = layout.transport;
  options.devices.all_reduce = layout.all_reduce;
  options.devices.cuda_graphs = layout.cuda_graphs;
  options.training.learning_rate = {.peak = 1e-2, .steps = 10};
  options.training.skip_nonfinite = skip;
  const auto source = synthetic_tokens(what.model);
  const StageFactory factory = Transformer(what.model);
  Pipeline pipeline(comm, factory, *source, options);
  TrainingOutcome outcome;
  while (pipeline.step() < 5) {
    if (pipeline.step() + 1 == kBadStep && skip) {
      float old = 0, bad = 0;
      set_value(comm, pipeline, std::numeric_limits<float>::quiet_NaN(), old);
      EXPECT_TRUE(pipeline.train_step().skipped);
      set_value(comm, pipeline, old, bad);
    } else if (pipeline.step() + 1 == kBadStep) {
      pipeline.set_step(kBadStep);
    } else {
      const StepReport report = pipeline.train_step();
      outcome.losses.push_back(report.loss);
      outcome.norms.push_back(report.grad_norm);
    }
  }
  pipeline.close();
  outcome.digest = digest_of(pipeline);
  return outcome;
}

void expect_nan_skipped(Communicator& comm, const TrainingCase& what, const Layout& layout) {
  expect_same(comm, what.name + ", " + layout.schedule,
              train_past_nan(comm, what, layout, /*skip=*/false),
              train_past_nan(comm, what, layout, /*skip=*/true));
}

TEST_P(DeviceTrainingTest, AStepThatIsNotFiniteChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const bool graphs : {false, true}) {
      expect_nan_skipped(comm, cases().front(),
                         {.pipeline = GetParam(), .devices = "cuda:0", .cuda_graphs = graphs});
    }
  });
}

class MixedPipelineTest : public DeviceTrainingTest {};

TEST_P(MixedPipelineTest, CpusAndGpusInTurn) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    std::string mixed, other;
    for (int rank = 0; rank < GetParam(); ++rank) {
      mixed += rank % 2 == 0 ? ",cuda:0" : ",cpu";
      other += rank % 2 == 0 ? ",cpu" : ",cuda:0";
    }
    TrainingCase what = cases().front();
    const TrainingOutcome cpu = alone(comm, what, {});
    for (const std::string& devices : {mixed.substr(1), other.substr(1)}) {
      const Layout layout{.pipeline = GetParam(), .devices = devices};
      const TrainingOutcome first = train(comm, what, layout);
      expect_close(comm, devices, cpu, first, 1e-5);
      // Another schedule, the same devices: the same bits.
      const Layout gpipe{.pipeline = GetParam(), .schedule = "gpipe", .devices = devices};
      expect_same(comm, devices, first, train(comm, what, gpipe));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Depths, DeviceTrainingTest, ::testing::Values(1, 2, 3, 4));
INSTANTIATE_TEST_SUITE_P(Depths, MixedPipelineTest, ::testing::Values(2, 3, 4));

class DeviceReplicasTest : public DeviceTrainingTest {};

// Two replicas prove nothing: any order gives the same sum.
TEST_P(DeviceReplicasTest, ThreeReplicasGiveTheSameBitsAtEveryDepth) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = short_case("three replicas");
    what.micro_batches = 2;
    TrainingOutcome expected;
    if (comm.rank() == 0) {
      run_loopback(3, [&](Communicator& ranks) {
        const TrainingOutcome outcome = train(ranks, what, {.replicas = 3, .devices = "cuda:0"});
        if (ranks.rank() == 0) expected = outcome;
      });
    }
    const Layout layout{.pipeline = GetParam() / 3, .replicas = 3, .devices = "cuda:0"};
    expect_same(comm, "three replicas", expected, train(comm, what, layout));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceReplicasTest, ::testing::Values(6));

// Each rank has its own GPU: in a job with several GPUs, or on the emulation.
class NcclTrainingTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
#ifdef SLUICE_UNDER_MPI
    if (world().size() != GetParam()) return;  // left to another job, as with_ranks() does
    SLUICE_NEED_GPUS(GetParam(), gpus_of_job(world()));
#else
    SLUICE_NEED_GPUS(GetParam(), device_count(DeviceKind::kCuda));
#endif
    const std::vector<RankDevice> devices(1);
    if (const std::string why = why_no_nccl(devices); !why.empty()) GTEST_SKIP() << why;
  }
};

// The first case under all schedules, the others under one: the emulation is slow.
TEST_P(NcclTrainingTest, EveryScheduleGivesTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    bool all = true;
    for (const TrainingCase& what : cases()) {
      const TrainingOutcome expected = alone(comm, what, {.devices = "cuda:0"});
      for (const char* schedule : {"1f1b", "gpipe", "interleaved", "zb-v"}) {
        if (!all && std::string(schedule) != "1f1b") continue;
        const bool parted =
            std::string(schedule) == "interleaved" || std::string(schedule) == "zb-v";
        const Layout layout{.pipeline = GetParam(),
                            .schedule = schedule,
                            .chunks = parted ? 2 : 1,
                            .devices = "cuda",
                            .transport = TransportChoice::kNccl};
        if (4 % GetParam() != 0 && std::string(schedule) == "interleaved") continue;
        expect_same(comm, what.name + ", " + schedule, expected, train(comm, what, layout));
      }
      all = false;
    }
  });
}

// A CPU at the end of the pipeline: its edge goes through host memory, the others over NCCL.
TEST_P(NcclTrainingTest, OneEdgeThroughHostMemoryBesideTheOthers) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    std::string devices = "cpu";
    for (int rank = 1; rank < GetParam(); ++rank) devices.insert(0, "cuda,");
    const TrainingCase what = cases().front();
    const TrainingOutcome expected =
        train(comm, what,
              {.pipeline = GetParam(), .devices = devices, .transport = TransportChoice::kMpi});
    expect_same(comm, devices, expected,
                train(comm, what, {.pipeline = GetParam(), .devices = devices}));
  });
}

TEST_P(NcclTrainingTest, AStepThatIsNotFiniteChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    expect_nan_skipped(comm, cases().front(),
                       {.pipeline = GetParam(),
                        .schedule = "zb-h1",
                        .devices = "cuda",
                        .transport = TransportChoice::kNccl,
                        .cuda_graphs = true});
  });
}

// Fails in the second step.
class FailingStage : public WrappedStage {
 public:
  using WrappedStage::WrappedStage;
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    if (ctx.step > 1) throw Error(ErrorCode::kData, "the stage broke");
    WrappedStage::forward(ctx, inputs, outputs);
  }
};

// The others wait for messages that never come, NCCL's kernels with them.
TEST_P(NcclTrainingTest, ARankThatFailsEndsThoseThatWaitForIt) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    PipelineOptions options;
    options.shape.pipeline = GetParam();
    options.shape.micro_batches = 4;
    options.devices.choices = parse_devices("cuda");
    options.devices.transport = TransportChoice::kNccl;
    const StageFactory factory = [&](int stage, int stages) -> std::unique_ptr<Stage> {
      auto whole = Transformer(model)(stage, stages);
      if (stage > 0) return whole;
      return std::make_unique<FailingStage>(std::move(whole));
    };
    Pipeline pipeline(comm, factory, *source, options);
    std::string said;
    try {
      (void)pipeline.train_step();
      (void)pipeline.train_step();  // some hear of it before they have left the step before
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_NE(said.find("the stage broke"), std::string::npos) << said;
  });
}

INSTANTIATE_TEST_SUITE_P(Depths, NcclTrainingTest, ::testing::Values(2, 3, 4));

#if defined(SLUICE_EMULATED) && !defined(SLUICE_UNDER_MPI)

// Bytes that rank 0's GPU, the embedding's owner, copies to the host in a step.
std::size_t copied_to_host(int ranks, TransportChoice transport) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  std::size_t copied = 0;
  run_loopback(ranks, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = ranks;
    options.shape.micro_batches = 2;
    options.devices.choices = parse_devices("cuda");
    options.devices.transport = transport;
    const StageFactory factory = Transformer(model);
    Pipeline pipeline(comm, factory, *source, options);
    const std::size_t before = emulated::copied_to_host(comm.rank());
    (void)pipeline.train_step();
    if (comm.rank() == 0) copied = emulated::copied_to_host(0) - before;
  });
  return copied;
}

// Neither activations nor the tied embedding's gradient and value.
TEST_P(NcclTrainingTest, CopiesNothingToTheHostInAStep) {
  EXPECT_EQ(copied_to_host(GetParam(), TransportChoice::kNccl), 0U);
  EXPECT_GT(copied_to_host(GetParam(), TransportChoice::kMpi),
            static_cast<std::size_t>(small_model().vocabulary * small_model().width));
}

#endif

class NcclReplicasTest : public NcclTrainingTest {};

TEST_P(NcclReplicasTest, SumsInTheOrderOfReplicasAreTheHosts) {
  TrainingCase what = short_case("three replicas");
  what.micro_batches = 2;
  with_ranks(GetParam(), [&](Communicator& comm) {
    Layout layout{.pipeline = GetParam() / 3, .replicas = 3, .devices = "cuda"};
    const TrainingOutcome over_nccl = train(comm, what, layout);
    layout.transport = TransportChoice::kMpi;
    expect_same(comm, "through host memory", train(comm, what, layout), over_nccl);
    layout.transport = TransportChoice::kAuto;
    layout.all_reduce = true;
    expect_close(comm, "all-reduce", over_nccl, train(comm, what, layout), 1e-5);
  });
}

TEST_P(NcclReplicasTest, AStepThatIsNotFiniteInOneReplicaChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const bool all_reduce : {false, true}) {
      expect_nan_skipped(comm, short_case("three replicas"),
                         {.pipeline = GetParam() / 3,
                          .replicas = 3,
                          .devices = "cuda",
                          .all_reduce = all_reduce,
                          .cuda_graphs = true});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclReplicasTest, ::testing::Values(3, 6));

#ifndef SLUICE_UNDER_MPI

class DeviceRefusalTest : public ::testing::Test {
 protected:
  // The error that all of `ranks` ranks throw.
  static std::string refusal(int ranks, const Layout& layout,
                             const TrainingCase& what = short_case("refused")) {
    std::vector<std::string> said(static_cast<std::size_t>(ranks));
    run_loopback(ranks, [&](Communicator& comm) {
      try {
        (void)train(comm, what, layout);
      } catch (const Error& error) {
        said[static_cast<std::size_t>(comm.rank())] = error.what();
      }
    });
    for (const std::string& other : said) EXPECT_EQ(other, said.front());
    return said.front();
  }
};

TEST_F(DeviceRefusalTest, AnAbsentGpuIsNamedWithRankHostAndWhatIsLegal) {
  const std::string said = refusal(2, {.pipeline = 2, .devices = "cpu,cuda:4000"});
  EXPECT_NE(said.find("rank 1 on "), std::string::npos) << said;
  EXPECT_NE(said.find("cuda:4000"), std::string::npos) << said;
  EXPECT_NE(said.find("cpu"), std::string::npos) << said;
}

TEST_F(DeviceRefusalTest, AListThatFitsNeitherPipelineNorJob) {
  const std::string said = refusal(2, {.pipeline = 2, .devices = "cpu,cpu,cpu"});
  EXPECT_NE(said.find("3 devices for 2 ranks"), std::string::npos) << said;
}

TEST_F(DeviceRefusalTest, NcclNeedsAGpuAtBothEnds) {
  const std::string said =
      refusal(2, {.pipeline = 2, .devices = "cpu", .transport = TransportChoice::kNccl});
  EXPECT_NE(said.find("transport nccl cannot join pipeline ranks 0 (cpu) and 1 (cpu)"),
            std::string::npos)
      << said;
}

TEST_F(DeviceRefusalTest, TheOptimizersStateOfAGpuIsNotOffloaded) {
  SLUICE_NEED_A_GPU();
  const std::string said =
      refusal(2, {.pipeline = 2,
                  .devices = "cpu,cuda:0",
                  .offload = {.optimizer = PipelineOptions::Offload::To::kDisk,
                              .directory = std::filesystem::temp_directory_path()}});
  EXPECT_NE(said.find("the optimizer's state of cuda:0 on "), std::string::npos) << said;
  EXPECT_NE(said.find("cannot be offloaded; legal: ranks on CPUs alone"), std::string::npos)
      << said;
}

TEST_F(DeviceRefusalTest, TwoRanksOnOneGpuCannotUseNccl) {
  SLUICE_NEED_A_GPU();
  const std::string said =
      refusal(2, {.pipeline = 2, .devices = "cuda:0", .transport = TransportChoice::kNccl});
  EXPECT_NE(said.find("ranks 0 and 1"), std::string::npos) << said;
  EXPECT_NE(said.find("NCCL"), std::string::npos) << said;
}

TEST_F(DeviceRefusalTest, ReplicasThatShareAGpuCannotSumOverNccl) {
  SLUICE_NEED_A_GPU();
  const std::string said = refusal(
      2, {.pipeline = 1, .replicas = 2, .devices = "cuda:0", .transport = TransportChoice::kNccl});
  EXPECT_NE(said.find("transport nccl cannot sum over the 2 replicas of pipeline rank 0 (cuda:0)"),
            std::string::npos)
      << said;
}

TEST_F(DeviceRefusalTest, ReplicasOnCpusCannotSumOverNccl) {
  const std::string said = refusal(
      2, {.pipeline = 1, .replicas = 2, .devices = "cpu", .transport = TransportChoice::kNccl});
  EXPECT_NE(said.find("pipeline rank 0 (cpu): it needs GPUs"), std::string::npos) << said;
}

#ifdef SLUICE_EMULATED
// A driver with which NCCL cannot be used: MPI carries everything, unless the options ask for NCCL.
class OldDriverTest : public DeviceRefusalTest {
 protected:
  void SetUp() override { emulated::set_driver_version(12030); }
  void TearDown() override { emulated::set_driver_version(CUDART_VERSION); }
};

TEST_F(OldDriverTest, TrainsOverMpiWhereTheTransportIsOpen) {
  run_loopback(2, [](Communicator& comm) {
    const TrainingCase what = short_case("old driver");
    const TrainingOutcome expected = alone(comm, what, {.devices = "cuda:0"});
    expect_same(comm, "over MPI", expected, train(comm, what, {.pipeline = 2, .devices = "cuda"}));
  });
}

TEST_F(OldDriverTest, IsTheReasonWhereNcclIsInsistedOn) {
  for (const Layout& layout : {Layout{.pipeline = 2}, Layout{.pipeline = 1, .replicas = 2}}) {
    Layout wanted = layout;
    wanted.devices = "cuda";
    wanted.transport = TransportChoice::kNccl;
    const std::string said = refusal(2, wanted);
    EXPECT_NE(said.find("transport nccl cannot "), std::string::npos) << said;
    EXPECT_NE(said.find("NCCL cannot serve this job: rank 0 on "), std::string::npos) << said;
    EXPECT_NE(said.find("CUDA 12.4 or newer"), std::string::npos) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
}

TEST_F(OldDriverTest, IsLookedAtOnlyWhereNcclCouldBeChosen) {
  run_loopback(2, [](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    const auto why = [&](const char* devices, TransportChoice wanted) {
      const Topology topology = make_topology(2, {2, 1, 1}, RankOrder::kPipelineFirst);
      const auto job = choose_devices(world, topology, parse_devices(devices), {"host", "host"});
      return find_why_no_nccl(world, job, wanted);
    };
    EXPECT_NE(why("cuda", TransportChoice::kAuto), "");
    EXPECT_EQ(why("cuda", TransportChoice::kMpi), "");
    EXPECT_EQ(why("cuda,cpu", TransportChoice::kAuto), "");
    EXPECT_EQ(why("cpu", TransportChoice::kNccl), "");
  });
}
#endif

// 3.2e9 parameters in a block: more than any GPU holds, and refused before one is allocated.
TEST_F(DeviceRefusalTest, APlanThatDoesNotFitAGpuIsShownWithItsTable) {
  SLUICE_NEED_A_GPU();
  TrainingCase what = short_case("too large");
  what.model.layers = 200;
  what.model.width = 16384;
  const std::string said = refusal(2, {.pipeline = 2, .devices = "cpu,cuda:0"}, what);
  EXPECT_NE(said.find("rank 1 on "), std::string::npos) << said;
  EXPECT_NE(said.find("but the plan needs"), std::string::npos) << said;
  EXPECT_NE(said.find("rank 1: parameters "), std::string::npos) << said;
}

TEST_F(DeviceRefusalTest, ReplicasOnDifferentKindsOfDevice) {
  SLUICE_NEED_A_GPU();
  const std::string said = refusal(2, {.pipeline = 1, .replicas = 2, .devices = "cpu,cuda:0"});
  EXPECT_NE(said.find("rank 0 has cpu and rank 1 has cuda:0"), std::string::npos) << said;
}

#endif

}  // namespace
}  // namespace sluice::testing
