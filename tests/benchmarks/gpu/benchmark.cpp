// GPU rows of the page of measurements, one at a time: tokens per second of GPT-2, matmuls against
// cuBLASLt called bare, memory-bound kernels against a device copy, what the host takes, and what
// chunks cost. Needs a GPU (the tests' emulation of one proves the program, not a speed).
//
//   gpu_benchmark training|dropout|stream|moments|logits|attention|chunks|graphs|idle|issue|
//                 products|biases|waiting|kernels
//                 [--model 124m|1.5b]
//                 [--layers N] [--heads N] [--width N] [--context N] [--vocabulary N]
//                 [--stream-precision fp32|bf16] [--moment-precision fp32|bf16]
//                 [--logit-chunks N]
//                 [--batch SAMPLES] [--micro-batch SAMPLES] [--rounds TURNS] [--steps STEPS OF A
//                 TURN]
//                 [--turn-seconds S] [--json FILE]
#include <array>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include <sluice/error.hpp>

#include "tests/benchmarks/gpu/rows.hpp"

namespace sluice::benchmarks {
namespace {

struct Row {
  std::string_view name;
  void (*run)(const GpuOptions&);
};

constexpr std::array kRows = {
    Row{"training", training_row}, Row{"dropout", dropout_row},  Row{"stream", stream_row},
    Row{"moments", moments_row},   Row{"logits", logits_row},    Row{"attention", attention_row},
    Row{"chunks", chunks_row},     Row{"graphs", graphs_row},    Row{"idle", idle_row},
    Row{"issue", issue_row},       Row{"products", matmuls_row}, Row{"biases", biases_row},
    Row{"waiting", waiting_row},   Row{"kernels", kernels_row}};

void run(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Row& row : kRows) {
    if (row.name != name) continue;
    GpuOptions options = parse_gpu_options(argc, argv);
    open_device(kBenchmarkGpu);
    options.sampler = std::make_shared<GpuSampler>(properties_of(kBenchmarkGpu).identity);
    return row.run(options);
  }
  std::string names;
  for (const Row& row : kRows) names += fmt::format("{}{}", names.empty() ? "" : ", ", row.name);
  throw Error(ErrorCode::kUsage, fmt::format("the first argument is '{}'; legal: {}", name, names));
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) {
  try {
    sluice::benchmarks::run(argc, argv);
  } catch (const sluice::Error& error) {
    std::fprintf(stderr, "gpu_benchmark: %s\n", error.what());
    return sluice::exit_code(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_benchmark: %s\n", error.what());
    return 1;
  }
}
