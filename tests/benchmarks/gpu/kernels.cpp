// Kernels that do little but move memory: bytes per second, each in turns with a device copy. Bytes
// are those that the operator has to read and to write, each once; a copy's count both ways. What a
// row or a column has one of (tokens, statistics, gamma, sums) is too little to be counted.
#include "stages/cuda_kernels/kernels.hpp"

#include <algorithm>
#include <set>
#include <span>

#include <sluice/operators.hpp>

#include "stages/compute/call_arguments.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/transformer/sizes.hpp"
#include "tests/benchmarks/gpu/rows.hpp"

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
    swiglu(rows);
    attention_sides(rows, w);
    biases(rows, w);
    embedding(w);
    losses(rows, w);
    update();
    publish(report_, options_);
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
    const Tensor copy = memory.make(DType::kBf16, {rows, w});
    const Tensor gamma = memory.make(DType::kF32, {w}), beta = memory.make(DType::kF32, {w});
    const Tensor dgamma = memory.make(DType::kF32, {w}), dbeta = memory.make(DType::kF32, {w});
    const Tensor stats = memory.make(DType::kF32, {rows, 2});
    row("layer norm forward", bytes(stream, 4 + 2),
        [&] { layer_norm_forward(ctx_, stream, gamma, beta, 1e-5F, narrow, stats); });
    row("layer norm backward, rounded copy", bytes(stream, 2 + 4 + 8 + 2), [&] {
      layer_norm_backward(ctx_, narrow, stream, gamma, stats,
                          {gradient, gradient, copy, dgamma, dbeta});
    });
    row("layer norm weight gradient", bytes(stream, 2 + 4), [&] {
      layer_norm_backward(ctx_, narrow, stream, gamma, stats, {.dgamma = dgamma, .dbeta = dbeta});
    });
    const Tensor scales = memory.make(DType::kF32, {rows, 1});
    row("rms norm forward", bytes(stream, 4 + 2),
        [&] { rms_norm_forward(ctx_, stream, gamma, 1e-5F, narrow, scales); });
    row("rms norm backward, rounded copy", bytes(stream, 2 + 4 + 8 + 2), [&] {
      rms_norm_backward(ctx_, narrow, stream, gamma, scales, {gradient, gradient, copy, dgamma});
    });
    row("rms norm weight gradient", bytes(stream, 2 + 4),
        [&] { rms_norm_backward(ctx_, narrow, stream, gamma, scales, {.dgamma = dgamma}); });
    row("layer norm forward, bf16 stream", bytes(stream, 2 + 2),
        [&] { layer_norm_forward(ctx_, copy, gamma, beta, 1e-5F, narrow, stats); });
    row("layer norm backward, bf16 stream", bytes(stream, 2 + 2 + 2 * 2), [&] {
      layer_norm_backward(ctx_, narrow, copy, gamma, stats, {delta, delta, {}, dgamma, dbeta});
    });
    row("add", bytes(stream, 2 + 8), [&] { add(ctx_, delta, gradient); });
  }

  void elements(std::int64_t rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const Tensor raised = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor gradient = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor out = memory.make(DType::kBf16, {rows, 4 * w});
    const Tensor wide = memory.make(DType::kF32, {rows, 4 * w});
    row("gelu forward", bytes(raised, 2 + 2),
        [&] { pointwise_forward(ctx_, Pointwise::kGeluTanh, raised, out); });
    row("gelu backward", bytes(raised, 2 + 2 + 2),
        [&] { pointwise_backward(ctx_, Pointwise::kGeluTanh, raised, gradient, out); });
    row("convert f32 to bf16", bytes(wide, 4 + 2), [&] { convert(ctx_, wide, out); });
  }

  // As wide as a Llama of the model's width has it.
  void swiglu(std::int64_t rows) {
    RandomOperands memory(ctx_.device());
    TransformerConfig llama = options_.model;
    llama.kind = TransformerKind::kLlama;
    const std::int64_t hidden = sizes_of(llama).mlp_width;
    const Tensor raised = memory.make(DType::kBf16, {rows, 2 * hidden});
    const Tensor change = memory.make(DType::kBf16, {rows, 2 * hidden});
    const Tensor narrow = memory.make(DType::kBf16, {rows, hidden});
    row("swiglu forward", bytes(raised, 2) + bytes(narrow, 2),
        [&] { swiglu_forward(ctx_, raised, narrow); });
    row("swiglu backward", bytes(raised, 2 + 2) + bytes(narrow, 2),
        [&] { swiglu_backward(ctx_, raised, narrow, change); });
  }

  // What lies before attention and behind it.
  void attention_sides(std::int64_t rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const TransformerConfig& model = options_.model;
    const AttentionShape shape = {.samples = options_.batch,
                                  .sequence = model.context,
                                  .heads = model.heads,
                                  .kv_heads = model.heads,
                                  .head_dim = model.width / model.heads};
    const Tensor packed = memory.make(DType::kBf16, {rows, shape.packed_width()});
    const Tensor delta = memory.make(DType::kBf16, {rows, w});
    const Tensor out = memory.make(DType::kBf16, {rows, w});
    const Tensor stream = memory.make(DType::kF32, {rows, w});
    const Dropout mask = {.probability = 0.1F, .key = {.seed = 1}};
    // Queries and keys, not values.
    row("rotary positions", bytes(delta, 2 * (2 + 2)),
        [&] { rotary(ctx_, shape, {model.rotary_base}, packed, /*backward=*/false); });
    row("dropout", bytes(delta, 2 + 2), [&] { dropout(ctx_, delta, mask, out); });
    row("dropout, added to the stream", bytes(delta, 2 + 4 + 4),
        [&] { dropout_residual(ctx_, delta, mask, stream, stream); });
    row("dropout, rounded", bytes(delta, 4 + 2), [&] { dropout(ctx_, stream, mask, out); });
  }

  // What linear_backward_weight() does for a bias, without its matmul.
  void biases(std::int64_t rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    for (const std::int64_t width : {w, 4 * w}) {
      const Tensor gradient = memory.make(DType::kBf16, {rows, width});
      const Tensor sums = memory.make(DType::kF32, {width});
      row(width == w ? "bias gradient, output" : "bias gradient, MLP up", bytes(gradient, 2),
          [&] { cuda::sum_columns(ctx_, gradient, sums); });
    }
  }

  // Of the table only the rows of tokens that occur are read or changed.
  void embedding(std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const TransformerConfig& model = options_.model;
    const Tensor tokens = memory.indices({options_.batch, model.context}, options_.tokens);
    const Tensor table = memory.make(DType::kF32, {model.vocabulary, w});
    const Tensor positions = memory.make(DType::kF32, {model.context, w});
    const Tensor stream = memory.make(DType::kF32, {options_.batch, model.context, w});
    const double of_table = static_cast<double>(different_values(tokens) * w);
    row("embedding forward", of_table * 4 + bytes(positions, 4) + bytes(stream, 4),
        [&] { embedding_forward(ctx_, tokens, table, positions, stream); });
    const double of_tokens = of_table * 8 + bytes(stream, 4);
    row("embedding weight gradient", of_tokens + bytes(positions, 8),
        [&] { embedding_backward_weight(ctx_, tokens, stream, table, positions); });
    row("embedding weight gradient, no positions", of_tokens,
        [&] { embedding_backward_weight(ctx_, tokens, stream, table, {}); });
    // Of a step's first micro-batch, which also writes the rows of tokens that do not occur.
    row("embedding weight gradient, overwriting",
        bytes(table, 4) + bytes(stream, 4) + bytes(positions, 4), [&] {
          embedding_backward_weight(ctx_, tokens, stream, table, positions, Write::kOverwrite);
        });
  }

  [[nodiscard]] std::int64_t different_values(const Tensor& indices) const {
    std::vector<std::int32_t> values(static_cast<std::size_t>(indices.elements()));
    copy_now(ctx_.device(), values.data(), indices.data, indices.spec.bytes());
    return static_cast<std::int64_t>(std::set<std::int32_t>(values.begin(), values.end()).size());
  }

  void losses(std::int64_t all_rows, std::int64_t w) {
    RandomOperands memory(ctx_.device());
    const std::int64_t rows = std::min<std::int64_t>(all_rows, 8192);
    const std::int64_t vocabulary = options_.model.vocabulary;
    const Tensor logits = memory.make(DType::kBf16, {rows, vocabulary});
    const Tensor targets = memory.indices({rows}, options_.tokens);
    const Tensor outputs = memory.make(DType::kF32, {all_rows, w});
    const Tensor wanted = memory.make(DType::kF32, {all_rows, w});
    auto* sum = reinterpret_cast<double*>(sum_.data());
    // The gradient replaces the logits; later runs have that gradient's softmax to compute.
    row("cross-entropy, forward and gradient", bytes(logits, 2 + 2),
        [&] { softmax_cross_entropy(ctx_, logits, targets, 1e-3, true, sum); });
    // The same; by this scale what replaces the outputs never leaves -0.5 to 0.5.
    row("squared error, forward and gradient", bytes(outputs, 4 + 4 + 4),
        [&] { mean_squared_error(ctx_, outputs, wanted, 0.25, true, sum); });
  }

  // Over all parameters of the model.
  void update() {
    RandomOperands memory(ctx_.device());
    std::vector<UpdateRun> runs;
    std::vector<std::span<const float>> gradients;
    double elements = 0;
    std::size_t sum_bytes = 0;
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
      gradients.emplace_back(runs.back().grad, static_cast<std::size_t>(flat.elements()));
      elements += static_cast<double>(flat.elements());
      sum_bytes += block_sum_bytes(flat.elements());
    }
    AdamWStep step = {.learning_rate = 1e-5F, .weight_decay = 0.1F};
    row("adamw over all parameters", elements * (4 + 3 * 8), [&] { adamw(ctx_, step, runs); });
    for (UpdateRun& run : runs) run.bf16_copy = memory.make(DType::kBf16, {run.count}).as<Bf16>();
    row("the same, with a bf16 copy", elements * (4 + 3 * 8 + 2), [&] { adamw(ctx_, step, runs); });
    for (UpdateRun& run : runs) {
      run.first = memory.make(DType::kBf16, {run.count}).data;
      fill_zero_async(run.second, static_cast<std::size_t>(run.count) * 2, ctx_.stream());
    }
    step.moments = DType::kBf16;
    row("the same, with bf16 moments", elements * (4 + 8 + 2 * 4 + 2),
        [&] { adamw(ctx_, step, runs); });
    const HostBuffer sums(ctx_.device(), sum_bytes);
    auto* to = reinterpret_cast<double*>(sums.data());
    row("sums of squares of all gradients", elements * 4,
        [&] { sums_of_squares(ctx_, gradients, to); });
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
