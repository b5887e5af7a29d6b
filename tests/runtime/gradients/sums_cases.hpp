// What tests of sums over replicas share, on CPUs and on GPUs: sums of buckets that start within a
// backward, and where sums stand in a trace. Ranks are threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "runtime/files/trace.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {

// A whole model with two parameters of one bucket each, whose gradients are the replica's number
// from 1 on. Its last backward finishes the second one, calls `meanwhile` and goes on.
class TwoBucketStage : public CopyingStage {
 public:
  static constexpr std::size_t kFloats = kBufferAlignment / sizeof(float);  // of a bucket
  using Meanwhile = std::function<void(StageContext&, std::span<float> second)>;

  TwoBucketStage(int replica, Meanwhile meanwhile)
      : first_(&set_.add("first", Shape{kFloats}, Init::constant(0))),
        second_(&set_.add("second", Shape{kFloats}, Init::constant(0))),
        numbers_(kFloats, static_cast<float>(replica + 1)),
        meanwhile_(std::move(meanwhile)) {}

  void backward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor>) override {
    write(ctx, *second_);
    if (ctx.final_gradients != nullptr) meanwhile_(ctx, second_->grad.floats());
    write(ctx, *first_);
  }

 private:
  void write(StageContext& ctx, const Parameter& parameter) {
    copy_now(ctx.compute.device(), parameter.grad.data, numbers_.data(), kFloats * sizeof(float));
  }

  Parameter *first_, *second_;
  std::vector<float> numbers_;
  Meanwhile meanwhile_;
};

// A step of such a stage per replica, each with these calls of its last backwards.
struct TwoBuckets {
  std::vector<double> norms;
  std::vector<std::string> errors;  // [replica] empty where none
};
template <typename BucketStage = TwoBucketStage>
TwoBuckets run_two_buckets(
    int replicas, const char* devices, bool progress_in_actions,
    const std::function<void(int replica, StageContext&, std::span<float>)>& meanwhile) {
  TwoBuckets ran{std::vector<double>(static_cast<std::size_t>(replicas)),
                 std::vector<std::string>(static_cast<std::size_t>(replicas))};
  run_loopback(replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = 1;
    options.shape.replicas = replicas;
    options.shape.micro_batches = 2;
    options.devices.choices = parse_devices(devices);
    options.devices.threads = 1;
    options.expert.bucket_bytes = TwoBucketStage::kFloats * sizeof(float);
    options.expert.progress_in_actions = progress_in_actions;
    const auto source =
        make_array_source({1, 2, 3, 4, 5, 6, 7, 8}, 1, std::vector<float>(8, 1), 1, 2 * replicas);
    const int replica = comm.rank();
    const auto place = static_cast<std::size_t>(replica);
    const StageFactory factory = [&](int, int) {
      return std::make_unique<BucketStage>(
          replica, [&meanwhile, replica](StageContext& ctx, std::span<float> second) {
            meanwhile(replica, ctx, second);
          });
    };
    try {
      Pipeline pipeline(comm, factory, *source, options);
      ran.norms[place] = pipeline.train_step().grad_norm;
    } catch (const Error& error) {
      ran.errors[place] = error.what();
    }
  });
  return ran;
}

// With two chunks per rank of two, the sum of the chunk that finishes first comes between the
// other's actions.
inline void expect_sums_between_actions(int replicas, const char* devices) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  const StageFactory factory = Transformer(model);
  run_loopback(2 * replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = 2;
    options.shape.replicas = replicas;
    options.order.schedule = "interleaved";
    options.order.chunks = 2;
    options.shape.micro_batches = 4;
    options.devices.choices = parse_devices(devices);
    options.checks.trace = true;
    Pipeline pipeline(comm, factory, *source, options);
    (void)pipeline.train_step();
    double last_compute = 0;
    std::vector<TraceEvent> sums;
    for (const TraceEvent& event : PipelineAccess::trace(pipeline)) {
      if (event.track == TraceTrack::kCompute) last_compute = std::max(last_compute, event.start);
      if (event.track == TraceTrack::kSums) sums.push_back(event);
    }
    ASSERT_EQ(sums.size(), 2U);
    EXPECT_EQ(sums[0].action, static_cast<std::uint8_t>(ActionKind::kReduceGrad));
    EXPECT_LT(sums[0].start, last_compute);
    EXPECT_GT(sums[1].start, last_compute);
    EXPECT_EQ(sums[0].stage, PipelineAccess::layout(pipeline).place.here.pipeline + 2);
  });
}

}  // namespace sluice::testing
