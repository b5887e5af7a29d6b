// Operators at the sizes of a model: GFLOP/s of its matmuls against the library called bare on the
// same operands, nanoseconds per element and GB/s of everything else, and what checking operands
// costs (check_costs.hpp). Prints three tables; `--json FILE` also appends them. Times are of the
// calling thread's processor time, in the first two the fastest of several rounds; ours and bare
// take turns.
//
//   operator_benchmark [--json FILE] [--rounds N] [--width W] [--sequence S] [--samples B]
//                      [--heads H]
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dnnl.hpp>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/device.hpp>
#include <sluice/operators.hpp>

#include "stages/compute/call_arguments.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/cpu_report.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/check_costs.hpp"

namespace sluice {
namespace {

using benchmarks::Report;

struct Options {
  std::string json;
  int rounds = 7;
  std::int64_t width = 256, sequence = 256, samples = 4, heads = 4;
};

double thread_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_of(const std::function<void()>& body, int times) {
  const double start = thread_seconds();
  for (int i = 0; i < times; ++i) body();
  return (thread_seconds() - start) / times;
}

Buffer filled(std::size_t bytes) {
  Buffer buffer(Device{}, bytes);
  auto* words = reinterpret_cast<std::uint16_t*>(buffer.data());
  for (std::size_t i = 0; i < bytes / 2; ++i) {  // numbers between 0.03 and 0.25 in both types
    words[i] = static_cast<std::uint16_t>(0x3D00 + i * 7919 % 0x180);
  }
  return buffer;
}

// The same matmul straight from the library.
class BareMatmul {
 public:
  BareMatmul(const MatmulSpec& spec, void* a, void* b, void* bias, void* c) {
    const auto type = [](DType dtype) {
      return dtype == DType::kBf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    };
    const auto describe = [&](std::int64_t rows, std::int64_t columns, const MatmulLayout& layout,
                              DType dtype) {
      return spec.batches == 1
                 ? dnnl::memory::desc({rows, columns}, type(dtype), {layout.row, layout.column})
                 : dnnl::memory::desc({spec.batches, rows, columns}, type(dtype),
                                      {layout.batch, layout.row, layout.column});
    };
    const auto a_desc = describe(spec.m, spec.k, spec.a, spec.operands);
    const auto b_desc = describe(spec.k, spec.n, spec.b, spec.operands);
    const auto c_desc = describe(spec.m, spec.n, spec.c, spec.result);
    const auto bias_desc =
        spec.bias ? describe(1, spec.n, {spec.n, 1, 0}, DType::kF32) : dnnl::memory::desc();
    dnnl::primitive_attr attributes;
    if (spec.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc descriptor(engine_, a_desc, b_desc, bias_desc, c_desc,
                                                  attributes);
#else
    const dnnl::matmul::primitive_desc descriptor({a_desc, b_desc, bias_desc, c_desc}, attributes,
                                                  engine_);
#endif
    primitive_ = dnnl::matmul(descriptor);
    arguments_ = {{DNNL_ARG_SRC, {a_desc, engine_, a}},
                  {DNNL_ARG_WEIGHTS, {b_desc, engine_, b}},
                  {DNNL_ARG_DST, {c_desc, engine_, c}}};
    if (spec.bias) arguments_.insert({DNNL_ARG_BIAS, {bias_desc, engine_, bias}});
  }
  void run() { primitive_.execute(stream_, arguments_); }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul primitive_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

struct NamedMatmul {
  std::string name;
  MatmulSpec spec;
};

// Tensors of the values of filled(), which live as long as this does.
class Tensors {
 public:
  Tensor make(DType dtype, const Shape& shape) {
    const TensorSpec spec = {dtype, shape};
    buffers_.push_back(filled(spec.bytes()));
    return {buffers_.back().data(), spec};
  }

 private:
  std::vector<Buffer> buffers_;
};

std::vector<MatmulSpec> specs_of(ComputeContext& ctx, const std::function<void()>& body) {
  matmuls_of(ctx).record(true);
  body();
  matmuls_of(ctx).record(false);
  std::vector<MatmulSpec> specs;
  for (const MatmulCall& call : matmuls_of(ctx).recorded()) specs.push_back(call.spec);
  return specs;
}

// What the operators run (their first block of rows) for every linear layer of a GPT-2 block.
std::vector<NamedMatmul> linear_matmuls(const Options& options, ComputeContext& ctx, DType dtype) {
  struct Layer {
    const char* name;
    std::int64_t in, out;
  };
  const std::int64_t rows = options.samples * options.sequence, w = options.width;
  std::vector<NamedMatmul> matmuls;
  for (const Layer& layer :
       {Layer{"qkv", w, 3 * w}, {"output", w, w}, {"up", w, 4 * w}, {"down", 4 * w, w}}) {
    Tensors tensors;
    const Tensor x = tensors.make(dtype, {rows, layer.in}),
                 y = tensors.make(dtype, {rows, layer.out});
    const Tensor weight = tensors.make(dtype, {layer.out, layer.in});
    const Tensor bias = tensors.make(DType::kF32, {layer.out});
    const Tensor dweight = tensors.make(DType::kF32, {layer.out, layer.in});
    const auto add = [&](const char* what, const std::function<void()>& body) {
      matmuls.push_back({std::string(layer.name) + what, specs_of(ctx, body).front()});
    };
    add(" forward", [&] { linear_forward(ctx, x, weight, bias, y); });
    add(" input gradient", [&] { linear_backward_input(ctx, y, weight, x); });
    add(" weight gradient", [&] { linear_backward_weight(ctx, x, y, dweight, bias); });
  }
  return matmuls;
}

// Of the last block of query rows, and of the first block of keys.
std::vector<NamedMatmul> attention_matmuls(const Options& options, ComputeContext& ctx,
                                           DType dtype) {
  Tensors tensors;
  const auto heads = static_cast<int>(options.heads);
  const AttentionShape shape = {1, options.sequence, heads, heads,
                                static_cast<int>(options.width) / heads};
  const Tensor qkv = tensors.make(dtype, {shape.rows(), shape.packed_width()});
  const Tensor out = tensors.make(dtype, {shape.rows(), options.width});
  const Tensor state = tensors.make(
      DType::kU8,
      {static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, shape, dtype))});
  auto* kept = state.as<std::byte>();
  const std::vector<MatmulSpec> forward =
      specs_of(ctx, [&] { attention_forward(ctx, shape, qkv, {}, out, kept); });
  const std::vector<MatmulSpec> backward =
      specs_of(ctx, [&] { attention_backward(ctx, shape, qkv, out, out, {}, kept, qkv); });
  const std::size_t last = forward.size() - 2;
  return {{"attention scores", forward[last]},
          {"attention mix", forward[last + 1]},
          {"attention score gradient", backward[last]},
          {"attention query gradient", backward[last + 1]},
          {"attention key gradient", backward[last + 2]},
          {"attention value gradient", backward[last + 3]}};
}

void measure(const Options& options, ComputeContext& ctx, const NamedMatmul& matmul,
             Report& report) {
  const std::size_t rows = static_cast<std::size_t>(options.samples * options.sequence);
  const std::size_t bytes =
      std::max(rows, static_cast<std::size_t>(options.sequence * options.heads)) *
      static_cast<std::size_t>(4 * options.width + options.sequence) * 4;
  const Buffer a = filled(bytes), b = filled(bytes), c = filled(bytes),
               bias = filled(static_cast<std::size_t>(4 * options.width) * 4);
  const MatmulSpec& spec = matmul.spec;
  BareMatmul bare(spec, a.data(), b.data(), bias.data(), c.data());
  const int times = std::max(1, static_cast<int>(1e9 / spec.flops()));
  double own = 1e30, other = 1e30;
  for (int round = 0; round <= options.rounds; ++round) {
    const double ours = seconds_of(
        [&] { matmuls_of(ctx).run(spec, a.data(), b.data(), bias.data(), c.data()); }, times);
    const double theirs = seconds_of([&] { bare.run(); }, times);
    if (round == 0) continue;  // warm-up
    own = std::min(own, ours);
    other = std::min(other, theirs);
  }
  report.row({matmul.name, name_of(spec.operands), spec.flops() * 1e-9 / own,
              spec.flops() * 1e-9 / other, other / own});
}

// The input gradient of an MLP's second matmul, with its activation, over all rows; against its
// matmuls alone.
void measure_with_activation(const Options& options, ComputeContext& ctx, DType dtype,
                             Report& report) {
  const std::int64_t rows = options.samples * options.sequence, w = options.width;
  Tensors tensors;
  const Tensor dy = tensors.make(dtype, {rows, w}), weight = tensors.make(dtype, {w, 4 * w});
  const Tensor raised = tensors.make(dtype, {rows, 4 * w}), dx = tensors.make(dtype, {rows, 4 * w});
  const auto body = [&] {
    linear_activation_backward_input(ctx, Activation::kGelu, dy, weight, raised, dx);
  };
  body();
  matmuls_of(ctx).record(true);
  body();
  matmuls_of(ctx).record(false);
  const std::vector<MatmulCall> calls(matmuls_of(ctx).recorded().begin(),
                                      matmuls_of(ctx).recorded().end());
  double own = 1e30, bare = 1e30;
  for (int round = 0; round < options.rounds; ++round) {
    own = std::min(own, seconds_of(body, 3));
    bare = std::min(bare, seconds_of([&] { matmuls_of(ctx).replay(calls); }, 3));
  }
  const double flops = 8.0 * static_cast<double>(rows * w * w);
  report.row({"down input gradient, with GELU", name_of(dtype), flops * 1e-9 / own,
              flops * 1e-9 / bare, bare / own});
}

// The element-wise operators, with operands of one micro-batch.
class Elements {
 public:
  Elements(const Options& options, ComputeContext& ctx, DType dtype, Report& report)
      : options_(options),
        ctx_(ctx),
        dtype_(dtype),
        rows_(options.samples * options.sequence),
        report_(report) {}

