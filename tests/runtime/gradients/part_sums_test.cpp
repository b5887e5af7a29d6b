// Sums over replicas that update parts of parameters (options.shape.shard): an update sees the sum
// in its replica's part alone, every value comes to every replica and use, and gradients that the
// program reads are whole. On CPUs and, over every route, on GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/compute/call_arguments.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice::testing {
namespace {

using Values = std::map<std::string, std::vector<float>>;  // by parameter

constexpr std::int64_t kTied = 5 * kSumBlock + 65, kOwn = 3 * kSumBlock + 1;

// Of a stage's use of a parameter on a replica; all sums of them are exact.
float gradient_of(const std::string& name, int stage, int replica) {
  return static_cast<float>((name == "tied" ? 1 + stage : 10) * (1 + replica));
}
// Over stages and replicas.
float sum_of(const std::string& name, int stages, int replicas) {
  float sum = 0;
  for (int replica = 0; replica < replicas; ++replica) {
    for (int stage = 0; stage < (name == "tied" ? stages : 1); ++stage) {
      sum += gradient_of(name, stage, replica);
    }
  }
  return sum;
}

std::vector<float> on_host(Device device, const Tensor& tensor) {
  std::vector<float> values(tensor.floats().size());
  copy_now(device, values.data(), tensor.data, tensor.spec.bytes());
  return values;
}

// All stages use "tied", between parameters of their own. A backward writes the gradients from the
// last to the first, and says which are final.
class PartStage : public CopyingStage {
 public:
  PartStage(int stage, int replica) : stage_(stage), replica_(replica) {
    set_.add("first." + std::to_string(stage), Shape{kOwn}, Init::constant(0));
    set_.add("tied", Shape{kTied}, Init::constant(0), /*decay=*/false, /*tied=*/true);
    set_.add("last." + std::to_string(stage), Shape{kOwn}, Init::constant(0));
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    CopyingStage::backward(ctx, dy, dx);
    ctx.compute.stream().synchronize();
    const std::vector<Parameter*> all = set_.all();
    std::for_each(all.rbegin(), all.rend(), [&](const Parameter* each) {
      const std::vector<float> values(each->grad.floats().size(),
                                      gradient_of(each->name, stage_, replica_));
      copy_now(ctx.compute.device(), each->grad.data, values.data(), each->grad.spec.bytes());
      if (ctx.final_gradients == nullptr) return;
      const auto begin = each->grad.floats().data() - set_.flat_grads().data();
      ctx.final_gradients->from(static_cast<std::size_t>(begin));
    });
  }

 private:
  int stage_, replica_;
};

// Stage 0 has a parameter of no elements alone.
class PartStageButTheFirst : public PartStage {
 public:
  PartStageButTheFirst(int stage, int replica) : PartStage(stage, replica) {
    if (stage > 0) return;
    set_ = ParameterSet();
    set_.add("none", Shape{0}, Init::constant(0));
  }
};

// Takes the gradients from the values, and keeps what it saw.
class SeeingOptimizer : public Optimizer {
 public:
  SeeingOptimizer(std::span<const ParameterSlice> slices, Values* seen)
      : slices_(slices.begin(), slices.end()), seen_(seen) {}
  void update(ComputeContext& compute, std::uint64_t, float, float) override {
    compute.stream().synchronize();
    for (const ParameterSlice& slice : slices_) {
      const Parameter& parameter = *slice.parameter;
      const std::vector<float> grads = on_host(compute.device(), parameter.grad);
      std::vector<float> values = on_host(compute.device(), parameter.value);
      const auto end = static_cast<std::size_t>(slice.first + slice.count);
      for (auto i = static_cast<std::size_t>(slice.first); i < end; ++i) values[i] -= grads[i];
      copy_now(compute.device(), parameter.value.data, values.data(), parameter.value.spec.bytes());
      (*seen_)[parameter.name] = grads;
    }
  }
  std::vector<OptimizerState> state() override { return {}; }

