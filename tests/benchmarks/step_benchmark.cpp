// One rank's training step against its own matmuls: the step is recorded, then its matmuls are
// replayed on the same operands, in turn with whole steps. Matmuls of bf16 run both ways: by the
// library's own, and widened to f32; the line on the machine tells which of them the program takes.
// Then Transformer against Sequentials of a GPT.
//   step_benchmark [--json FILE] [--rounds N]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
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
  const StageFactory factory = Transformer(model);
  Pipeline pipeline(comm, factory, source, options);
  MatmulCache& matmuls = matmuls_of(pipeline.compute());
  matmuls.widen_bf16(widen);
  for (int i = 0; i < 3; ++i) pipeline.train_step();
  matmuls.record(true);
  pipeline.train_step();
  const std::vector<MatmulCall> calls(matmuls.recorded().begin(), matmuls.recorded().end());
  matmuls.record(false);

  std::vector<double> steps, replays;
  for (int i = 0; i < rounds; ++i) {
    steps.push_back(pipeline.train_step().seconds);
    const auto start = std::chrono::steady_clock::now();
    matmuls.replay(calls);
    replays.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  Result result{.step = median(steps),
                .replay = median(replays),
                .tokens = options.shape.micro_batch_size * model.context,
                .flops = 0};
  for (const MatmulCall& call : calls) result.flops += call.spec.flops();
  return result;
}

// The default model of general layers.
Sequential general_layers(const TransformerConfig& config) {
  const std::int64_t width = config.width;
  std::vector<nn::LayerSpec> layers = {nn::embedding(config.vocabulary, width, config.context)};
  for (int block = 0; block < config.layers; ++block) {
    layers.push_back(nn::residual({nn::layer_norm(width), nn::attention(width, config.heads)}));
    layers.push_back(nn::residual({nn::layer_norm(width), nn::linear(width, 4 * width),
                                   nn::gelu_tanh(), nn::linear(4 * width, width)}));
  }
  layers.push_back(nn::layer_norm(width));
  layers.push_back(nn::linear(width, config.vocabulary, /*bias=*/false));
  return Sequential(std::move(layers), nn::cross_entropy_loss());
}

// Steps of each model in turns; seconds, medians.
std::vector<double> in_turns(Communicator& comm, const std::vector<Sequential>& models,
                             int rounds) {
  const TransformerConfig config;
  const RandomTokens source(config.context, config.vocabulary);
  PipelineOptions options;
  options.shape.micro_batch_size = 4;
  std::vector<std::unique_ptr<Pipeline>> pipelines;
  for (const Sequential& model : models) {
    pipelines.push_back(std::make_unique<Pipeline>(comm, model, source, options));
  }
  std::vector<std::vector<double>> seconds(models.size());
  for (int i = -3; i < rounds; ++i) {
    for (std::size_t m = 0; m < models.size(); ++m) {
      const double step = pipelines[m]->train_step().seconds;
      if (i >= 0) seconds[m].push_back(step);
    }
  }
  std::vector<double> medians;
  for (const std::vector<double>& each : seconds) medians.push_back(median(each));
  return medians;
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) try {
  using namespace sluice;
  using namespace sluice::benchmarks;
  const int rounds = std::atoi(argument(argc, argv, "--rounds", "41").c_str());
  Report report("One rank: training step against a replay of its matmuls",
                {"precision", "tokens/s", "replay tokens/s", "step/replay", "matmuls GFLOP/s",
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
  Report alike("One rank, fp32: Transformer, and a Sequential of a GPT",
               {"model", "tokens/s", "ratio"});
  run_loopback(1, [&](Communicator& comm) {
    const TransformerConfig config;
    const std::vector<double> seconds =
        in_turns(comm,
                 {Transformer(config),
                  Sequential(nn::transformer_layers(config), nn::transformer_loss(config)),
                  general_layers(config)},
                 rounds);
    const char* const names[] = {"Transformer", "Sequential(transformer_layers())",
                                 "Sequential of general layers"};
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      alike.row({names[i], 4 * config.context / seconds[i], seconds[0] / seconds[i]});
    }
  });
  alike.print();
} catch (const sluice::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return sluice::exit_code(error.code());
}