  void measure() {
    const std::int64_t w = options_.width;
    const Tensor narrow = tensor(dtype_, {rows_, w}), other = tensor(dtype_, {rows_, w});
    const Tensor wide = tensor(dtype_, {rows_, 4 * w}), wide_other = tensor(dtype_, {rows_, 4 * w});
    const Tensor half = tensor(dtype_, {rows_, 2 * w});
    const Tensor stream = tensor(DType::kF32, {rows_, w}),
                 gradient = tensor(DType::kF32, {rows_, w});
    const Tensor gamma = tensor(DType::kF32, {w}), beta = tensor(DType::kF32, {w});
    const Tensor dgamma = tensor(DType::kF32, {w}), dbeta = tensor(DType::kF32, {w});
    const Tensor stats = tensor(DType::kF32, {rows_, 2}), scales = tensor(DType::kF32, {rows_, 1});
    const double t = static_cast<double>(size_of(dtype_));
    row("gelu forward", wide.elements(), 2 * t,
        [&] { pointwise_forward(ctx_, Pointwise::kGeluTanh, wide, wide_other); });
    row("gelu backward", wide.elements(), 3 * t,
        [&] { pointwise_backward(ctx_, Pointwise::kGeluTanh, wide, wide_other, wide_other); });
    row("swiglu forward", half.elements(), 3 * t, [&] { swiglu_forward(ctx_, wide, half); });
    row("swiglu backward", half.elements(), 5 * t,
        [&] { swiglu_backward(ctx_, wide, half, wide_other); });
    row("dropout 0.1", narrow.elements(), 2 * t, [&] {
      dropout(ctx_, narrow, {0.1F, {1, 2, 3}, 0}, other);
    });
    row("layer norm forward", narrow.elements(), 4 + t,
        [&] { layer_norm_forward(ctx_, stream, gamma, beta, 1e-5F, narrow, stats); });
    row("layer norm input gradient", narrow.elements(), 12 + t, [&] {
      layer_norm_backward(ctx_, narrow, stream, gamma, stats, {gradient, gradient});
    });
    row("layer norm weight gradient", narrow.elements(), 4 + t, [&] {
      layer_norm_backward(ctx_, narrow, stream, gamma, stats, {.dgamma = dgamma, .dbeta = dbeta});
    });
    row("rms norm forward", narrow.elements(), 4 + t,
        [&] { rms_norm_forward(ctx_, stream, gamma, 1e-5F, narrow, scales); });
    row("rms norm input gradient", narrow.elements(), 12 + t, [&] {
      rms_norm_backward(ctx_, narrow, stream, gamma, scales, {gradient, gradient});
    });
    row("rms norm weight gradient", narrow.elements(), 4 + t,
        [&] { rms_norm_backward(ctx_, narrow, stream, gamma, scales, {.dgamma = dgamma}); });
    row("dropout 0.1, added to the stream", narrow.elements(), 8 + t, [&] {
      dropout_residual(ctx_, narrow, {0.1F, {1, 2, 3}, 0}, stream, stream);
    });
    row("residual add", narrow.elements(), 8 + t, [&] { add(ctx_, narrow, stream); });
    attention();
    if (dtype_ == DType::kF32) float_only();
  }