 private:
  std::vector<ParameterSlice> slices_;
  Values* seen_;
};

struct PartCase {
  std::string devices = "cpu";
  TransportChoice transport = TransportChoice::kAuto;
};

std::string case_name(const ::testing::TestParamInfo<PartCase>& info) {
  std::string name = info.param.devices;
  std::erase(name, ',');
  return name + (info.param.transport == TransportChoice::kMpi ? "_mpi" : "");
}

class PartSumsTest : public ::testing::TestWithParam<PartCase> {
 protected:
  void SetUp() override {
    if (GetParam().devices == "cpu") return;
    SLUICE_NEED_GPUS(6, device_count(DeviceKind::kCuda));
  }
  [[nodiscard]] static PipelineOptions options(int stages, int replicas, Values* seen) {
    PipelineOptions options;
    options.shape.pipeline = stages;
    options.shape.replicas = replicas;
    options.shape.shard = ShardLevel::kOptimizer;
    options.shape.micro_batches = 1;
    options.shape.micro_batch_size = 1;
    options.devices.choices = parse_devices(GetParam().devices);
    options.devices.transport = GetParam().transport;
    options.training.clip = 0;
    options.training.make_optimizer = [seen](std::span<const ParameterSlice> slices,
                                             const DeviceMemory&) {
      return std::make_unique<SeeingOptimizer>(slices, seen);
    };
    options.expert.bucket_bytes = 100'000;  // a block and a half
    options.checks.replicas_every = 1;
    return options;
  }
  // Runs `body` on every rank of a job of each shape.
  using Body = std::function<void(Pipeline&, const Batch&, Values&)>;
  template <typename Made = PartStage>
  static void run(const Body& body) {
    for (const auto& [stages, replicas] : {std::pair{1, 2}, {2, 2}, {2, 3}, {3, 2}, {2, 1}}) {
      SCOPED_TRACE(std::to_string(stages) + " x " + std::to_string(replicas));
      run_loopback(stages * replicas, [&, p = stages, d = replicas](Communicator& comm) {
        Values seen;
        const TensorSpec number{DType::kF32, Shape{1}};
        const int replica = comm.rank() / p;
        Pipeline pipeline(
            comm, [&](int stage, int) { return std::make_unique<Made>(stage, replica); },
            BatchSpec{.inputs = {number}, .targets = {number}}, options(p, d, &seen));
        std::vector<float> one = {1};
        Batch batch;
        if (pipeline.share().inputs) batch.inputs = {view(std::span(one), Shape{1, 1})};
        if (pipeline.share().targets) batch.targets = {view(std::span(one), Shape{1, 1})};
        body(pipeline, batch, seen);
        pipeline.close();
      });
    }
  }
  static int stages_of(const Pipeline& pipeline) {
    return PipelineAccess::layout(pipeline).plans.num_stages();
  }
  static int replicas_of(const Pipeline& pipeline) {
    return PipelineAccess::layout(pipeline).place.topology.size.replica;
  }
  // Every value on this rank is what so many equal steps make of it.
  static void expect_values(Pipeline& pipeline, int steps) {
    pipeline.compute().wait();
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      const std::string& name = owned.parameter->name;
      const float expected =
          -sum_of(name, stages_of(pipeline), replicas_of(pipeline)) * static_cast<float>(steps);
      const std::vector<float> values =
          on_host(pipeline.compute().device(), owned.parameter->value);
      EXPECT_EQ(std::count(values.begin(), values.end(), expected),
                static_cast<std::ptrdiff_t>(values.size()))
          << name << " on stage " << owned.stage << " after step " << steps;
    }
  }
};

const ParameterEntry& entry_of(const Pipeline& pipeline, const std::string& name) {
  for (const StageEntry& stage : PipelineAccess::layout(pipeline).parameters.stages) {
    for (const ParameterEntry& each : stage.parameters) {
      if (each.name == name) return each;
    }
  }
  throw Error(ErrorCode::kInternal, "no parameter " + name);
}

