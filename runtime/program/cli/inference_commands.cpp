// `sluice generate` and `sluice evaluate`: what runs saved weights forward alone.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>

#include <sluice/checkpoint.hpp>
#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "runtime/entry/command.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/models/config_json.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/models/token_decoder.hpp"
#include "runtime/models/tokenizer_file.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/cli/commands.hpp"
#include "runtime/program/cli/sampling.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/saved_run.hpp"
#include "runtime/program/train/train_data.hpp"
#include "runtime/program/train/train_options.hpp"
#include "runtime/report/metrics.hpp"

namespace sluice {
namespace {

void add_weights(OptionTable& table, std::string& weights) {
  table.add_text("weights", weights, "DIR",
                 "what 'sluice train --save' wrote, or one step of it; required");
}

void add_pipeline_options(OptionTable& table, PipelineOptions& pipeline) {
  pipeline.order.schedule = "forward-only";
  pipeline.training.inference = true;
  table.add_integer("pipeline", pipeline.shape.pipeline, 1, kMaxInt, "ranks; auto: all", "auto");
  table.add_integer("threads", pipeline.devices.threads, 1, ComputeContext::kMostThreads,
                    "per rank");
  add_devices(table, pipeline.devices.choices, "as of 'sluice train'");
  add_watch_options(table, pipeline.watch);
}

void add_tensor_options(OptionTable& table, PipelineOptions::Shape& shape) {
  table.add_integer("tensor", shape.tensor, 1, kMostTensorShards,
                    "ranks that share each stage; ranks = pipeline x tensor");
  table.add_integer("tensor-shards", shape.tensor_shards, 1, kMostTensorShards,
                    "parts of every layer, as of 'sluice train'; auto: those of the save, or where "
                    "tensor does not divide them as many as tensor",
                    "auto");
}

// Computes the function that was trained, unless another number of shards is given.
void take_saved_shards(const SaveState& saved, PipelineOptions::Shape& shape) {
  const int shards = saved.tensor_shards();
  if (shape.tensor_shards == 0 && can_divide(shards, shape.tensor)) shape.tensor_shards = shards;
}

// A command on the newest save of `weights`. `check`: what its options must be.
int run_on_weights(const std::string& command, const std::vector<std::string>& arguments,
                   OptionTable& table, const std::string& weights,
                   const std::function<void()>& check,
                   const std::function<void(const std::filesystem::path&, Communicator&)>& body) {
  return run_command(
      command,
      [&] {
        table.parse(arguments);
        if (table.help_wanted()) return table.help();
        if (weights.empty()) {
          throw_usage(
              "option --weights is missing: give a directory that 'sluice train --save' wrote");
        }
        check();
        return std::string();
      },
      [&](Communicator& world) {
        const PlaceSignals place;
        with_newest_save(weights, world,
                         [&](const std::filesystem::path& save) { body(save, world); });
        require_stdout();
      });
}

constexpr const char* kAboutGenerate =
    R"(Goes on from a prompt with a model that 'sluice train --save DIR' wrote, as a pipeline over the
ranks of an MPI job, or alone. The text is a function of weights, prompt and options: at equal
--tensor-shards it does not depend on the number of ranks. Where the weights' directory has a
tokenizer.json, the output is its text, and the prompt is --prompt-ids. Other models of up to 256
tokens read and write bytes, those of more read and write token numbers separated by spaces.

