// Kernels that do little but move memory: bytes per second, each in turns with a device copy. Bytes
// are those that the operator has to read and to write, each once; a copy's count both ways.
#include <algorithm>

#include "stages/operators.hpp"
#include "tests/benchmarks/gpu_rows.hpp"

namespace sluice::benchmarks {

namespace {

class Kernels {
 public:
  explicit Kernels(const GpuOptions& options)
      : options_(options),
        ctx_(kBenchmarkGpu, 1),
        copy_bytes_(std::clamp<std::size_t>(bytes_of_stream(options), kMegabyte, 512 * kMegabyte)),
        copied_(ctx_.device(), copy_bytes_),
        copy_(ctx_.device(), copy_bytes_),
        sum_(ctx_.device(), sizeof(double)),
        report_(gpu_report("GPU: memory-bound kernels against a device copy",
                           {"kernel", "GB", "GB/s", "copy GB/s", "ratio"})) {
    fill_zero_async(copied_.data(), copy_bytes_, ctx_.stream());
  }

  void measure() {
    const std::int64_t rows = options_.rows(), w = options_.model.width;
    normalisation(rows, w);
    elements(rows, w);
    loss();
    update();
    report_.print();
    report_.save(options_.json);
  }

 private:
  static constexpr std::size_t kMegabyte = std::size_t{1} << 20;

  // Four times the residual stream, so that at a model's size no cache holds it.
  static std::size_t bytes_of_stream(const GpuOptions& options) {
    return static_cast<std::size_t>(options.rows() * options.model.width) * 4 * 4;
  }

  void row(const std::string& name, double bytes, const std::function<void()>& body) {
    const std::vector<double> seconds = in_turns(
        ctx_, options_,
        {{name, body},
         {"copy", [&] { copy_async(copy_.data(), copied_.data(), copy_bytes_, ctx_.stream()); }}});
    const double ours = bytes / seconds[0] * 1e-9;
    const double copy = 2.0 * static_cast<double>(copy_bytes_) / seconds[1] * 1e-9;
    report_.row({name, bytes * 1e-9, ours, copy, ours / copy});
  }

  // `per_element`: bytes moved per element of `operand`.
  static double bytes(const Tensor& operand, double per_element) {
    return static_cast<double>(operand.elements()) * per_element;
  }

  void normalisation(std::int64_t rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const Tensor stream = memory.make(DType::kF32, {rows, w});
    const Tensor gradient = memory.make(DType::kF32, {rows, w});
    const Tensor narrow = memory.make(DType::kBf16, {rows, w});
    const Tensor delta = memory.make(DType::kBf16, {rows, w});
    const Tensor gamma = memory.make(DType::kF32, {w}), beta = memory.make(DType::kF32, {w});
    const Tensor dgamma = memory.make(DType::kF32, {w}), dbeta = memory.make(DType::kF32, {w});
    const Tensor stats = memory.make(DType::kF32, {rows, 2});
    row("layer norm forward", bytes(stream, 4 + 2),
        [&] { layer_norm_forward(ctx_, stream, {}, gamma, beta, 1e-5F, narrow, stats); });
    row("layer norm forward, residual added", bytes(stream, 8 + 2 + 2),
        [&] { layer_norm_forward(ctx_, stream, delta, gamma, beta, 1e-5F, narrow, stats); });
    row("layer norm input gradient", bytes(stream, 2 + 4 + 8),
        [&] { layer_norm_backward_input(ctx_, narrow, stream, gamma, stats, gradient); });
    row("layer norm weight gradient", bytes(stream, 2 + 4),
        [&] { layer_norm_backward_weight(ctx_, narrow, stream, stats, dgamma, dbeta); });
    row("add", bytes(stream, 2 + 8), [&] { add(ctx_, delta, gradient); });
  }

  void elements(std::int64_t rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const Tensor raised = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor gradient = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor out = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor wide = memory.make(DType::kF32, {rows, 4 * w});
    row("gelu forward", bytes(raised, 2 + 2), [&] { gelu_forward(ctx_, raised, out); });
    row("gelu backward", bytes(raised, 2 + 2 + 2),
        [&] { gelu_backward(ctx_, raised, gradient, out); });
    row("convert f32 to bf16", bytes(wide, 4 + 2), [&] { convert(ctx_, wide, out); });
  }

  void loss() {
    RandomOperands memory(ctx_.device());
    const std::int64_t rows = std::min<std::int64_t>(options_.rows(), 8192);
    const std::int64_t vocabulary = options_.model.vocabulary;
    const Tensor logits = memory.make(DType::kBf16, {rows, vocabulary});
    const Tensor targets = memory.indices({rows}, options_.tokens);
    auto* sum = reinterpret_cast<double*>(sum_.data());
    // The gradient replaces the logits; later runs have that gradient's softmax to compute.
    row("cross-entropy, forward and gradient", bytes(logits, 2 + 2),
        [&] { softmax_cross_entropy(ctx_, logits, targets, 1e-3, true, sum); });
  }

  // Over all parameters of the model.
  void update() {
    RandomOperands memory(ctx_.device());
    std::vector<UpdateRun> runs;
    double elements = 0;
    for (const ParameterInfo& parameter : parameter_list(options_.model)) {
      const Shape flat = {parameter.shape.elements()};
      const auto vector = [&] { return memory.make(DType::kF32, flat).as<float>(); };
      float* second = vector();
      fill_zero_async(second, static_cast<std::size_t>(flat.elements()) * 4, ctx_.stream());
      runs.push_back({.value = vector(),
                      .grad = vector(),
                      .first = vector(),
                      .second = second,
                      .count = flat.elements(),
                      .decay = true});
      elements += static_cast<double>(flat.elements());
    }
    const AdamWStep step = {.learning_rate = 1e-5F, .weight_decay = 0.1F};
    row("adamw over all parameters", elements * (4 + 3 * 8), [&] { adamw(ctx_, step, runs); });
  }

  GpuOptions options_;
  ComputeContext ctx_;
  std::size_t copy_bytes_;
  Buffer copied_, copy_;
  HostBuffer sum_;
  Report report_;
};

}  // namespace

void kernels_row(const GpuOptions& options) { Kernels(options).measure(); }

}  // namespace sluice::benchmarks