 private:
  // Without its matmuls: they are replayed and taken off; the median of the rounds' differences.
  void attention() {
    const AttentionShape shape = {
        options_.samples, options_.sequence, static_cast<int>(options_.heads),
        static_cast<int>(options_.heads), static_cast<int>(options_.width / options_.heads)};
    const Tensor qkv = tensor(dtype_, {rows_, shape.packed_width()}),
                 dqkv = tensor(dtype_, {rows_, shape.packed_width()});
    const Tensor out = tensor(dtype_, {rows_, options_.width}),
                 dout = tensor(dtype_, {rows_, options_.width});
    const Tensor state =
        tensor(DType::kU8,
               {static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, shape, dtype_))});
    const double scores =
        0.5 * static_cast<double>(shape.rows() * shape.heads * (shape.sequence + 1));
    const auto run = [&](const char* name, double bytes, const std::function<void()>& body) {
      body();
      matmuls_of(ctx_).record(true);
      body();
      matmuls_of(ctx_).record(false);
      const std::vector<MatmulCall> calls(matmuls_of(ctx_).recorded().begin(),
                                          matmuls_of(ctx_).recorded().end());
      std::vector<double> rest;
      for (int round = 0; round < options_.rounds; ++round) {
        const double whole = seconds_of(body, 3);
        rest.push_back(whole - seconds_of([&] { matmuls_of(ctx_).replay(calls); }, 3));
      }
      const auto middle = rest.begin() + static_cast<std::ptrdiff_t>(rest.size() / 2);
      std::nth_element(rest.begin(), middle, rest.end());
      add_row(name, scores, bytes, *middle);
    };
    const double t = static_cast<double>(size_of(dtype_));
    run("attention forward, not matmuls", 4 + t,
        [&] { attention_forward(ctx_, shape, qkv, {}, out, state.as<std::byte>()); });
    run("attention backward, not matmuls", 4 + 2 * t,
        [&] { attention_backward(ctx_, shape, qkv, out, dout, {}, state.as<std::byte>(), dqkv); });
    row("rotary", 2 * rows_ * options_.width, 2 * t,
        [&] { rotary(ctx_, shape, {10000}, qkv, false); });
  }

