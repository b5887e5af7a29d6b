// What the rows of gpu_benchmark share: sizes, timing on the compute stream, random operands.
//
// Things are compared in turns within one run, and a figure is the median of the turns' figures.
// Time is the device's own, between two timed events on the stream, but for whole training steps
// and for what the host takes, which are the host's wall clock with the stream drained at both
// ends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/communicator.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/gpu/sampler.hpp"

namespace sluice::benchmarks {

struct GpuOptions {
  std::string model_name = "124m";
  // 124M: tokens are below `tokens`; the table has more rows, so that its matmuls are not slowed.
  TransformerConfig model = {};
  DType moments = DType::kF32;  // of AdamW
  int tokens = 50257;
  std::int64_t batch = 64;                   // samples per step
  std::int64_t micro_batch = 0;              // samples; 0: the most that divides the batch and fits
  int rounds = 5;                            // turns
  int steps = 4;                             // training steps of one turn
  double turn_seconds = 0.02;                // at least, of a kernel's turn
  std::string json;                          // appended to, if any
  std::shared_ptr<GpuSampler> sampler = {};  // of kBenchmarkGpu; main() makes it

  [[nodiscard]] std::int64_t rows() const { return batch * model.context; }
};

// Throws Error(kUsage) naming the option. `argv[1]` is the row.
[[nodiscard]] GpuOptions parse_gpu_options(int argc, char** argv);

// The rows; each prints its table and appends its JSON line.
void training_row(const GpuOptions& options);  // tokens per second of whole steps
void chunks_row(const GpuOptions& options);    // four chunks on one rank against one
void graphs_row(const GpuOptions& options);    // actions replayed as CUDA graphs against calls
void idle_row(const GpuOptions& options);  // the GPU waiting for the host, and idle between kernels
void issue_row(const GpuOptions& options);      // the host's time per action
void matmuls_row(const GpuOptions& options);    // against cuBLASLt called bare
void biases_row(const GpuOptions& options);     // their gradients apart and in epilogues
void waiting_row(const GpuOptions& options);    // matmuls beside kernels that wait
void attention_row(const GpuOptions& options);  // alone, by cuDNN and by own kernels
void dropout_row(const GpuOptions& options);    // training with dropout 0.1 against without
void stream_row(const GpuOptions& options);     // training with a bf16 stream against fp32
void moments_row(const GpuOptions& options);    // training with bf16 moments against fp32
void logits_row(const GpuOptions& options);     // training with logits in chunks against whole
void kernels_row(const GpuOptions& options);    // bytes per second against a device copy

inline constexpr Device kBenchmarkGpu = {DeviceKind::kCuda, 0};

// A report that also says which GPU and libraries it was measured on.
[[nodiscard]] Report gpu_report(const std::string& title, std::vector<std::string> columns);
// Prints it and appends its JSON line, with the power and clocks of what was measured so far.
void publish(Report& report, const GpuOptions& options);

// Device memory of random values between -0.5 and 0.5 that are no denormals, in bf16 and f32 alike:
// random bits, because a matmul of zeros runs faster than one of numbers.
class RandomOperands {
 public:
  explicit RandomOperands(Device device);
  [[nodiscard]] Tensor make(DType dtype, const Shape& shape);
  // i32 values in [0, below).
  [[nodiscard]] Tensor indices(const Shape& shape, int below);

 private:
  Device device_;
  std::vector<std::uint16_t> pattern_;
  std::vector<Buffer> buffers_;
};

struct Contender {
  std::string name;
  std::function<void()> run;  // puts work on the context's stream
};
// Median device seconds of one run of each, in turns: every turn repeats each contender for at
// least options.turn_seconds.
[[nodiscard]] std::vector<double> in_turns(ComputeContext& ctx, const GpuOptions& options,
                                           const std::vector<Contender>& contenders);

}  // namespace sluice::benchmarks
