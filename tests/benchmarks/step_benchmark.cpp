// One rank's training step against its own matrix products: the step is recorded, then its products
// are replayed on the same operands, in turn with whole steps. Products of bf16 both ways: by the
// library's own, and widened to f32; the line on the machine tells which of them the program takes.
//   step_benchmark [--json FILE] [--rounds N]
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "stages/cpu/cpu_backend.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/token_source.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice::benchmarks {
namespace {

struct Result {
  double step = 0, replay = 0;  // seconds, medians
  std::int64_t tokens = 0;
  double flops = 0;
};

Result measure(Communicator& comm, DType precision, bool widen, int rounds) {
  TransformerConfig model;
  model.precision = precision;
  const RandomTokens source(model.context, model.vocabulary);
  PipelineOptions options;
  options.shape.micro_batch_size = 4;
  options.training.learning_rate = {.peak = 1e-4};
  const std::vector<double> costs = layer_costs(model);
  const StageFactory factory = [&](int stage, int stages) {
    return make_transformer_stage(model, partition_by_cost(costs, stages), stage);
  };
  Pipeline pipeline(comm, options, factory, source);
  MatMulCache& products = matmuls_of(pipeline.compute());
  products.widen_bf16(widen);
  for (int i = 0; i < 3; ++i) pipeline.train_step();
  products.record(true);
  pipeline.train_step();
  const std::vector<MatMulCall> calls(products.recorded().begin(), products.recorded().end());
  products.record(false);

  std::vector<double> steps, replays;
  for (int i = 0; i < rounds; ++i) {
    steps.push_back(pipeline.train_step().seconds);
    const auto start = std::chrono::steady_clock::now();
    products.replay(calls);
    replays.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  Result result{.step = median(steps),
                .replay = median(replays),
                .tokens = options.shape.micro_batch_size * model.context,
                .flops = 0};
  for (const MatMulCall& call : calls) result.flops += call.spec.flops();
  return result;
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) try {
  using namespace sluice;
  using namespace sluice::benchmarks;
  const int rounds = std::atoi(argument(argc, argv, "--rounds", "41").c_str());
  Report report("One rank: training step against a replay of its matrix products",
                {"precision", "tokens/s", "replay tokens/s", "step/replay", "products GFLOP/s",
                 "vs own fp32"});
  run_loopback(1, [&](Communicator& comm) {
    double fp32 = 0;
    struct Case {
      const char* name;
      DType precision;
      bool widen;
    };
    for (const Case& each : {Case{"f32", DType::kF32, false}, Case{"bf16", DType::kBf16, false},
                             Case{"bf16, widened", DType::kBf16, true}}) {
      const Result result = measure(comm, each.precision, each.widen, rounds);
      const double speed = static_cast<double>(result.tokens) / result.step;
      if (each.precision == DType::kF32) fp32 = speed;
      report.row({each.name, speed, static_cast<double>(result.tokens) / result.replay,
                  result.replay / result.step, result.flops / result.replay * 1e-9, speed / fp32});
    }
  });
  report.print();
  report.save(argument(argc, argv, "--json", ""));
} catch (const sluice::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return sluice::exit_code(error.code());
}