  void float_only() {
    const std::int64_t vocabulary = 256, parameters = 12 * 4 * options_.width * options_.width;
    double sum = 0;
    const Tensor logits = tensor(DType::kF32, {rows_, vocabulary}),
                 targets = tensor(DType::kI32, {rows_});
    for (std::int64_t i = 0; i < rows_; ++i)
      targets.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % vocabulary);
    row("cross-entropy", logits.elements(), 8,
        [&] { softmax_cross_entropy(ctx_, logits, targets, 1, true, &sum); });
    const Tensor value = tensor(DType::kF32, {parameters}),
                 grad = tensor(DType::kF32, {parameters});
    const Tensor first = tensor(DType::kF32, {parameters}),
                 second = tensor(DType::kF32, {parameters});
    const AdamWStep step = {
        .learning_rate = 1e-4F, .weight_decay = 0.1F, .correction1 = 0.1F, .correction2 = 0.05F};
    const UpdateRun run = {.value = value.as<float>(),
                           .grad = grad.as<float>(),
                           .first = first.as<float>(),
                           .second = second.as<float>(),
                           .count = parameters};
    const std::span<const float> vector = grad.floats();
    row("adamw", parameters, 28, [&] { adamw(ctx_, step, {&run, 1}); });
    std::vector<double> sums(static_cast<std::size_t>(sum_blocks(parameters)));
    row("sum of squares", parameters, 4, [&] { sums_of_squares(ctx_, {&vector, 1}, sums.data()); });
    const Tensor narrow = tensor(DType::kBf16, {parameters});
    row("convert f32 to bf16", parameters, 6, [&] { convert(ctx_, value, narrow); });
  }

  Tensor tensor(DType dtype, const Shape& shape) { return tensors_.make(dtype, shape); }
  void row(const char* name, std::int64_t elements, double bytes,
           const std::function<void()>& body) {
    const int times = std::max(1, static_cast<int>(4e6 / static_cast<double>(elements)));
    double best = 1e30;
    for (int round = 0; round <= options_.rounds; ++round) {
      const double seconds = seconds_of(body, times);
      if (round > 0) best = std::min(best, seconds);
    }
    add_row(name, static_cast<double>(elements), bytes, best);
  }
  void add_row(const char* name, double elements, double bytes, double seconds) {
    report_.row(
        {name, name_of(dtype_), seconds * 1e9 / elements, bytes * elements * 1e-9 / seconds});
  }

  const Options& options_;
  ComputeContext& ctx_;
  DType dtype_;
  std::int64_t rows_;
  Report& report_;
  Tensors tensors_;
};

