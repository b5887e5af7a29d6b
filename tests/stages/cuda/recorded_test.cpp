// Operators recorded in a CUDA graph and replayed in a later step: they read that step's values.
#include <cmath>
#include <functional>
#include <stdexcept>
#include <vector>

#include <sluice/operators.hpp>

#include "comm/device/device_graph.hpp"
#include "stages/cuda_kernels/kernels.hpp"
#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

class RecordedTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    step_ = std::make_unique<Buffer>(kGpu, sizeof(std::uint64_t));
    scale_ = std::make_unique<Buffer>(kGpu, sizeof(double));
    tell(1, 1);
  }
  // The step values in device memory.
  void tell(std::uint64_t step, double scale) const {
    copy_now(kGpu, step_->data(), &step, sizeof step);
    copy_now(kGpu, scale_->data(), &scale, sizeof scale);
  }
  [[nodiscard]] StepValue<double> recorded_scale() const {
    return {1e9, reinterpret_cast<const double*>(scale_->data())};
  }
  [[nodiscard]] Dropout recorded_mask() const {
    Dropout mask = mask_of(999'999);
    mask.step_on_device = reinterpret_cast<const std::uint64_t*>(step_->data());
    return mask;
  }
  static Dropout mask_of(std::uint64_t step) {
    return {0.4F, {(std::uint64_t{5} << 40) + 7, random_site(3, 1), step}, 12};
  }
  // Records `work`, tells the device of two steps and compares what a replay in each leaves in
  // `operand` after `plain`, which takes the values from the host.
  void expect_replays(const Operand& operand, const std::function<void(const Tensor&)>& work,
                      const std::function<void(const Tensor&, std::uint64_t, double)>& plain) {
    const OnGpu at(operand);
    work(at.tensor());  // kernels are loaded
    gpu().stream().synchronize();
    const Graph graph = Graph::record(gpu().stream(), [&] { work(at.tensor()); });
    for (const auto& [step, scale] :
         {std::pair{std::uint64_t{3}, 0.25}, std::pair{(std::uint64_t{1} << 33) + 9, 0.125}}) {
      const OnGpu expected(operand);
      plain(expected.tensor(), step, scale);
      copy_now(kGpu, at.data(), operand.buffer.data(), operand.buffer.size());
      tell(step, scale);
      graph.launch(gpu().stream());
      EXPECT_EQ(at.values(gpu()), expected.values(gpu())) << step;
    }
  }

 private:
  std::unique_ptr<Buffer> step_, scale_;
};

TEST_F(RecordedTest, DropoutDrawsTheStepsMask) {
  for (const std::int64_t count : {4096, 77}) {
    expect_replays(
        random_operand(DType::kF32, {count}, 1),
        [&](const Tensor& x) { dropout(gpu(), x, recorded_mask(), x); },
        [&](const Tensor& x, std::uint64_t step, double) { dropout(gpu(), x, mask_of(step), x); });
  }
}

TEST_F(RecordedTest, AttentionDrawsTheStepsMask) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 21, .heads = 2, .kv_heads = 1, .head_dim = 4};
  const Operand qkv = random_operand(DType::kF32, {shape.rows(), shape.packed_width()}, 2);
  const Operand dout = random_operand(DType::kF32, {shape.rows(), 8}, 3);
  const OnGpu packed(qkv), gradient(dout);
  const Buffer state(kGpu, attention_state_bytes(DeviceKind::kCuda, shape, DType::kF32));
  const auto forward = [&](const Tensor& out, const Dropout& mask) {
    attention_forward(gpu(), shape, packed.tensor(), mask, out, state.data());
  };
  expect_replays(
      random_operand(DType::kF32, {shape.rows(), 8}, 4),
      [&](const Tensor& out) { forward(out, recorded_mask()); },
      [&](const Tensor& out, std::uint64_t step, double) { forward(out, mask_of(step)); });
  const OnGpu out(random_operand(DType::kF32, {shape.rows(), 8}, 5));
  const auto backward = [&](const Tensor& dqkv, const Dropout& mask) {
    forward(out.tensor(), mask);
    attention_backward(gpu(), shape, packed.tensor(), out.tensor(), gradient.tensor(), mask,
                       state.data(), dqkv);
  };
  expect_replays(
      random_operand(DType::kF32, {shape.rows(), shape.packed_width()}, 6),
      [&](const Tensor& dqkv) { backward(dqkv, recorded_mask()); },
      [&](const Tensor& dqkv, std::uint64_t step, double) { backward(dqkv, mask_of(step)); });
}