TEST_P(PartSumsTest, AnUpdateSeesTheSumInItsPartAloneAndAllGetTheValues) {
  run([](Pipeline& pipeline, const Batch& batch, Values& seen) {
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    for (int step = 1; step <= 3; ++step) {
      (void)pipeline.train_step(batch);
      expect_values(pipeline, step);
    }
    for (const auto& [name, grads] : seen) {
      const ElementRange part = entry_of(pipeline, name).part(layout.place.here.replica);
      const float sum = sum_of(name, stages_of(pipeline), replicas_of(pipeline));
      for (std::size_t i = 0; i < grads.size(); ++i) {
        const auto element = static_cast<std::int64_t>(i);
        const bool mine = part.first <= element && element < part.end();
        ASSERT_EQ(grads[i] == sum, mine) << name << "[" << i << "]";
      }
    }
  });
}

TEST_P(PartSumsTest, GradientsThatTheProgramReadsAreWhole) {
  run([](Pipeline& pipeline, const Batch& batch, Values&) {
    for (int step = 1; step <= 2; ++step) {
      (void)pipeline.forward_backward(batch);
      pipeline.compute().wait();
      for (const Pipeline::Owned& owned : pipeline.parameters()) {
        if (!owned.owner) continue;
        const std::string& name = owned.parameter->name;
        const float sum = sum_of(name, stages_of(pipeline), replicas_of(pipeline));
        const std::vector<float> grads =
            on_host(pipeline.compute().device(), owned.parameter->grad);
        EXPECT_EQ(std::count(grads.begin(), grads.end(), sum),
                  static_cast<std::ptrdiff_t>(grads.size()))
            << name << " on stage " << owned.stage;
      }
      (void)pipeline.optimizer_step();
      expect_values(pipeline, 2 * step - 1);
      (void)pipeline.train_step(batch);
      expect_values(pipeline, 2 * step);
    }
  });
}

TEST_P(PartSumsTest, AStageMayHaveNoElements) {
  run<PartStageButTheFirst>([](Pipeline& pipeline, const Batch& batch, Values&) {
    for (int step = 1; step <= 2; ++step) {
      (void)pipeline.train_step(batch);
      pipeline.compute().wait();
      for (const Pipeline::Owned& owned : pipeline.parameters()) {
        const std::vector<float> values =
            on_host(pipeline.compute().device(), owned.parameter->value);
        EXPECT_EQ(values.empty(), owned.stage == 0);
        EXPECT_EQ(std::count(values.begin(), values.end(), 0), 0) << owned.parameter->name;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cpus, PartSumsTest, ::testing::Values(PartCase{}), case_name);
#if SLUICE_WITH_NCCL
using PartSumsOnGpusTest = PartSumsTest;
TEST_P(PartSumsOnGpusTest, ShardsOfGradientsAreRefused) {
  run_loopback(2, [](Communicator& comm) {
    Values none;
    PipelineOptions of_gradients = options(1, 2, &none);
    of_gradients.shape.shard = ShardLevel::kGradients;
    const TensorSpec number{DType::kF32, Shape{1}};
    expect_error(ErrorCode::kUsage,
                 {"shards of the gradients on cuda:", "legal on GPUs: shards of the optimizer"},
                 [&] {
                   const Pipeline pipeline(
                       comm, [](int stage, int) { return std::make_unique<PartStage>(stage, 0); },
                       BatchSpec{.inputs = {number}, .targets = {number}}, of_gradients);
                 });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, PartSumsOnGpusTest, ::testing::Values(PartCase{.devices = "cuda"}),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Gpus, PartSumsTest,
                         ::testing::Values(PartCase{.devices = "cuda"},
                                           PartCase{"cuda", TransportChoice::kMpi}),
                         case_name);
#endif

}  // namespace
}  // namespace sluice::testing
