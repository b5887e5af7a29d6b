// Parameters with more than two uses, some of them on CPUs: sums and values reach every use, over
// every kind of route.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/copying_stage.hpp"

namespace sluice::testing {
namespace {

// Three stages use "all", the first and the last use "ends"; a backward writes the gradients.
class TiedStage : public CopyingStage {
 public:
  static constexpr std::int64_t kFloats = 65;
  explicit TiedStage(int index)
      : index_(index), all_(&add("all")), ends_(index == 1 ? nullptr : &add("ends")) {}

  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    CopyingStage::backward(ctx, dy, dx);
    write(ctx, *all_, static_cast<float>(1 + index_));
    if (ends_ != nullptr) write(ctx, *ends_, static_cast<float>(10 * (1 + index_)));
  }

 private:
  Parameter& add(const char* name) {
    return set_.add(name, Shape{kFloats}, Init::constant(0), /*decay=*/false, /*tied=*/true);
  }
  static void write(StageContext& ctx, const Parameter& parameter, float value) {
    const std::vector<float> values(kFloats, value);
    ctx.compute.stream().synchronize();
    copy_now(ctx.compute.device(), parameter.grad.data, values.data(), kFloats * sizeof(float));
  }

  int index_;
  Parameter *all_, *ends_;
};

class TiedUsesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    devices_ = parse_devices(GetParam());
    if (std::string(GetParam()) == "cpu") return;
    SLUICE_NEED_GPUS(3, device_count(DeviceKind::kCuda));
  }
  [[nodiscard]] PipelineOptions options() const {
    PipelineOptions options;
    options.shape.pipeline = 3;
    options.devices.choices = devices_;
    options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
    options.training.learning_rate = {.peak = 1};
    return options;
  }
  // The route of each use to its owner.
  [[nodiscard]] static std::vector<RouteKind> routes(const TiedParameter& tie) {
    std::vector<RouteKind> kinds;
    for (const EdgeRoute& route : tie.routes) kinds.push_back(route.kind);
    return kinds;
  }

  std::vector<DeviceChoice> devices_;
};

float first_of(Pipeline& pipeline, const Parameter& parameter) {
  std::vector<float> values(TiedStage::kFloats);
  pipeline.compute().stream().synchronize();
  copy_now(pipeline.compute().device(), values.data(), parameter.value.data,
           values.size() * sizeof(float));
  EXPECT_EQ(values.front(), values.back());
  return values.front();
}

TEST_P(TiedUsesTest, AllGetTheOwnersValueAndTheOwnerAllGradients) {
  run_loopback(3, [&](Communicator& comm) {
    const auto source = make_array_source({1, 2}, 1, {1, 1}, 1, 2);
    Pipeline pipeline(
        comm, [](int stage, int) { return std::make_unique<TiedStage>(stage); }, *source,
        options());
    const std::vector<TiedParameter>& ties = PipelineAccess::layout(pipeline).parameters.tied;
    ASSERT_EQ(ties.size(), 2U);
    using enum RouteKind;
    if (SLUICE_WITH_NCCL != 0 && std::string(GetParam()) == "cuda,cpu,cuda") {
      EXPECT_EQ(routes(ties[0]), (std::vector{kLocal, kStaged, kNccl}));
      EXPECT_EQ(routes(ties[1]), (std::vector{kLocal, kNccl}));
    } else if (SLUICE_WITH_NCCL != 0 && std::string(GetParam()) == "cuda") {
      EXPECT_EQ(routes(ties[0]), (std::vector{kLocal, kNccl, kNccl}));
    } else if (std::string(GetParam()) == "cpu") {
      EXPECT_EQ(routes(ties[0]), (std::vector{kLocal, kHost, kHost}));
    }
    for (int step = 1; step <= 3; ++step) {
      (void)pipeline.train_step();
      for (const Pipeline::Owned& owned : pipeline.parameters()) {
        const float gradient = owned.parameter->name == "all" ? 1 + 2 + 3 : 10 + 30;
        EXPECT_EQ(first_of(pipeline, *owned.parameter), -gradient * static_cast<float>(step))
            << owned.parameter->name << " on stage " << owned.stage << " after step " << step;
      }
    }
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      const std::vector<float> values(TiedStage::kFloats, owned.owner ? 7 : 8);
      copy_now(pipeline.compute().device(), owned.parameter->value.data, values.data(),
               values.size() * sizeof(float));
    }
    pipeline.values_changed();
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      EXPECT_EQ(first_of(pipeline, *owned.parameter), 7) << "on stage " << owned.stage;
    }
    pipeline.close();
    EXPECT_THROW(pipeline.values_changed(), Error);
  });
}

std::string device_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::erase(name, ',');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Devices, TiedUsesTest,
                         ::testing::Values("cpu", "cuda", "cuda,cpu,cuda", "cpu,cuda,cuda"),
                         device_name);

}  // namespace
}  // namespace sluice::testing
