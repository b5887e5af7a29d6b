#include "runtime/cli/train_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/generate.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "runtime/cli/batch_options.hpp"
#include "runtime/explore/schedule_report.hpp"
#include "runtime/options/option_table.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxSamples = std::int64_t{1} << 40;
constexpr std::uint64_t kMaxSteps = std::uint64_t{1} << 40;
constexpr int kMaxMicroBatches = 1'000'000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr RealRange kShare = {.low = 0, .high = 1};
constexpr RealRange kBelowOne = {.low = 0, .high = 1, .high_open = true};
constexpr RealRange kNotNegative = {.low = 0, .high = kInfinity};
constexpr RealRange kPositive = {.low = 0, .high = kInfinity, .low_open = true};

constexpr const char* kAbout =
    "Trains a transformer as a pipeline of stages over the ranks of an MPI job (one rank without\n"
    "mpirun). ranks = pipeline x replicas. Batches: samples per step = replicas x micro-batches x\n"
    "micro-batch size; give any two, the last micro-batch may be smaller. Results depend on "
    "neither\n"
    "schedule nor pipeline depth, to the last bit, at equal micro-batches and replicas.\n"
    "\n"
    "  mpirun -n 4 sluice train --data text.txt --pipeline 2 --replicas 2 --save run\n"
    "\n"
    "Of an option given twice the last one counts.";

// Options whose values are words; resolve_words() turns them into what TrainOptions holds.
struct Words {
  std::string model = "gpt2", precision = "fp32", recompute = "none", rank_order = "pipeline-first";
  std::string optimizer = "adamw", decay = "cosine", device = "auto", transport = "auto";
  bool untie = false;
};

std::vector<std::string> training_schedules() {
  std::vector<std::string> names = schedule_names();
  std::erase(names, "forward-only");
  names.emplace_back("auto");
  return names;
}

void add_model_options(OptionTable& table, TransformerConfig& model, Words& words) {
  table.heading("Model");
  table.add_choice("model", words.model, {"gpt2", "llama"}, "architecture");
  table.add_integer("layers", model.layers, 1, TransformerLimits::kLayers, "transformer blocks");
  table.add_integer("heads", model.heads, 1, TransformerLimits::kHeads,
                    "attention heads; divide the width");
  table.add_integer("kv-heads", model.kv_heads, 1, TransformerLimits::kHeads,
                    "heads of keys and values (llama); divide the heads; auto: as many as heads",
                    "auto");
  table.add_integer("width", model.width, 1, TransformerLimits::kWidth, "of the residual stream");
  table.add_integer("context", model.context, 1, TransformerLimits::kContext, "tokens of a sample");
  table.add_integer("vocabulary", model.vocabulary, 1, TransformerLimits::kVocabulary,
                    "tokens; 256: bytes");
  table.add_integer("mlp-width", model.mlp_width, 1, TransformerLimits::kMlpWidth,
                    "auto: 4 x width (gpt2), 8/3 x width rounded up to 64s (llama)", "auto");
  table.add_real("dropout", model.dropout, kBelowOne, "probability");
  table.add_flag("untie", words.untie, "give the head weights of its own");
  table.add_choice(
      "precision", words.precision, {"fp32", "tf32", "bf16"},
      "of products' operands; weights, sums and the residual stream stay fp32; tf32: a "
      "GPU's fp32 products round their operands, a CPU's do not");
  table.add_choice("recompute", words.recompute, {"none", "attention", "block"},
                   "what backward computes again instead of keeping it; the results are the same");
}