  sluice generate --weights run --prompt 'In the beginning' --tokens 200)";

struct GenerateOptions {
  std::string weights, prompt, prompt_ids, stop_ids = "auto";
  bool ids = false, special = false;
  int tokens = 256;
  SamplingOptions sampling;
  PipelineOptions pipeline = program_pipeline();
};

OptionTable make_table(GenerateOptions& options) {
  OptionTable table("sluice generate --weights DIR [options]", kAboutGenerate);
  add_weights(table, options.weights);
  table.add_text("prompt", options.prompt, "TEXT", "where to start; default: a line's end (or 0)");
  table.add_text("prompt-ids", options.prompt_ids, "LIST",
                 "the same as token numbers, such as '5 17 3'; -: from standard input");
  table.add_integer("tokens", options.tokens, 1, kMaxInt, "to add to the prompt");
  table.add_text("stop-ids", options.stop_ids, "LIST",
                 "tokens that end the text; none; auto: as the model's configuration says");
  table.add_flag("ids", options.ids, "print token numbers");
  table.add_flag("special-tokens", options.special, "print the text of special tokens too");
  table.add_real("temperature", options.sampling.temperature, {.low = 0, .high = 1000},
                 "0: always the likeliest token");
  table.add_integer("top-k", options.sampling.top_k, 1, kMaxInt,
                    "choose among the likeliest K tokens", "all");
  table.add_integer("seed", options.sampling.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "another one gives another text");
  add_tensor_options(table, options.pipeline.shape);
  add_pipeline_options(table, options.pipeline);
  return table;
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
            {.pipeline = PipelineAccess::layout(pipeline).plans.last_rank()})),
        tokens_(std::move(prompt)),
        window_(static_cast<std::size_t>(model.context)),
        logits_(static_cast<std::size_t>(model.vocabulary)) {}

  // Collective: every rank gets the new token.
  int next() {
    const std::size_t shown = std::min(tokens_.size(), window_.size());
    std::ranges::fill(window_, 0);
    std::copy(tokens_.end() - static_cast<std::ptrdiff_t>(shown), tokens_.end(), window_.begin());
    const Tensor input = {window_.data(), {DType::kI32, Shape{1, positions_for(shown)}}};
    const std::span<const Tensor> outputs = pipeline_.infer({.inputs = {input}});
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
  // As few as have room for `tokens`, of few different lengths: each is prepared once and stays.
  [[nodiscard]] std::int64_t positions_for(std::size_t tokens) const {
    constexpr std::size_t kStep = 64;
    return static_cast<std::int64_t>(
        std::min((tokens + kStep - 1) / kStep * kStep, window_.size()));
  }

  Pipeline& pipeline_;
  const TransformerConfig& model_;
  const SamplingOptions& sampling_;
  int last_rank_;
  std::vector<int> tokens_;
  std::vector<std::int32_t> window_;  // the last tokens, from position 0 on
  std::vector<float> logits_;         // of the last of them
};

// Prints tokens as they come: as numbers, as the tokenizer's text, or as TokenText has them.
class Printer {
 public:
  // Reads the tokenizer where it is needed.
  Printer(const std::filesystem::path& tokenizer, const GenerateOptions& options, int vocabulary)
      : text_(options.ids ? std::numeric_limits<int>::max() : vocabulary) {
    if (options.ids || tokenizer.empty()) return;
    decoder_ = std::make_unique<TokenDecoder>(
        read_tokenizer_file(tokenizer),
        options.special ? SpecialTokens::kShow : SpecialTokens::kSkip);
  }
  void add(int token) { print(decoder_ ? decoder_->add(token) : text_.text_of(token)); }
  void finish() { print((decoder_ ? decoder_->finish() : "") + "\n"); }

 private:
  static void print(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  TokenText text_;
  std::unique_ptr<TokenDecoder> decoder_;
};

// What all ranks agree on before the pipeline is built.
struct Request {
  TransformerConfig model;
  PipelineOptions::Shape shape;
  std::vector<int> prompt, stop_ids;
  std::unique_ptr<Printer> printer;  // on rank 0
};

PipelineOptions pipeline_options(const GenerateOptions& options, const Request& request) {
  PipelineOptions result = options.pipeline;
  result.shape = request.shape;
  result.shape.batch_size = 1;
  const SamplingOptions& sampling = options.sampling;
  result.expert.configuration = {{"weights", options.weights},
                                 {"prompt", joined(request.prompt, " ")},
                                 {"prompt-ids", options.prompt_ids},
                                 {"stop-ids", joined(request.stop_ids, " ")},
                                 {"tokens", fmt::format("{}", options.tokens)},
                                 {"temperature", fmt::format("{}", sampling.temperature)},
                                 {"top-k", fmt::format("{}", sampling.top_k)},
                                 {"seed", fmt::format("{}", sampling.seed)}};
  return result;
}

std::string read_standard_input() {
  constexpr std::size_t kMost = std::size_t{1} << 24;
  std::string text;
  std::array<char, 4096> block = {};
  for (std::size_t got = 0; (got = std::fread(block.data(), 1, block.size(), stdin)) > 0;) {
    text.append(block.data(), got);
    if (text.size() > kMost) {
      throw_usage("option --prompt-ids: standard input has more than {} bytes", kMost);
    }
  }
  return text;
}

// Empty where the model has none.
std::filesystem::path tokenizer_of(const std::filesystem::path& save) {
  const std::filesystem::path path = save / "tokenizer.json";
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(path, ignored))
             ? path
             : std::filesystem::path();
}

