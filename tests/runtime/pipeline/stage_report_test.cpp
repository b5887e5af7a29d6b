#include "runtime/pipeline/stage_report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using Change = std::function<void(StageDescription&)>;

class DescribedStage : public Stage {
 public:
  explicit DescribedStage(Change change) : change_(std::move(change)) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    StageDescription description{.outputs = {inputs[0]}};
    change_(description);
    return description;
  }
  void prepare(const StageSetup&) override {}
  void forward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {}
  void backward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {}
  ParameterSet* parameters() override { return &set; }

  ParameterSet set;

 private:
  Change change_;
};

void expect_refused(Stage& stage, const std::string& what) {
  ComputeContext compute({}, 1);
  expect_error(ErrorCode::kUsage, {what, "; legal: at most 17592186044416"}, [&] {
    (void)report_of(stage, 3, {{{DType::kF32, {2, 3}}}}, {}, compute);
  });
}

// Sums of such sizes would wrap to less than there is.
TEST(StageReportTest, BytesThatNoMachineHasAreRefusedByName) {
  const std::vector<std::pair<std::string, std::size_t StageDescription::*>> sizes = {
      {"state until the input gradient", &StageDescription::state_bytes_until_input},
      {"state until the weight gradient", &StageDescription::state_bytes_until_weight},
      {"gradients until the weight gradient", &StageDescription::gradient_bytes_until_weight},
      {"shared gradients", &StageDescription::shared_gradient_bytes},
      {"workspace", &StageDescription::workspace_bytes},
      {"copies of parameters", &StageDescription::copy_bytes},
      {"scratch of operators", &StageDescription::operator_bytes},
      {"tables", &StageDescription::table_bytes}};
  for (const auto& [name, size] : sizes) {
    DescribedStage stage(
        [size = size](StageDescription& description) { description.*size = std::size_t{1} << 63; });
    expect_refused(stage, "stage 3 describes 9223372036854775808 bytes of " + name);
  }
  DescribedStage output([](StageDescription& description) {
    description.outputs = {{DType::kF32, {1 << 30, 1 << 20}}};
  });
  expect_refused(output, "bytes of an output");
}

TEST(StageReportTest, ParametersThatNoMachineHasAreRefused) {
  for (const bool buffers : {false, true}) {
    DescribedStage stage([](StageDescription&) {});
    for (int i = 0; i < 8; ++i) {
      const std::string name = "x" + std::to_string(i);
      const Shape shape{std::int64_t{1} << 59};
      buffers ? stage.set.add_buffer(name, shape, Init::constant(0))
              : stage.set.add(name, shape, Init::constant(0));
    }
    expect_refused(stage, buffers ? "bytes of buffers" : "bytes of parameters");
  }
}

}  // namespace
}  // namespace sluice