Report report_of(const Options& options, const std::string& title,
                 const std::vector<std::string>& columns) {
  Report report(title, columns);
  report.fact("threads", 1);
  report.fact("samples", options.samples);
  report.fact("sequence", options.sequence);
  report.fact("width", options.width);
  report.fact("heads", options.heads);
  return report;
}

std::int64_t parse_number(std::string_view option, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > 65536) {
    throw std::invalid_argument(std::string(option) + " is '" + std::string(text) +
                                "'; legal: 1 to 65536");
  }
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(std::string(name) + " needs a value");
    if (name == "--json") {
      options.json = argv[i + 1];
      continue;
    }
    const std::int64_t value = parse_number(name, argv[i + 1]);
    if (name == "--rounds") {
      options.rounds = static_cast<int>(value);
    } else if (name == "--width") {
      options.width = value;
    } else if (name == "--sequence") {
      options.sequence = value;
    } else if (name == "--samples") {
      options.samples = value;
    } else if (name == "--heads") {
      options.heads = value;
    } else {
      throw std::invalid_argument("unknown option " + std::string(name) +
                                  "; legal: --json --rounds --width --sequence --samples --heads");
    }
  }
  if (options.width % options.heads != 0)
    throw std::invalid_argument("--width is not a multiple of --heads");
  return options;
}

void run(const Options& options) {
  ComputeContext ctx(Device{}, 1);
  const ThreadTeam team(ctx);  // of bare matmuls too
  Report matmuls = report_of(options, "Matmuls against the library called bare",
                             {"matmul", "type", "GFLOP/s", "bare GFLOP/s", "ratio"});
  Report elements =
      report_of(options, "Operators without matmuls", {"operator", "type", "ns/element", "GB/s"});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    // Without instructions for bf16 the library has no matmul to compare with.
    const bool bare = dtype == DType::kF32 || native_bf16();
    for (const NamedMatmul& matmul : linear_matmuls(options, ctx, dtype))
      if (bare) measure(options, ctx, matmul, matmuls);
    measure_with_activation(options, ctx, dtype, matmuls);
    for (const NamedMatmul& matmul : attention_matmuls(options, ctx, dtype))
      if (bare) measure(options, ctx, matmul, matmuls);
    Elements(options, ctx, dtype, elements).measure();
  }
  matmuls.print();
  std::printf("\n");
  elements.print();
  std::printf("\n");
  const Report checks = benchmarks::check_costs(ctx, options.rounds);
  checks.print();
  matmuls.save(options.json);
  elements.save(options.json);
  checks.save(options.json);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  try {
    sluice::run(sluice::parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "operator_benchmark: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "operator_benchmark: %s\n", error.what());
    return 1;
  }
}