void add_layout_options(OptionTable& table, TrainOptions& options, Words& words) {
  table.heading("Layout");
  table.add_integer("pipeline", options.pipeline, 1, kMaxInt,
                    "ranks of one pipeline; auto: ranks / replicas", "auto");
  table.add_integer("replicas", options.replicas, 1, kMaxInt, "pipelines that share each batch");
  table.add_choice("rank-order", words.rank_order, {"pipeline-first", "replica-first"},
                   "which ranks are neighbours");
  table.add_choice("schedule", options.schedule, training_schedules(),
                   "order of micro-batches; see 'sluice schedule'; auto: searched for this model");
  table.add_integer("chunks", options.chunks, 1, kMaxChunks,
                    "stages per rank; auto: 1 leaves it open");
  table.add_text("schedule-file", options.schedule_file, "PATH",
                 "the order from a file instead: Sluice's JSON or PyTorch's CSV");
  table.add_text("partition", options.partition, "auto|even|N,N,...", "blocks per stage");
  table.add_integer("micro-batches", options.micro_batches, 1, kMaxMicroBatches,
                    "per step and replica; auto: from the next two", "auto");
  table.add_integer("micro-batch-size", options.micro_batch_size, 1, std::int64_t{kMaxInt},
                    "samples; auto: from batch-size and micro-batches, else 1", "auto");
  table.add_integer("batch-size", options.batch_size, 1, kMaxSamples,
                    "samples per step over all replicas; auto: from the other two, else at least 4",
                    "auto");
  table.add_integer("threads", options.threads, 1, 4096, "per rank; results depend on it");
  table.add_text(
      "device", words.device, "LIST",
      "cpu, cuda, cuda:N or auto; or one a rank of the pipeline, or of the job: cuda,cpu");
  table.add_choice("transport", words.transport, {"auto", "mpi", "nccl"},
                   "between GPUs; auto: NCCL where each rank has a GPU of its own");
  table.add_flag("all-reduce", options.all_reduce,
                 "let NCCL sum over replicas in its own order: not depth-invariant");
  table.add_flag("cuda-graphs", options.cuda_graphs,
                 "on GPUs: record what stages do in step 2, replay it from step 3 on");
}

void add_training_options(OptionTable& table, TrainOptions& options, Words& words) {
  table.heading("Training");
  table.add_text("data", options.data, "FILE",
                 "text (bytes), nanoGPT .bin or llm.c token file; required unless --dry-run");
  table.add_real("validation-share", options.validation_share, kBelowOne,
                 "last part of the data, kept for validation");
  table.add_integer("steps", options.steps, 1, kMaxSteps, "optimizer steps");
  table.add_integer("seed", options.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "of initial weights, batches and dropout");
  table.add_choice("optimizer", words.optimizer, {"adamw", "sgd"}, "update rule");
  table.add_real("learning-rate", options.learning_rate.peak, kPositive, "peak");
  table.add_integer("warmup", options.learning_rate.warmup, 0, kMaxSteps,
                    "steps of linear warmup; default: 100, at most a tenth of the steps");
  table.add_choice("learning-rate-decay", words.decay, {"cosine", "constant"}, "after warmup");
  table.add_real("final-learning-rate-share", options.learning_rate.final_share, kShare,
                 "of the peak, at the end of the cosine");
  table.add_real("weight-decay", options.optimizer.weight_decay, kNotNegative,
                 "not on norms and biases");
  table.add_real("beta1", options.optimizer.beta1, kBelowOne, "AdamW");
  table.add_real("beta2", options.optimizer.beta2, kBelowOne, "AdamW");
  table.add_real("epsilon", options.optimizer.epsilon, kPositive, "AdamW");
  table.add_real("momentum", options.optimizer.momentum, kBelowOne, "SGD");
  table.add_real("clip", options.clip, kNotNegative, "global gradient norm; 0: off");
}

void add_output_options(OptionTable& table, TrainOptions& options) {
  table.heading("Running and output");
  table.add_integer("validate-every", options.validate_every, 0, kMaxSteps,
                    "steps; 0: at the end only");
  table.add_integer("validation-samples", options.validation_samples, 1, kMaxSamples,
                    "per validation; all: the whole validation part", "all");
  table.add_text("save", options.save, "DIR", "weights as safetensors, at the end");
  table.add_integer("save-every", options.save_every, 0, kMaxSteps, "steps; 0: at the end only");
  table.add_text("resume", options.resume, "DIR", "go on from what --save left, in any layout");
  table.add_text("metrics", options.metrics, "FILE", "JSON lines, one a step");
  table.add_text("trace", options.trace, "FILE", "timeline of a step, for Perfetto");
  table.add_integer("check-replicas", options.check_replicas, 0, kMaxSteps,
                    "compare replicas every that many steps; 0: never");
  table.add_flag("dry-run", options.dry_run, "print layout and memory, train nothing");
}