// `given`: the text of --prompt-ids.
std::vector<int> prompt_of(const GenerateOptions& options, const std::string& given,
                           const std::filesystem::path& tokenizer, int vocabulary) {
  if (!options.prompt_ids.empty()) {
    std::vector<int> prompt = parse_tokens("--prompt-ids", given, vocabulary);
    if (prompt.empty()) throw_usage("option --prompt-ids: at least one token is needed");
    return prompt;
  }
  if (!options.prompt.empty() && !tokenizer.empty()) {
    throw_usage(
        "option --prompt: this model has a tokenizer, whose text becomes no tokens here; legal is "
        "--prompt-ids \"$(python3 -c 'import sys, tokenizers; "
        "print(*tokenizers.Tokenizer.from_file(sys.argv[1]).encode(sys.argv[2]).ids)' {} TEXT)\"",
        tokenizer.string());
  }
  const TokenText text(vocabulary);
  const char* first = text.bytes() && tokenizer.empty() ? "\n" : "0";
  if (options.prompt.empty() && !tokenizer.empty()) return {0};
  return text.prompt_tokens(options.prompt.empty() ? first : options.prompt);
}

// Positions that a text of `tokens` is computed with. A model that was trained on shorter windows
// than it was made for takes more; one of Hugging Face, whose windows are not known, what it needs.
int context_for(const TransformerConfig& model, std::int64_t tokens, bool foreign) {
  const std::int64_t most = std::max(model.positions, model.context);
  const std::int64_t least = foreign ? 1 : model.context;
  return static_cast<int>(std::clamp(tokens, least, most));
}

Request read_request(const std::filesystem::path& save, const GenerateOptions& options,
                     Communicator& world) {
  const std::unique_ptr<Communicator> comm = world.duplicate();
  ControlChannel control(*comm);
  Collectives collectives(*comm, 0, &control);
  Request request;
  guarded(control, world.rank(), [&] {
    request.model = read_model_config(save);
    request.shape = options.pipeline.shape;
    take_saved_shards(saved_state(save), request.shape);
    std::string given = options.prompt_ids;
    // mpirun hands standard input to the first rank. Each rank takes part, whatever its options
    // say: the pipeline compares them later.
    if (given == "-" && world.rank() == 0) given = read_standard_input();
    given = collectives.broadcast_string(given, 0);
    const int vocabulary = request.model.vocabulary;
    request.prompt = prompt_of(options, given, tokenizer_of(save), vocabulary);
    request.model.context =
        context_for(request.model, std::int64_t{options.tokens} + std::ssize(request.prompt),
                    is_hugging_face(save));
    if (options.stop_ids == "auto") {
      request.stop_ids = read_stop_ids(save);
      std::erase_if(request.stop_ids, [&](int id) { return id >= vocabulary; });
    } else if (options.stop_ids != "none") {
      request.stop_ids = parse_tokens("--stop-ids", options.stop_ids, vocabulary);
    }
    if (world.rank() != 0) return;
    request.printer = std::make_unique<Printer>(tokenizer_of(save), options, vocabulary);
  });
  return request;
}

void generate_text(const std::filesystem::path& save, const GenerateOptions& options,
                   Communicator& world) {
  const Request request = read_request(save, options, world);
  const TransformerConfig& model = request.model;
  Printer* const printer = request.printer.get();
  const std::unique_ptr<DataSource> source = make_token_shapes(model.context);
  Pipeline pipeline(world, Transformer(model), *source, pipeline_options(options, request));
  load_model(pipeline, save);
  Generator generator(pipeline, model, options.sampling, request.prompt);
  if (printer) {
    for (const int token : request.prompt) printer->add(token);
  }
  bool stopped = false;
  for (int i = 0; i < options.tokens && !stopped; ++i) {
    const int token = generator.next();
    if (printer) printer->add(token);
    stopped = std::ranges::find(request.stop_ids, token) != request.stop_ids.end();
  }
  if (printer) printer->finish();
  pipeline.close();
}

constexpr const char* kAboutEvaluate =
    R"(Prints the mean loss of what 'sluice train --save DIR' wrote over the validation part of a
file, as a pipeline over the ranks of an MPI job, or alone. It does not depend on the number
of ranks, at equal --tensor-shards. Without --data and --validation-share these are the
training's.

  sluice evaluate --weights run)";

struct EvaluateOptions {
  std::string weights, data;
  double share = 0;
  bool share_given = false;
  std::int64_t samples = 0;
  PipelineOptions pipeline = program_pipeline();
};

