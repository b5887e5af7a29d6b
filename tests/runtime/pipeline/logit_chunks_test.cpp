// Logits in chunks: what they save, and what they cannot do. That they change no bit is a case of
// exactness_test.cpp.
#include <gtest/gtest.h>

#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

void with_chunks(int chunks, const std::function<void(Pipeline&, const DataSource&)>& body,
                 bool inference = false) {
  TransformerConfig model = small_model();
  model.context = 128;
  model.vocabulary = 4096;
  model.logit_chunks = chunks;
  const auto source = synthetic_tokens(model);
  PipelineOptions options;
  options.shape = {.micro_batch_size = 16};
  options.training.inference = inference;
  run_loopback(1, [&](Communicator& comm) {
    Pipeline pipeline(comm, Transformer(model), *source, options);
    body(pipeline, *source);
  });
}

// 2,048 rows of 4,096 logits in f32 are 32 MiB.
TEST(LogitChunksTest, ThePlanHasOneChunkOfLogits) {
  const auto planned = [](int chunks) {
    std::size_t bytes = 0;
    with_chunks(chunks, [&](Pipeline& pipeline, const DataSource&) {
      bytes = PipelineAccess::layout(pipeline).memory.ranks[0].total();
    });
    return static_cast<double>(bytes) / (1 << 20);
  };
  const double whole = planned(1);
  EXPECT_NEAR(whole - planned(2), 16, 1);
  EXPECT_NEAR(whole - planned(4), 24, 1);
  EXPECT_EQ(planned(4), planned(64)) << "a chunk has at least 512 rows";
}

TEST(LogitChunksTest, AnEvaluationIsThatOfLogitsAtOnce) {
  double whole = 0, chunked = 0;
  with_chunks(1, [&](Pipeline& pipeline, const DataSource& source) {
    whole = pipeline.evaluate(source, 11).loss;
  });
  with_chunks(4, [&](Pipeline& pipeline, const DataSource& source) {
    chunked = pipeline.evaluate(source, 11).loss;
  });
  EXPECT_GT(whole, 1);
  EXPECT_EQ(chunked, whole);
  // A pipeline that does not train has no gradients.
  with_chunks(
      4,
      [&](Pipeline& pipeline, const DataSource& source) {
        chunked = pipeline.evaluate(source, 11).loss;
      },
      /*inference=*/true);
  EXPECT_EQ(chunked, whole);
}

TEST(LogitChunksTest, WhatIsNotLegalIsRefused) {
  expect_error(ErrorCode::kUsage, {"--logit-chunks", "0"},
               [] { with_chunks(0, [](auto&, auto&) {}); });
  expect_error(ErrorCode::kUsage, {"--logit-chunks", "65537"},
               [] { with_chunks(65537, [](auto&, auto&) {}); });
}

TEST(LogitChunksTest, InferenceIsRefusedAndThePipelineTrainsOn) {
  std::vector<std::int32_t> tokens(8 * 256, 1);
  const Tensor input{tokens.data(), {DType::kI32, Shape{8, 256}}};
  with_chunks(2, [&](Pipeline& pipeline, const DataSource&) {
    expect_error(ErrorCode::kUsage, {"2 chunks of logits", "legal there is 1"},
                 [&] { (void)pipeline.infer({.inputs = {input}}); });
    EXPECT_TRUE(pipeline.usable());
    EXPECT_GT(pipeline.train_step().loss, 0);
  });
}

}  // namespace
}  // namespace sluice::testing