void resolve_words(const Words& words, TrainOptions& options) {
  options.model.kind = words.model == "llama" ? TransformerKind::kLlama : TransformerKind::kGpt2;
  options.model.precision = words.precision == "bf16" ? DType::kBf16 : DType::kF32;
  options.model.recompute = words.recompute == "block"       ? Recompute::kBlock
                            : words.recompute == "attention" ? Recompute::kAttention
                                                             : Recompute::kNone;
  options.tf32 = words.precision == "tf32";
  options.model.tied = !words.untie;
  options.rank_order = parse_rank_order(words.rank_order);
  options.optimizer.kind = parse_optimizer(words.optimizer);
  options.learning_rate.constant = words.decay == "constant";
  options.devices = parse_devices(words.device);
  options.transport = parse_transport(words.transport);
}

void resolve_learning_rate(const OptionTable& table, TrainOptions& options) {
  options.learning_rate.steps = options.steps;
  if (!table.given("warmup")) {
    options.learning_rate.warmup = std::min(options.learning_rate.warmup, options.steps / 10);
  } else if (options.learning_rate.warmup > options.steps) {
    throw Error(ErrorCode::kUsage,
                fmt::format("option --warmup: {} is more than --steps {}; at most {} is legal",
                            options.learning_rate.warmup, options.steps, options.steps));
  }
}

// A command line that gives one of the numbers a file fixed all of makes the file's give way.
// A schedule from a file keeps its micro-batches.
void yield_to_command_line(const OptionTable& table, bool fixed_micro_batches,
                           BatchNumbers& batch) {
  bool all_given = true;
  bool any_on_command_line = table.given_on_command_line("replicas");
  for (const char* name : {"micro-batches", "micro-batch-size", "batch-size"}) {
    all_given = all_given && table.given(name);
    any_on_command_line = any_on_command_line || table.given_on_command_line(name);
  }
  if (!all_given || !any_on_command_line) return;
  if (!fixed_micro_batches && !table.given_on_command_line("micro-batches")) {
    batch.micro_batches = 0;
  } else if (!table.given_on_command_line("batch-size")) {
    batch.batch_size = 0;
  } else if (!table.given_on_command_line("micro-batch-size")) {
    batch.micro_batch_size = 0;
  }
}

// The file fixes schedule, chunks, micro-batches and pipeline. A saved configuration names them
// all, so only the command line can contradict a file.
void resolve_schedule(const OptionTable& table, TrainOptions& options) {
  if (options.schedule_file.empty()) {
    if (options.schedule == "auto" && options.partition != "auto") {
      throw Error(ErrorCode::kUsage,
                  fmt::format("option --partition: '{}', but --schedule auto places the layers "
                              "itself; legal is auto",
                              options.partition));
    }
    return;
  }
  const bool file_wins = table.given_on_command_line("schedule-file");
  for (const char* name : {"schedule", "chunks"}) {
    if (!table.given_on_command_line(name)) continue;
    if (file_wins) {
      throw Error(ErrorCode::kUsage,
                  fmt::format("option --{}: the schedule of --schedule-file says "
                              "it; give one of the two",
                              name));
    }
    options.schedule_file.clear();
    return;
  }
  LoadedSchedule loaded = load_schedule(options.schedule_file);
  const Schedule& order = loaded.schedule;
  const auto take = [&](const char* name, int& value, int from_file) {
    const bool binding = file_wins ? table.given_on_command_line(name) : table.given(name);
    if (binding && value != 0 && value != from_file) {
      throw Error(ErrorCode::kUsage,
                  fmt::format("option --{}: {}, but the schedule of '{}' is for {}; legal is {}",
                              name, value, options.schedule_file, from_file, from_file));
    }
    value = from_file;
  };
  take("micro-batches", options.micro_batches, order.micro_batches);
  take("pipeline", options.pipeline, order.placement.ranks());
  if (order.forward_only) {
    throw Error(ErrorCode::kUsage,
                fmt::format("option --schedule-file: '{}' has no backward actions, so nothing can "
                            "be trained with it",
                            options.schedule_file));
  }
  options.order = std::make_shared<const Schedule>(std::move(loaded.schedule));
}

