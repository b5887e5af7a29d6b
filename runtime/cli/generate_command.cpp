#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/group/control.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/cli/sampling.hpp"
#include "runtime/cli/saved_run.hpp"
#include "runtime/cli/train_options.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr const char* kAbout =
    "Goes on from a prompt with a model that 'sluice train --save DIR' wrote, as a pipeline over "
    "the\n"
    "ranks of an MPI job, or alone. The text is a function of weights, prompt and options: it "
    "does\n"
    "not depend on the number of ranks. Models of up to 256 tokens read and write bytes; others\n"
    "token numbers separated by spaces.\n"
    "\n"
    "  sluice generate --weights run --prompt 'In the beginning' --tokens 200";

struct GenerateOptions {
  std::string weights, prompt;
  int tokens = 256;
  SamplingOptions sampling;
  int pipeline = 0, threads = 1;
  std::string device = "auto", watchdog_ports;
  PipelineOptions::Watch watch = program_watch();
};

OptionTable make_table(GenerateOptions& options) {
  OptionTable table("sluice generate --weights DIR [options]", kAbout);
  table.add_text("weights", options.weights, "DIR",
                 "what 'sluice train --save' wrote, or one step of it; required");
  table.add_text("prompt", options.prompt, "TEXT", "where to start; default: a line's end (or 0)");
  table.add_integer("tokens", options.tokens, 1, kMaxInt, "to add to the prompt");
  table.add_real("temperature", options.sampling.temperature, {.low = 0, .high = 1000},
                 "0: always the likeliest token");
  table.add_integer("top-k", options.sampling.top_k, 1, kMaxInt,
                    "choose among the likeliest K tokens", "all");
  table.add_integer("seed", options.sampling.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "another one gives another text");
  table.add_integer("pipeline", options.pipeline, 1, kMaxInt, "ranks; auto: all", "auto");
  table.add_integer("threads", options.threads, 1, 4096, "per rank");
  table.add_text("device", options.device, "LIST", "as of 'sluice train'");
  add_watch_options(table, options.watch, options.watchdog_ports);
  return table;
}

PipelineOptions pipeline_options(const GenerateOptions& options) {
  PipelineOptions result;
  result.shape.pipeline = options.pipeline;
  result.order.schedule = "forward-only";
  result.shape.batch_size = 1;
  result.devices.threads = options.threads;
  result.devices.choices = parse_devices(options.device);
  result.training.inference = true;
  result.watch = options.watch;
  const SamplingOptions& sampling = options.sampling;
  result.checks.configuration = {{"weights", options.weights},
                                 {"prompt", options.prompt},
                                 {"tokens", fmt::format("{}", options.tokens)},
                                 {"temperature", fmt::format("{}", sampling.temperature)},
                                 {"top-k", fmt::format("{}", sampling.top_k)},
                                 {"seed", fmt::format("{}", sampling.seed)}};
  return result;
}

// A text that grows by one token at a time; every rank keeps the same.
class Generator {
 public:
  Generator(Pipeline& pipeline, const TransformerConfig& model, const SamplingOptions& sampling,
            std::vector<int> prompt)
      : pipeline_(pipeline),
        model_(model),
        sampling_(sampling),
        last_rank_(PipelineAccess::layout(pipeline).place.topology.rank_of(
            0, PipelineAccess::layout(pipeline).plans.last_rank())),
        tokens_(std::move(prompt)),
        window_(static_cast<std::size_t>(model.context)),
        logits_(static_cast<std::size_t>(model.vocabulary)) {}

  // Collective: every rank gets the new token.
  int next() {
    const std::size_t shown = std::min(tokens_.size(), window_.size());
    std::fill(window_.begin(), window_.end(), 0);
    std::copy(tokens_.end() - static_cast<std::ptrdiff_t>(shown), tokens_.end(), window_.begin());
    const Tensor input = {window_.data(), {DType::kI32, Shape{1, model_.context}}};
    const std::span<const Tensor> outputs = pipeline_.infer(std::span(&input, 1));
    std::int32_t token = 0;
    PipelineAccess::guarded(pipeline_, [&] {
      if (outputs.empty()) return;
      const auto vocabulary = static_cast<std::size_t>(model_.vocabulary);
      const Tensor& all = outputs[0];
      const std::size_t first = (shown - 1) * vocabulary;
      for (std::size_t i = 0; i < vocabulary; ++i) {
        logits_[i] = all.spec.dtype == DType::kBf16 ? to_float(all.as<Bf16>()[first + i])
                                                    : all.as<float>()[first + i];
      }
      token = sample_token(logits_, sampling_, tokens_.size());
    });
    PipelineAccess::world(pipeline_).broadcast(std::as_writable_bytes(std::span(&token, 1)),
                                               last_rank_);
    tokens_.push_back(token);
    return token;
  }

 private:
  Pipeline& pipeline_;
  const TransformerConfig& model_;
  const SamplingOptions& sampling_;
  int last_rank_;
  std::vector<int> tokens_;
  std::vector<std::int32_t> window_;  // the last tokens, from position 0 on
  std::vector<float> logits_;         // of the last of them
};

void print_text(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

TransformerConfig model_of(const std::filesystem::path& save, Communicator& world) {
  const std::unique_ptr<Communicator> comm = world.duplicate();
  ControlChannel control(*comm);
  TransformerConfig model;
  guarded(control, world.rank(), [&] { model = read_model_config(save); });
  return model;
}

void generate_text(const std::filesystem::path& save, const GenerateOptions& options,
                   Communicator& world) {
  const TransformerConfig model = model_of(save, world);
  const TokenText token_text(model.vocabulary);
  const std::string prompt =
      !options.prompt.empty() ? options.prompt : (token_text.bytes() ? "\n" : "0");
  const std::vector<int> prompt_tokens = token_text.prompt_tokens(prompt);
  const std::unique_ptr<DataSource> source = make_token_shapes(model.context);
  const StageFactory make_stage = [&model](int stage, int stages) {
    return make_transformer_stage(model, parse_partition("auto", layer_costs(model), stages),
                                  stage);
  };
  Pipeline pipeline(world, pipeline_options(options), make_stage, *source);
  load_model(pipeline, save);
  Generator generator(pipeline, model, options.sampling, prompt_tokens);
  const bool prints = world.rank() == 0;
  if (prints) {
    for (const int token : prompt_tokens) print_text(token_text.text_of(token));
  }
  for (int i = 0; i < options.tokens; ++i) {
    const int token = generator.next();
    if (prints) print_text(token_text.text_of(token));
  }
  if (prints) print_text("\n");
  pipeline.close();
}

}  // namespace

int generate_command(int argc, char** argv) {
  GenerateOptions options;
  OptionTable table = make_table(options);
  const std::vector<std::string> arguments(argv, argv + argc);
  return run_command(
      "generate", argc, argv,
      [&] {
        table.parse(arguments);
        if (table.help_wanted()) return table.help();
        take_ports(options.watchdog_ports, options.watch);
        if (options.weights.empty()) {
          throw Error(ErrorCode::kUsage,
                      "option --weights is missing: give a directory that 'sluice train --save' "
                      "wrote");
        }
        return std::string();
      },
      [&](Communicator& world) {
        const PlaceSignals place;
        with_newest_save(options.weights, world, [&](const std::filesystem::path& save) {
          generate_text(save, options, world);
        });
      });
}

}  // namespace sluice