TEST_F(RecordedTest, LossesScaleTheirGradientsByTheSteps) {
  const HostBuffer sum(kGpu, sizeof(double));
  auto* const total = reinterpret_cast<double*>(sum.data());
  const OnGpu classes(Operand(DType::kI32, {3}, {2, -1, 4}));
  const auto cross_entropy = [&](const Tensor& logits, const StepValue<double>& scale) {
    softmax_cross_entropy(gpu(), logits, classes.tensor(), scale, true, total);
  };
  expect_replays(
      random_operand(DType::kF32, {3, 9}, 7),
      [&](const Tensor& logits) { cross_entropy(logits, recorded_scale()); },
      [&](const Tensor& logits, std::uint64_t, double scale) { cross_entropy(logits, scale); });
  const OnGpu targets(random_operand(DType::kF32, {50}, 8));
  const auto squares = [&](const Tensor& outputs, const StepValue<double>& scale) {
    mean_squared_error(gpu(), outputs, targets.tensor(), scale, true, total);
  };
  expect_replays(
      random_operand(DType::kF32, {50}, 9),
      [&](const Tensor& outputs) { squares(outputs, recorded_scale()); },
      [&](const Tensor& outputs, std::uint64_t, double scale) { squares(outputs, scale); });
}

// Blocks count each other: a replay finds the count as its recording did.
TEST_F(RecordedTest, ColumnSumsAddUpInEveryReplay) {
  const OnGpu ones(Operand(DType::kF32, {300, 9}, Values(2700, 1)));
  const OnGpu sum(Operand(DType::kF32, {9}, Values(9, 300)));
  expect_replays(
      random_operand(DType::kF32, {9}, 10),
      [&](const Tensor& sums) { cuda::sum_columns(gpu(), ones.tensor(), sums); },
      [&](const Tensor& sums, std::uint64_t, double) { add(gpu(), sum.tensor(), sums); });
}

TEST_F(RecordedTest, NothingRunsWhileItIsRecorded) {
  const OnGpu x(Operand(DType::kF32, {5}, {1, 2, 3, 4, 5})),
      y(Operand(DType::kF32, {5}, Values(5, 1)));
  Graph graph = Graph::record(gpu().stream(), [&] { add(gpu(), x.tensor(), y.tensor()); });
  EXPECT_EQ(y.values(gpu()), Values(5, 1));
  const Graph moved = std::move(graph);
  EXPECT_TRUE(graph.empty());  // NOLINT(bugprone-use-after-move): that is the point
  moved.launch(gpu().stream());
  moved.launch(gpu().stream());
  EXPECT_EQ(y.values(gpu()), (Values{3, 5, 7, 9, 11}));
}

TEST_F(RecordedTest, WhatTheWorkThrowsEndsTheRecording) {
  const OnGpu x(Operand(DType::kF32, {2}, {1, 2})), y(Operand(DType::kF32, {2}, {5, 5}));
  const auto fail = [&] {
    add(gpu(), x.tensor(), y.tensor());
    throw std::runtime_error("the work broke");
  };
  EXPECT_THROW((void)Graph::record(gpu().stream(), fail), std::runtime_error);
  add(gpu(), x.tensor(), y.tensor());  // the stream is as before
  EXPECT_EQ(y.values(gpu()), (Values{6, 7}));
}

TEST_F(RecordedTest, WorkThatTakesMemoryOrWaitsIsRefused) {
  for (const auto& work : {std::function<void()>([&] { const Buffer more(kGpu, 64); }),
                           std::function<void()>([&] { gpu().stream().synchronize(); })}) {
    try {
      (void)Graph::record(gpu().stream(), work);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
    }
    gpu().stream().synchronize();  // as before
  }
}

}  // namespace
}  // namespace sluice