void resolve_batch(const OptionTable& table, TrainOptions& options) {
  BatchNumbers batch = {.batch_size = options.batch_size,
                        .micro_batch_size = options.micro_batch_size,
                        .micro_batches = options.micro_batches,
                        .replicas = options.replicas};
  yield_to_command_line(table, options.order != nullptr, batch);
  batch = resolve_batch(batch, kMaxMicroBatches);
  options.batch_size = batch.batch_size;
  options.micro_batch_size = batch.micro_batch_size;
  options.micro_batches = static_cast<int>(batch.micro_batches);
}

// Nothing may be written over the data, or by two writers at once; what is no regular file, as
// /dev/null, may.
void require_files_apart(const TrainOptions& options) {
  struct Path {
    const char* option;
    fs::path path;
  };
  std::vector<Path> seen;
  for (const auto& [option, name] : {std::pair<const char*, std::string>{"data", options.data},
                                     {"schedule-file", options.schedule_file},
                                     {"metrics", options.metrics},
                                     {"trace", options.trace},
                                     {"save", options.save}}) {
    std::error_code error;
    if (name.empty() || (fs::exists(name, error) && !fs::is_regular_file(name, error) &&
                         !fs::is_directory(name, error))) {
      continue;
    }
    const fs::path absolute = fs::absolute(name, error);
    const fs::path path = error ? fs::path() : fs::weakly_canonical(absolute, error);
    if (error) continue;  // no file can be opened by that name: opening it says why
    for (const Path& other : seen) {
      if (path != other.path && !fs::equivalent(path, other.path, error)) continue;
      throw Error(
          ErrorCode::kUsage,
          fmt::format("option --{}: '{}' is what --{} names as well; give each a file of its "
                      "own",
                      option, name, other.option));
    }
    seen.push_back({option, path});
  }
}

void require_outputs_make_sense(const TrainOptions& options) {
  if (options.data.empty() && !options.dry_run) {
    throw Error(ErrorCode::kUsage,
                "option --data is missing: give a text or token file to train on (or --dry-run)");
  }
  if (options.save_every > 0 && options.save.empty()) {
    throw Error(ErrorCode::kUsage,
                fmt::format("option --save-every: {} without --save DIR saves nowhere; "
                            "give --save DIR as well",
                            options.save_every));
  }
  require_files_apart(options);
}

TrainOptions default_options() {
  TrainOptions options;
  options.steps = 2000;
  options.learning_rate.warmup = 100;
  options.optimizer.weight_decay = 0.1F;
  return options;
}

}  // namespace

ParsedTrain parse_train_options(const std::vector<std::string>& arguments) {
  ParsedTrain parsed;
  parsed.options = default_options();
  TrainOptions& options = parsed.options;
  Words words;
  OptionTable table("sluice train [options]", kAbout);
  table.allow_config_file();
  add_model_options(table, options.model, words);
  add_layout_options(table, options, words);
  add_training_options(table, options, words);
  add_output_options(table, options);
  parsed.help_text = table.help();
  table.parse(arguments);
  parsed.help = table.help_wanted();
  if (parsed.help) return parsed;
  resolve_words(words, options);
  resolve_learning_rate(table, options);
  validate(options.model);
  resolve_schedule(table, options);
  resolve_batch(table, options);
  require_outputs_make_sense(options);
  parsed.resolved = table.values();
  return parsed;
}

std::string describe_configuration(
    const std::vector<std::pair<std::string, std::string>>& resolved) {
  constexpr std::size_t kWidth = 100;
  std::string text = "Configuration";
  std::size_t column = text.size();
  for (const auto& [name, value] : resolved) {
    if (value.empty()) continue;
    const std::string item = fmt::format("{} {}", name, value);
    if (column + 2 + item.size() > kWidth) {
      text += '\n';
      column = 0;
    }
    text += "  " + item;
    column += 2 + item.size();
  }
  return text + "\n";
}

std::string to_config_text(const std::vector<std::pair<std::string, std::string>>& resolved) {
  std::string text;
  for (const auto& [name, value] : resolved) {
    if (!value.empty()) text += fmt::format("{} = {}\n", name, value);
  }
  return text;
}

}  // namespace sluice