OptionTable make_table(EvaluateOptions& options) {
  OptionTable table("sluice evaluate --weights DIR [options]", kAboutEvaluate);
  add_weights(table, options.weights);
  table.add_text("data", options.data, "FILE", "text or tokens; default: the training's").once();
  table.add_real("validation-share", options.share, {.low = 0, .high = 1, .high_open = true},
                 "last part of the data; default: the training's");
  table.add_integer("validation-samples", options.samples, 1,
                    std::numeric_limits<std::int64_t>::max(), "windows of it", "all");
  table.add_integer("micro-batch-size", options.pipeline.shape.micro_batch_size, 1, kMaxInt,
                    "samples");
  add_tensor_options(table, options.pipeline.shape);
  add_pipeline_options(table, options.pipeline);
  return table;
}

// A line where `file`, which the training read, holds something else now; empty where it does not.
std::string change_since(const SaveState& saved, const TokenFile& file) {
  const std::string path = file.path().string();
  if (value_of(saved.options, "data") != path) return "";
  const std::string change = data_difference(saved.data, data_identity(file));
  if (change.empty()) return "";
  return fmt::format("sluice: warning: '{}' is not as the training read it: {}\n", path, change);
}

// Takes what is not given from the options that the save recorded.
void complete_from(const OptionValues& saved, const std::filesystem::path& save,
                   EvaluateOptions& options) {
  for (const auto& [name, value] : saved) {
    if (name == "data" && options.data.empty()) options.data = value;
    if (name == "validation-share" && !options.share_given) options.share = std::stod(value);
  }
  if (options.data.empty()) {
    throw_usage("option --data is missing: '{}' does not say what the weights were trained on",
                save.string());
  }
}

void evaluate(const std::filesystem::path& save, EvaluateOptions options, Communicator& world) {
  const std::unique_ptr<Communicator> comm = world.duplicate();
  ControlChannel control(*comm);
  TransformerConfig model;
  std::shared_ptr<TokenFile> file;
  std::unique_ptr<DataSource> source;
  std::int64_t windows = 0;
  guarded(control, world.rank(), [&] {
    model = read_model_config(save);
    const SaveState saved = saved_state(save);
    complete_from(saved.options, save, options);
    take_saved_shards(saved, options.pipeline.shape);
    file = std::make_shared<TokenFile>(options.data, options.share);
    if (world.rank() == 0) fmt::print(stderr, "{}", change_since(saved, *file));
    Collectives collectives(*comm, 0, &control);
    require_same_configuration(collectives, file->identity("--data"));
    require_same_tokenizer(*file, save);
    windows = validation_samples(*file, model.context);
    if (windows == 0) {
      throw_error(ErrorCode::kData, "data file '{}': its last {} of {} tokens hold no window of {}",
                  options.data, options.share, file->size(), model.context);
    }
    source = make_token_source(file, model.context, model.vocabulary, /*seed=*/1);
  });
  const std::int64_t samples = options.samples > 0 ? options.samples : windows;
  const std::int64_t part = validation_part(options.pipeline.shape);
  options.pipeline.expert.evaluations = validation_sizes(samples, part);
  Pipeline pipeline(world, Transformer(model), *source, options.pipeline);
  load_model(pipeline, save);
  std::optional<Progress> progress;  // on a terminal
  if (world.rank() == 0 && terminal_output()) progress.emplace(1, 1, /*terminal=*/true);
  const auto shown = [&](std::int64_t done) {
    if (progress) progress->validation(done, samples);
    return true;
  };
  const double loss = *validate(pipeline, *source, samples, part, shown);
  progress.reset();
  if (world.rank() == 0) {
    fmt::print("{}: loss {:.4f} nats, {:.4f} bits per {}, over {} of {} windows of '{}'\n",
               save.filename().string(), loss, loss / std::log(2.0),
               file->format() == TokenFormat::kText ? "byte" : "token", samples, windows,
               options.data);
  }
  pipeline.close();
}

}  // namespace

int generate_command(const std::vector<std::string>& arguments) {
  GenerateOptions options;
  OptionTable table = make_table(options);
  const auto check = [&] {
    if (options.prompt.empty() || options.prompt_ids.empty()) return;
    throw_usage("options --prompt and --prompt-ids are both given: legal is one of them");
  };
  return run_on_weights("generate", arguments, table, options.weights, check,
                        [&](const std::filesystem::path& save, Communicator& world) {
                          generate_text(save, options, world);
                        });
}

int evaluate_command(const std::vector<std::string>& arguments) {
  EvaluateOptions options;
  OptionTable table = make_table(options);
  const auto check = [&] { options.share_given = table.given("validation-share"); };
  return run_on_weights("evaluate", arguments, table, options.weights, check,
                        [&](const std::filesystem::path& save, Communicator& world) {
                          evaluate(save, options, world);
                        });
}

}  // namespace sluice
