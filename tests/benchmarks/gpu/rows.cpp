#include "tests/benchmarks/gpu/rows.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <random>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#include "stages/cuda_context/context.hpp"

namespace sluice::benchmarks {

namespace {

TransformerConfig gpt2(int layers, int heads, int width) {
  return {.layers = layers,
          .heads = heads,
          .width = width,
          .context = 1024,
          .vocabulary = 50304,  // 50257 rounded up to a multiple of 128
          .precision = DType::kBf16};
}

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::kUsage, text); }

DType parse_precision(std::string_view option, std::string_view text) {
  if (text == "fp32") return DType::kF32;
  if (text == "bf16") return DType::kBf16;
  refuse(fmt::format("{} is '{}'; legal: fp32, bf16", option, text));
}

template <typename Number>
Number parse_number(std::string_view option, std::string_view text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 ||
      static_cast<double>(value) > 1e9) {
    refuse(fmt::format("{} is '{}'; legal: a number from 0 to 1e9", option, text));
  }
  return value;
}

void choose_model(GpuOptions& options, const std::string& name) {
  if (name == "124m") {
    options.model = gpt2(12, 12, 768);
    options.batch = 64;
  } else if (name == "1.5b") {
    options.model = gpt2(48, 25, 1600);
    options.batch = 16;
  } else {
    refuse("--model is '" + name + "'; legal: 124m, 1.5b");
  }
  options.model_name = name;
}

}  // namespace

GpuOptions parse_gpu_options(int argc, char** argv) {
  GpuOptions options;
  choose_model(options, argument(argc, argv, "--model", "124m"));
  const std::map<std::string_view, int*> numbers = {{"--layers", &options.model.layers},
                                                    {"--heads", &options.model.heads},
                                                    {"--width", &options.model.width},
                                                    {"--context", &options.model.context},
                                                    {"--vocabulary", &options.model.vocabulary},
                                                    {"--logit-chunks", &options.model.logit_chunks},
                                                    {"--rounds", &options.rounds},
                                                    {"--steps", &options.steps}};
  for (int i = 2; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) refuse(std::string(name) + " needs a value");
    const std::string_view text = argv[i + 1];
    if (name == "--model") continue;
    if (name == "--json") {
      options.json = text;
    } else if (name == "--batch") {
      options.batch = parse_number<std::int64_t>(name, text);
    } else if (name == "--micro-batch") {
      options.micro_batch = parse_number<std::int64_t>(name, text);
    } else if (name == "--stream-precision") {
      options.model.stream_precision = parse_precision(name, text);
    } else if (name == "--moment-precision") {
      options.moments = parse_precision(name, text);
    } else if (name == "--turn-seconds") {
      options.turn_seconds = parse_number<double>(name, text);
    } else if (const auto found = numbers.find(name); found != numbers.end()) {
      *found->second = parse_number<int>(name, text);
      if (name != "--rounds" && name != "--steps" && name != "--logit-chunks") {
        options.model_name = "own";
      }
    } else {
      refuse(fmt::format("unknown option {}", name));
    }
  }
  validate(options.model);
  if (options.rounds < 1 || options.steps < 1 || options.batch < 1) {
    refuse("--rounds, --steps and --batch are at least 1");
  }
  if (options.micro_batch != 0 && options.batch % options.micro_batch != 0) {
    refuse(fmt::format("--micro-batch {} does not divide --batch {}", options.micro_batch,
                       options.batch));
  }
  options.tokens = std::min(options.tokens, options.model.vocabulary);
  return options;
}

Report gpu_report(const std::string& title, std::vector<std::string> columns) {
  const DeviceProperties gpu = properties_of(kBenchmarkGpu);
  Report report(title, std::move(columns));
  report.fact("gpu", gpu.name);
  report.fact("gpu memory GiB", std::round(static_cast<double>(gpu.memory) / 1073741824.0));
  report.fact("driver", gpu.driver);
  report.fact("runtime", gpu.runtime);
  report.fact("libraries", cuda::libraries());
  return report;
}

void publish(Report& report, const GpuOptions& options) {
  const GpuSampler::Figures figures = options.sampler->figures();
  report.fact("samples of the driver", figures.samples);
  if (figures.samples > 0) {
    report.fact("watts", std::round(figures.watts));
    report.fact("limit watts", std::round(figures.limit_watts));
    report.fact("SM MHz", std::round(figures.sm_mhz));
    report.fact("celsius", figures.celsius);
    report.fact("clocks held back by", figures.held_back);
  }
  report.print();
  report.save(options.json);
}

RandomOperands::RandomOperands(Device device) : device_(device), pattern_(std::size_t{1} << 20) {
  std::mt19937 random(1);
  for (std::uint16_t& word : pattern_) {
    const auto bits = static_cast<std::uint32_t>(random());
    // A sign, exponents of 2^-4 to 2^-2, any mantissa. As the upper half of an f32: the same.
    word = static_cast<std::uint16_t>((bits & 0x8000U) | (0x3D80U + bits % 0x180U));
  }
}

Tensor RandomOperands::make(DType dtype, const Shape& shape) {
  const Tensor tensor = {nullptr, {dtype, shape}};
  const std::size_t bytes = tensor.spec.bytes();
  const Buffer& buffer = buffers_.emplace_back(device_, bytes);
  const std::size_t piece = pattern_.size() * sizeof(std::uint16_t);
  for (std::size_t at = 0; at < bytes; at += piece) {
    copy_now(device_, buffer.data() + at, pattern_.data(), std::min(piece, bytes - at));
  }
  return {buffer.data(), tensor.spec};
}

Tensor RandomOperands::indices(const Shape& shape, int below) {
  const TensorSpec spec = {DType::kI32, shape};
  std::vector<std::int32_t> values(static_cast<std::size_t>(shape.elements()));
  std::mt19937 random(2);
  for (std::int32_t& value : values) {
    value = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(below));
  }
  const Buffer& buffer = buffers_.emplace_back(device_, spec.bytes());
  copy_now(device_, buffer.data(), values.data(), spec.bytes());
  return {buffer.data(), spec};
}

std::vector<double> in_turns(ComputeContext& ctx, const GpuOptions& options,
                             const std::vector<Contender>& contenders) {
  Event start(ctx.device(), /*timed=*/true), end(ctx.device(), /*timed=*/true);
  const auto seconds_of = [&](const Contender& contender, int times) {
    start.record(ctx.stream());
    for (int i = 0; i < times; ++i) contender.run();
    end.record(ctx.stream());
    ctx.stream().synchronize();
    return end.seconds_since(start) / times;
  };
  std::vector<int> times;
  for (const Contender& contender : contenders) {
    (void)seconds_of(contender, 1);  // makes what is made on first use
    const double once = std::max(seconds_of(contender, 2), 1e-7);
    times.push_back(static_cast<int>(std::clamp(options.turn_seconds / once, 1.0, 1e4)));
  }
  std::vector<std::vector<double>> turns(contenders.size());
  const GpuSampler::Measuring measuring(*options.sampler);
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      turns[i].push_back(seconds_of(contenders[i], times[i]));
    }
  }
  std::vector<double> medians;
  for (const std::vector<double>& turn : turns) medians.push_back(median(turn));
  return medians;
}

}  // namespace sluice::benchmarks
