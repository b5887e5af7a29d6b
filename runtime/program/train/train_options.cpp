#include "runtime/program/train/train_options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include <sluice/compute.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/program/explore/schedule_costs.hpp"
#include "runtime/program/explore/schedule_report.hpp"
#include "runtime/program/train/offload_option.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxSamples = TrainOptions::kAllWindows;
constexpr std::uint64_t kMaxSteps = std::uint64_t{1} << 40;
constexpr int kMaxMicroBatches = 1'000'000;
constexpr RealRange kShare = {.low = 0, .high = 1};
constexpr RealRange kBelowOne = {.low = 0, .high = 1, .high_open = true};
constexpr RealRange kNotNegative = {.low = 0, .high = std::numeric_limits<double>::infinity()};

constexpr const char* kAboutTrain =
    R"(Trains a transformer as a pipeline of stages over the ranks of an MPI job (one rank without
mpirun). ranks = pipeline x replicas x tensor. Batches: samples per step = virtual replicas (as many
as replicas, unless told) x micro-batches x micro-batch size; give any two, the last micro-batch may
be smaller. Results depend on neither schedule nor pipeline depth nor replicas nor tensor ranks, to
the last bit, at equal micro-batches, virtual replicas and tensor shards.

  mpirun -n 4 sluice train --data text.txt --pipeline 2 --replicas 2 --save run

Of an option given twice the last one counts; --data is given once.)";

// Marks of options: what a run that goes on from a save, or from a model's weights, does with them.
enum Mark : unsigned {
  kOneRun = 1U << 0,  // of one run, which a resumed run does not take from its save
  kLayout = 1U << 1,  // fits one number of ranks
  kModel = 1U << 2,   // decides on the parameters, and on what is computed from them
  kChosen = 1U << 3,  // of these, what a run may choose whatever weights it starts from
  // Changes the function that is trained, as kModel does: --change has to name it.
  kFunction = 1U << 4,
  kListedLater = 1U << 5,  // not listed by saves of older versions, whose runs had the default
  kSaving = 1U << 6,       // of no effect without --save
};

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// "4-7", or "4" for both.
bool parse_range(std::string_view text, int& first, int& last) {
  const std::size_t dash = text.find('-');
  if (dash != std::string_view::npos) {
    return parse_whole(text.substr(0, dash), first) && parse_whole(text.substr(dash + 1), last);
  }
  return parse_whole(text, first) && parse_whole(text, last);
}

std::string range_text(int first, int last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
}

RotaryScaling parse_scaling(const std::string& text) {
  const std::vector<std::string> parts = parts_of(text);
  RotaryScaling scaling;
  if (text == "none") return scaling;
  bool sound = false;
  if (text.starts_with("linear,") && parts.size() == 2) {
    scaling.kind = RotaryScaling::Kind::kLinear;
    sound = parse_whole(parts[1], scaling.factor);
  } else if (text.starts_with("llama3,") && parts.size() == 5) {
    scaling.kind = RotaryScaling::Kind::kLlama3;
    sound = parse_whole(parts[1], scaling.factor) &&
            parse_whole(parts[2], scaling.low_frequency_factor) &&
            parse_whole(parts[3], scaling.high_frequency_factor) &&
            parse_whole(parts[4], scaling.original_context);
  }
  if (sound) return scaling;
  throw_usage(
      "option --rotary-scaling: '{}'; legal are none, linear,FACTOR and "
      "llama3,FACTOR,LOW,HIGH,CONTEXT, such as llama3,8,1,4,8192",
      text);
}

constexpr std::string_view kUnits = "KMGT";  // of 1024 each

// "20G", "1.5M", "4096"; empty: 0.
std::size_t parse_bytes(const std::string& text) {
  constexpr double kMost = 1e18;
  if (text.empty()) return 0;
  std::string_view number = text;
  const std::size_t unit = kUnits.find(text.back());
  if (unit != std::string_view::npos) number.remove_suffix(1);
  double value = 0;
  const bool sound = parse_whole(number, value);
  if (unit != std::string_view::npos) value = std::ldexp(value, 10 * (static_cast<int>(unit) + 1));
  if (sound && value >= 1 && value <= kMost) return static_cast<std::size_t>(value);
  throw_usage(
      "option --memory: '{}' is no number of bytes from 1; legal are such as 4096, 512M, 1.5G and "
      "20G",
      text);
}

// In the largest unit that divides them.
std::string bytes_text(std::size_t bytes) {
  if (bytes == 0) return "";
  std::size_t unit = 0;
  for (; unit < kUnits.size() && bytes % 1024 == 0; ++unit) bytes /= 1024;
  return fmt::format("{}{}", bytes, unit == 0 ? "" : kUnits.substr(unit - 1, 1));
}

std::vector<int> parse_layers(const std::string& text) {
  std::vector<int> layers;
  for (const std::string& part : parts_of(text)) {
    int first = 0, last = 0;
    if (!parse_range(part, first, last) || first < 0 || last < first ||
        last >= TransformerLimits::kLayers) {
      throw_usage(
          "option --full-layers: '{}' in '{}'; legal are layers from 0 on and ranges, such "
          "as 0,4-7",
          part, text);
    }
    for (int layer = first; layer <= last; ++layer) layers.push_back(layer);
  }
  return layers;
}

std::string text_of(const RotaryScaling& scaling) {
  if (scaling.kind == RotaryScaling::Kind::kLinear) return fmt::format("linear,{}", scaling.factor);
  if (scaling.kind != RotaryScaling::Kind::kLlama3) return "none";
  return fmt::format("llama3,{},{},{},{}", scaling.factor, scaling.low_frequency_factor,
                     scaling.high_frequency_factor, scaling.original_context);
}

std::string text_of(const std::vector<int>& layers) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    parts.push_back(range_text(layers[i], layers[end - 1]));
    i = end;
  }
  return joined(parts, ",");
}

std::vector<std::string> training_schedules() {
  std::vector<std::string> names = schedule_names();
  std::erase(names, "forward-only");
  names.emplace_back("auto");
  return names;
}

void add_model_options(OptionTable& table, TrainOptions& options) {
  TransformerConfig& model = options.model;
  table.heading("Model");
  table
      .add_text("weights", options.weights, "DIR",
                "start from this model, of its shape: a directory of Hugging Face, or a save; the "
                "options below come from it")
      .mark(kOneRun);
  table.mark_from_here(kModel);
  table.add_choice("model", options.architecture,
                   {{"gpt2", TransformerKind::kGpt2},
                    {"llama", TransformerKind::kLlama},
                    {"auto", std::nullopt}},
                   "architecture; auto: that of --weights");
  table.add_integer("layers", model.layers, 1, TransformerLimits::kLayers, "transformer blocks");
  table.add_integer("heads", model.heads, 1, TransformerLimits::kHeads,
                    "attention heads; divide the width, unless head-dim is given");
  table.add_integer("kv-heads", model.kv_heads, 1, TransformerLimits::kHeads,
                    "heads of keys and values (llama); divide the heads; auto: as many as heads",
                    "auto");
  table.add_integer("width", model.width, 1, TransformerLimits::kWidth, "of the residual stream");
  table.add_integer("context", model.context, 1, TransformerLimits::kContext, "tokens of a sample")
      .mark(kChosen);
  table.add_integer("vocabulary", model.vocabulary, 1, TransformerLimits::kVocabulary,
                    "tokens; 256: bytes");
  table.add_integer("mlp-width", model.mlp_width, 1, TransformerLimits::kMlpWidth,
                    "auto: 4 x width (gpt2), 8/3 x width rounded up to 64s (llama)", "auto");
  table.add_real("dropout", model.dropout, kBelowOne, "probability").mark(kChosen);
  table.add_flag("untie", model.tied, "give the head weights of its own", false);
}

void add_llama_options(OptionTable& table, TransformerConfig& model) {
  table.add_integer("positions", model.positions, 1, TransformerLimits::kContext,
                    "the model is made for; gpt2 learns them; auto: as many as context", "auto");
  table.add_real("norm-epsilon", model.norm_epsilon, kPositive, "of all norms");
  table.add_integer("head-dim", model.head_dim, 1, TransformerLimits::kWidth,
                    "width of a head (llama); auto: width / heads", "auto");
  table.add_real("rotary-base", model.rotary_base,
                 {.low = 1, .high = std::numeric_limits<double>::infinity(), .low_open = true},
                 "of rotary positions (llama)");
  table.add_parsed(
      "rotary-scaling", "SCALING",
      "of rotary positions (llama): none, linear,FACTOR or llama3,FACTOR,LOW,HIGH,CONTEXT",
      [&](const std::string& text) { model.rotary_scaling = parse_scaling(text); },
      [&] { return text_of(model.rotary_scaling); });
  table.add_flag("qkv-bias", model.qkv_bias, "of queries, keys and values (llama)");
  table.add_flag("attention-output-bias", model.attention_output_bias, "(llama)");
  table.add_flag("mlp-bias", model.mlp_bias, "(llama)");
  table.add_flag("qk-norm", model.qk_norm, "RMSNorm of each head's queries and keys (llama)");
  table.add_integer("window", model.window, 1, TransformerLimits::kContext,
                    "positions that a query sees, itself the last (llama); auto: all", "auto");
  table.add_parsed(
      "full-layers", "LIST", "blocks that see all positions in spite of window: 0,4-7",
      [&](const std::string& text) { model.full_layers = parse_layers(text); },
      [&] { return text_of(model.full_layers); });
}

void add_computing_options(OptionTable& table, TrainOptions& options) {
  TransformerConfig& model = options.model;
  table.mark_from_here(0);
  table
      .add_choice("precision", options.precision,
                  {{"fp32", MatmulPrecision::kF32},
                   {"tf32", MatmulPrecision::kTf32},
                   {"bf16", MatmulPrecision::kBf16}},
                  "of matmuls' operands; weights and sums stay fp32; tf32: a GPU's fp32 matmuls "
                  "round their operands, a CPU's do not")
      .mark(kFunction);
  table
      .add_choice("stream-precision", model.stream_precision,
                  {{"fp32", DType::kF32}, {"bf16", DType::kBf16}},
                  "of the residual stream, its gradient and the messages between stages; bf16 "
                  "needs --precision bf16")
      .mark(kFunction | kListedLater);
  table.add_parsed(
      "recompute", "KIND[*N][,...]|auto",
      "none, attention or block: what backward computes again instead of keeping it, of all blocks "
      "or of N in a row, such as block*2,attention,none; auto: the least that fits --memory, "
      "beside what --offload takes away; the results are the same",
      [&](const std::string& text) { options.recompute = parse_recompute(text); },
      [&] { return to_string(options.recompute); });
  table
      .add_integer("logit-chunks", model.logit_chunks, 1, TransformerLimits::kLogitChunks,
                   "parts of a micro-batch's rows whose logits are in memory one after the other, "
                   "of multiples of 512; on a GPU results depend on it")
      .mark(kFunction | kListedLater);
  table.add_flag("batch-invariant", model.batch_invariant,
                 "on a CPU: the same results for every --micro-batch-size of a --batch-size, with "
                 "--gradient-order step; always so from --context 256 on, below it costs time");
}

void add_tensor_ranks(OptionTable& table, PipelineOptions::Shape& shape) {
  table
      .add_integer("tensor", shape.tensor, 1, kMostTensorShards,
                   "ranks that share each stage: each computes a part of every layer")
      .mark(kLayout | kListedLater);
  table.add_integer(
      "tensor-shards", shape.tensor_shards, 1, kMostTensorShards,
      "parts of every layer, on which results depend in place of --tensor: that times a power of "
      "two, or any number for one; auto: as many as tensor. A resume without it keeps those of the "
      "save",
      "auto");
  table
      .add_flag("no-sequence-parallel", shape.sequence_parallel,
                "tensor ranks compute norms, sums and dropout of all positions each, not of their "
                "own; changes no bit",
                false)
      .mark(kLayout | kListedLater);
}

// What --schedule auto counts.
void add_costs(OptionTable& table, TrainOptions& options) {
  table
      .add_text("profile", options.profile, "FILE",
                "times for --schedule auto: what a training of this model wrote for --trace")
      .mark(kOneRun);
  table
      .add_text("cluster", options.cluster, "FILE",
                "with --profile: what messages and collectives take, from 'sluice doctor --output'")
      .mark(kOneRun);
}

void add_offload(OptionTable& table, PipelineOptions::Offload& offload) {
  table
      .add_parsed(
          "offload", "WHAT:WHERE",
          "what leaves the device between its uses: none; activations, of which each stage then "
          "keeps half, or with --recompute auto what takes least time; the optimizer's state, on "
          "CPUs; or activations,optimizer; to host (of a GPU, activations), disk=DIR, or "
          "disk-cached=DIR through the page cache; changes no bit",
          [&](const std::string& text) { offload = parse_offload(text); },
          [&] { return text_of(offload); })
      .mark(kLayout | kListedLater);
}

// What ranks compute on.
void add_device_options(OptionTable& table, PipelineOptions& options) {
  PipelineOptions::Devices& devices = options.devices;
  add_devices(table, devices.choices,
              "cpu, cuda, cuda:N or auto; or one a rank of the pipeline, or of the job: cuda,cpu");
  table
      .add_parsed(
          "memory", "SIZE",
          "that a rank may take on its device by the plan: bytes, or with K, M, G or T of 1024, "
          "such as 20G; default: what there is",
          [&](const std::string& text) { devices.memory = parse_bytes(text); },
          [&] { return bytes_text(devices.memory); })
      .mark(kListedLater);
  add_transport(table, devices.transport,
                "between GPUs; auto: NCCL where each rank has a GPU of its own");
  table.add_choice("progress", options.expert.progress_in_actions,
                   {{"operators", true}, {"actions", false}},
                   "between which a CPU's messages advance");
  table.add_flag("all-reduce", devices.all_reduce,
                 "let NCCL sum over replicas in its own order: not depth-invariant");
  table.add_flag("cuda-graphs", devices.cuda_graphs,
                 "on GPUs: record what stages do after step 1, replay it from step 2 on");
}

void add_gradient_order(OptionTable& table, GradientOrder& order) {
  table
      .add_choice(
          "gradient-order", order,
          {{"step", GradientOrder::kStep}, {"micro-batch", GradientOrder::kMicroBatch}},
          "when gradients are added over replicas: once a step, or after each micro-batch, "
          "which takes less memory with --shard gradients or parameters and sends the "
          "bytes once per micro-batch; results depend on it. A resume without it keeps that "
          "of the save")
      .mark(kListedLater);
}

int parse_shard_group(const std::string& text) {
  if (text == "all") return 0;
  if (text == "host") return PipelineOptions::Shape::kWithinHosts;
  int replicas = 0;
  if (parse_whole(text, replicas) && replicas > 0) return replicas;
  throw_usage("option --shard-group: '{}' is not legal; legal are host, all, and numbers from 2",
              text);
}

std::string text_of_shard_group(int replicas) {
  if (replicas == PipelineOptions::Shape::kWithinHosts) return "host";
  return replicas == 0 ? "all" : std::to_string(replicas);
}

// What replicas divide.
void add_shards(OptionTable& table, PipelineOptions::Shape& shape) {
  table
      .add_choice("shard", shape.shard,
                  {{"none", ShardLevel::kNone},
                   {"optimizer", ShardLevel::kOptimizer},
                   {"gradients", ShardLevel::kGradients},
                   {"parameters", ShardLevel::kParameters}},
                  "what replicas divide: optimizer: each keeps the state of a part of the "
                  "parameters and updates it; gradients: each keeps those of that part alone once "
                  "a stage's are summed, on GPUs with --gradient-order micro-batch alone; "
                  "parameters: each has that part of them alone, and "
                  "layers are gathered while they are used; the results are the same")
      .mark(kListedLater);
  table
      .add_choice(
          "shard-gather", shape.shard_gather,
          {{"auto", ShardGather::kAuto}, {"use", ShardGather::kUse}, {"step", ShardGather::kStep}},
          "when --shard parameters gathers: use: each layer before each use; step: all of a "
          "stage once a step, which takes more memory and fewer bytes over the network; "
          "auto: step where that is within --memory, else use")
      .mark(kLayout);
  table
      .add_parsed(
          "shard-group", "host|all|N",
          "of --shard parameters: how many replicas divide a copy of them, from 2 on, a divisor of "
          "--replicas; all: one copy; host: a copy on each host, so that gathers stay there; "
          "gradients and the optimizer's state are divided among all replicas",
          [&](const std::string& text) { shape.shard_group = parse_shard_group(text); },
          [&] { return text_of_shard_group(shape.shard_group); })
      .mark(kLayout | kListedLater);
}

void add_layout_options(OptionTable& table, TrainOptions& options) {
  auto& [shape, order, devices, offload, training, checks, watch, expert] = options.pipeline;
  table.heading("Layout");
  table
      .add_integer("pipeline", shape.pipeline, 1, kMaxInt,
                   "ranks of one pipeline; auto: ranks / replicas / tensor", "auto")
      .mark(kLayout);
  table.add_integer("replicas", shape.replicas, 1, kMaxInt, "pipelines that share each batch");
  table.add_integer(
      "virtual-replicas", shape.virtual_replicas, 1, kMaxInt,
      "parts of each batch, on which results depend in place of --replicas: that times "
      "a power of two, or any number for one replica; auto: as many as replicas. A resume "
      "without it keeps those of the save",
      "auto");
  add_tensor_ranks(table, shape);
  add_shards(table, shape);
  add_gradient_order(table, training.gradient_order);
  add_offload(table, offload);
  add_rank_order(table, shape.rank_order);
  table.add_choice("schedule", order.schedule, training_schedules(),
                   "order of micro-batches; see 'sluice schedule'; auto: searched for this model");
  table
      .add_integer("chunks", order.chunks, 1, kMaxChunks,
                   "stages per rank; auto: 2 for schedules that take them; --schedule auto tries "
                   "several",
                   "auto")
      .mark(kLayout);
  table
      .add_text("schedule-file", options.schedule_file, "PATH",
                "the order from a file instead: Sluice's JSON or PyTorch's CSV")
      .mark(kLayout);
  add_costs(table, options);
  table.add_text("partition", options.partition, "auto|even|N,N,...", "blocks per stage")
      .mark(kLayout);
  table.add_integer("micro-batches", shape.micro_batches, 1, kMaxMicroBatches,
                    "per step and virtual replica; auto: from the next two", "auto");
  table.add_integer("micro-batch-size", shape.micro_batch_size, 1, kMaxInt,
                    "samples; auto: from batch-size and micro-batches, else 1", "auto");
  table.add_integer("batch-size", shape.batch_size, 1, kMaxSamples,
                    "samples per step; auto: from the other two, else at least 4", "auto");
  table.add_integer("threads", devices.threads, 1, ComputeContext::kMostThreads,
                    "per rank; results depend on it");
  add_device_options(table, options.pipeline);
}

void add_training_options(OptionTable& table, TrainOptions& options) {
  PipelineOptions::Training& training = options.pipeline.training;
  table.heading("Training");
  table
      .add_text(
          "data", options.data, "FILE",
          "one text (bytes), or tokens of prepare_tokens.py, nanoGPT or llm.c; required unless "
          "--dry-run")
      .once()
      .mark(kFunction);
  table
      .add_real("validation-share", options.validation_share, kBelowOne,
                "last part of the data, kept for validation")
      .mark(kFunction);
  table.add_integer("steps", options.steps, 1, kMaxSteps, "optimizer steps");
  table
      .add_integer("seed", training.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                   "of initial weights, batches and dropout")
      .mark(kFunction);
  table
      .add_choice("optimizer", training.optimizer.kind,
                  {{"adamw", OptimizerConfig::Kind::kAdamW}, {"sgd", OptimizerConfig::Kind::kSgd}},
                  "update rule")
      .mark(kFunction);
  table
      .add_choice("moment-precision", training.optimizer.moments,
                  {{"fp32", DType::kF32}, {"bf16", DType::kBf16}},
                  "of AdamW's two moments, in memory and in saves; bf16: rounded at random, "
                  "without bias, to half the bytes; SGD's momentum is fp32")
      .mark(kFunction | kListedLater);
  table.add_real("learning-rate", training.learning_rate.peak, kPositive, "peak");
  table.add_integer("warmup", options.warmup, 0, TrainOptions::kAutoWarmup,
                    "steps of linear warmup; auto: 100, at most a tenth of the steps", "", "auto");
  table.add_choice("learning-rate-decay", options.constant_learning_rate,
                   {{"cosine", false}, {"constant", true}}, "after warmup");
  table.add_real("final-learning-rate-share", training.learning_rate.final_share, kShare,
                 "of the peak, at the end of the cosine");
  table.add_real("weight-decay", training.optimizer.weight_decay, kNotNegative,
                 "not on norms and biases");
  table.add_real("beta1", training.optimizer.beta1, kBelowOne, "AdamW");
  table.add_real("beta2", training.optimizer.beta2, kBelowOne, "AdamW");
  table.add_real("epsilon", training.optimizer.epsilon, kPositive, "AdamW");
  table.add_real("momentum", training.optimizer.momentum, kBelowOne, "SGD");
  table.add_real("clip", training.clip, kNotNegative, "global gradient norm; 0: off");
}

void add_output_options(OptionTable& table, TrainOptions& options) {
  table.heading("Running and output");
  table.add_integer("validate-every", options.validate_every, 0, kMaxSteps,
                    "steps; 0: at the end only");
  table.add_integer("validation-samples", options.validation_samples, 1, TrainOptions::kAllWindows,
                    "per validation; auto: a twentieth of the windows trained between two of them, "
                    "32 to 1024 at the end, to 64 between steps; all: the whole validation part",
                    "auto", "all");
  table.add_text("metrics", options.metrics, "FILE", "JSON lines, one a step");
  table.add_text("trace", options.trace, "FILE", "timeline of a step, for Perfetto").mark(kOneRun);
  table
      .add_flag("profile-operators", options.profile_operators,
                "print where the time of the last four steps goes, by operator")
      .mark(kOneRun);
  table.add_integer("check-replicas", options.pipeline.checks.replicas_every, 0, kMaxSteps,
                    "compare replicas every that many steps; 0: never");
  table.add_choice("on-nan", options.pipeline.training.skip_nonfinite,
                   {{"stop", false}, {"skip", true}},
                   "a loss or gradient that is not finite; skip: the step changes nothing");
  table.add_integer("max-skips", options.max_skips, 1, kMaxInt, "steps that may be skipped");
  table.add_flag("dry-run", options.dry_run, "print layout and memory, train nothing")
      .mark(kOneRun);
}

std::vector<std::string> parse_changes(const std::string& text,
                                       const std::vector<std::string>& legal) {
  std::vector<std::string> keys = parts_of(text);
  for (const std::string& key : keys) {
    if (contains(legal, key)) continue;
    throw_usage("option --change: unknown key '{}'; legal are {}", key, joined(legal, ", "));
  }
  return keys;
}

void add_save_options(OptionTable& table, TrainOptions& options) {
  CheckpointOptions& checkpoint = options.checkpoint;
  table.heading("Saving and resuming");
  table.add_text("save", options.save, "DIR",
                 "weights and optimizer state as safetensors in DIR/step-N, at the end, and where "
                 "the job is asked to stop");
  table.mark_from_here(kSaving);
  table.add_integer("save-every", checkpoint.every_steps, 0, kMaxSteps,
                    "steps; 0: at the end only");
  table.add_real("save-minutes", checkpoint.every_minutes, kNotNegative,
                 "save when that many minutes have passed; 0: never");
  table.add_integer("keep", checkpoint.keep, 1, kMaxInt, "newest saves that stay");
  table.add_integer("keep-every", checkpoint.keep_every, 0, kMaxSteps,
                    "saves of steps that are multiples stay as well; 0: none");
  table.add_flag("save-weights-only", checkpoint.weights_only,
                 "no optimizer state: an export, which cannot be resumed");
  table.add_choice("save-precision", checkpoint.precision,
                   {{"fp32", DType::kF32}, {"bf16", DType::kBf16}},
                   "of the model's files; the fp32 values then stand beside the optimizer's state");
  table.add_flag("save-local", checkpoint.local,
                 "DIR is another directory on every host; without it all hosts share DIR");
  table
      .add_flag("overwrite", checkpoint.overwrite,
                "the saves of another run in DIR may be replaced")
      .mark(kOneRun);
  table.mark_from_here(kOneRun);
  table.add_text("resume", options.resume.given, "DIR|DIR/step-N|auto",
                 "go on from a save, in any layout, with its options; auto: from --save DIR where "
                 "it holds saves, else anew");
  table.add_choice("verify", options.resume.verify,
                   {{"full", Verify::kFull}, {"read", Verify::kRead}, {"off", Verify::kOff}},
                   "what is compared with the saved hashes: all files, what is read, or nothing");
  const std::vector<std::string> legal = table.marked(kModel | kFunction);
  table.add_parsed(
      "change", "KEY[,KEY...]",
      fmt::format("options that may differ from those of the save: {}", joined(legal, ", ")),
      [&options, legal](const std::string& text) {
        options.resume.allow = parse_changes(text, legal);
      },
      [&options] { return joined(options.resume.allow, ","); });
}

// The options of `sluice train` with their targets.
struct TrainTable {
  TrainTable() {
    options.pipeline.shape = {.micro_batches = 0, .micro_batch_size = 0};
    options.pipeline.training.optimizer.weight_decay = 0.1F;
    options.pipeline.training.clip = 1;
    table.allow_config_file();
    add_model_options(table, options);
    add_llama_options(table, options.model);
    add_computing_options(table, options);
    add_layout_options(table, options);
    add_training_options(table, options);
    add_output_options(table, options);
    add_save_options(table, options);
    add_watch_options(table, options.pipeline.watch);
  }
  TrainTable(const TrainTable&) = delete;
  TrainTable& operator=(const TrainTable&) = delete;

  TrainOptions options;
  OptionTable table = OptionTable("sluice train [options]", kAboutTrain);
};

using Source = OptionTable::Source;

// Whether the layout of `saved` serves another job than this one.
bool of_other_layout(const TrainTable& train, const SavedRun& saved, int ranks) {
  TrainTable saved_train;
  saved_train.table.lay_under(saved.options, saved.directory.string());
  const PipelineOptions::Shape& before = saved_train.options.pipeline.shape;
  const PipelineOptions::Shape& now = train.options.pipeline.shape;
  const std::int64_t saved_ranks =
      saved.ranks > 0 ? saved.ranks
                      : std::int64_t{before.pipeline} * before.replicas * before.tensor;
  return (saved_ranks > 0 && saved_ranks != ranks) ||
         (train.table.given("pipeline") && now.pipeline != before.pipeline) ||
         (train.table.given("replicas") && now.replicas != before.replicas) ||
         (train.table.given("tensor") && now.tensor != before.tensor);
}

// Whether the run saves where the save lies that it goes on from.
bool saves_in_place(const TrainTable& train, const SavedRun& saved) {
  std::error_code ignored;
  return !train.table.given("save") || fs::equivalent(train.options.save, saved.root, ignored);
}

void take_saved_options(TrainTable& train, const SavedRun& saved, int ranks) {
  const bool other_layout = of_other_layout(train, saved, ranks);
  const bool in_place = saves_in_place(train, saved);
  const bool searched = value_of(saved.options, "schedule") == "auto";
  OptionValues values;
  for (const auto& [name, value] : saved.options) {
    // The metrics of the saved run go on only where its saves do. Beside --schedule auto, 1 was how
    // saves left the chunks open.
    if (train.table.marked(name, other_layout ? kOneRun | kLayout : kOneRun) ||
        (name == "metrics" && !in_place) || (name == "chunks" && value == "1" && searched)) {
      continue;
    }
    values.emplace_back(name, name == "save" && !value.empty() ? saved.root.string() : value);
  }
  // Earlier versions did not list them.
  for (const auto& [name, parts] : {std::pair(kVirtualReplicas.option, saved.virtual_replicas),
                                    {kTensorShards.option, saved.tensor_shards}}) {
    if (value_of(values, name).empty() && parts > 0) {
      values.emplace_back(name, std::to_string(parts));
    }
  }
  train.table.lay_under(values, saved.directory.string());
}

void require_sensible_resume(const TrainTable& train) {
  const std::string& resume = train.options.resume.given;
  if (resume.empty()) {
    for (const char* name : {"change", "verify"}) {
      if (train.table.source_of(name) != Source::kCommandLine) continue;
      throw_usage("option --{} without --resume has no effect; give --resume DIR or auto as well",
                  name);
    }
    return;
  }
  if (resume == "auto" && train.options.save.empty()) {
    throw_usage("option --resume: auto goes on from --save DIR; give --save DIR as well");
  }
  if (resume == "auto" && train.options.checkpoint.weights_only) {
    throw_usage(
        "option --resume: auto with --save-weights-only: such saves cannot be resumed; leave one "
        "of the two out");
  }
  if (train.options.checkpoint.overwrite && !select_saves(resume).one_step) {
    throw_usage(
        "option --overwrite: --resume goes on with the saves; give one of the two, or resume one "
        "step, whose later saves it then replaces");
  }
}

void resolve_resume(TrainTable& train, int ranks) {
  ResumeOptions& resume = train.options.resume;
  require_sensible_resume(train);
  if (resume.given.empty()) return;
  resume.automatic = resume.given == "auto";
  resume.path = resume.automatic ? train.options.save : resume.given;
  resume.from = find_saved_run(resume.path);
  if (resume.from) {
    take_saved_options(train, *resume.from, ranks);
  } else if (!resume.automatic) {
    throw_error(ErrorCode::kWeights,
                "'{}' holds no save; --resume needs a directory that --save wrote", resume.path);
  }
}

// Lays the shape of --weights under the options, unless a save's options lie there.
void resolve_weights(TrainTable& train) {
  const std::string& weights = train.options.weights;
  std::optional<TransformerKind>& architecture = train.options.architecture;
  const bool automatic = !architecture;
  if (train.options.resume.from) {
    if (automatic) {
      const bool llama = value_of(train.options.resume.from->options, "model") == "llama";
      architecture = llama ? TransformerKind::kLlama : TransformerKind::kGpt2;
    }
    return;
  }
  if (weights.empty()) {
    if (!automatic) return;
    throw_usage(
        "option --model: auto takes the architecture from --weights DIR; give that, or "
        "gpt2 or llama");
  }
  TrainTable theirs;
  theirs.options.model = read_model_config(newest_save(weights));
  theirs.options.architecture = theirs.options.model.kind;
  OptionValues values = theirs.table.values();
  std::erase_if(values,
                [&](const auto& value) { return !theirs.table.marked(value.first, kModel); });
  const OptionValues given = train.table.values();
  for (const auto& [name, value] : values) {
    if (!train.table.given(name) || train.table.marked(name, kChosen)) continue;
    const std::string wanted = value_of(given, name);
    if (wanted == value || (name == "model" && automatic)) continue;
    throw_usage("option --{}: {}, but the model in '{}' has {}; leave it out", name, wanted,
                weights, value.empty() ? "none" : value);
  }
  train.table.lay_under(values, weights);
  architecture = theirs.options.architecture;
}

// Options that are given and do nothing.
void require_effect(const TrainTable& train) {
  const OptionValues now = train.table.values(), defaults = TrainTable().table.values();
  const auto given = [&](const std::string& name) {
    const Source source = train.table.source_of(name);
    return source == Source::kCommandLine ||
           (source == Source::kFile && value_of(now, name) != value_of(defaults, name));
  };
  for (const std::string& name : train.table.marked(kSaving)) {
    if (!train.options.save.empty() || !given(name)) continue;
    throw_usage("option --{}: {} without --save DIR saves nowhere; give --save DIR as well", name,
                value_of(now, name));
  }
  const OptimizerConfig& optimizer = train.options.pipeline.training.optimizer;
  if (optimizer.kind != OptimizerConfig::Kind::kAdamW && optimizer.moments != DType::kF32) {
    throw_usage(
        "option --moment-precision: bf16 is for AdamW's moments, but --optimizer is sgd, whose "
        "momentum is fp32; leave one of the two out");
  }
  if (!train.options.pipeline.training.skip_nonfinite && given("max-skips")) {
    throw_usage("option --max-skips: {} without --on-nan skip skips nothing; give it as well",
                train.options.max_skips);
  }
}

// A warmup of a save gives way to --steps of fewer.
void resolve_learning_rate(const OptionTable& table, TrainOptions& options) {
  constexpr std::uint64_t kUsual = 100;
  const bool saved = table.source_of("warmup") == Source::kUnder;
  if (saved && options.warmup > options.steps) options.warmup = TrainOptions::kAutoWarmup;
  LearningRate& rate = options.pipeline.training.learning_rate;
  rate.warmup = options.warmup == TrainOptions::kAutoWarmup ? std::min(kUsual, options.steps / 10)
                                                            : options.warmup;
  if (rate.warmup > options.steps) {
    throw_usage("option --warmup: {} is more than --steps {}; at most {} is legal", rate.warmup,
                options.steps, options.steps);
  }
  rate.steps = options.constant_learning_rate ? 0 : options.steps;
}

// Sets `parts`, the value of names.option, where it says none; returns who chose it. Where holders
// of a source that wins over its own, as of a save's, cannot divide them, there are as many.
// `fits`: whether they can.
Source resolve_parts(const OptionTable& table, const DivisionNames& names, int& parts,
                     const char* holders_option, int holders, const std::function<bool()>& fits) {
  const Source chosen = table.source_of(names.option);
  if (parts == 0 || (!fits() && chosen < table.source_of(holders_option))) {
    parts = holders;
    return table.source_of(holders_option);
  }
  try {
    (void)shares_of(parts, holders, names);
  } catch (const Error& error) {
    throw_usage("option --{}: {}", names.option, error.what());
  }
  return chosen;
}

// Returns who chose the virtual replicas.
Source resolve_replicas(const OptionTable& table, PipelineOptions& options) {
  PipelineOptions::Shape& shape = options.shape;
  const bool lifo = options.order.schedule == "gpipe-lifo";  // virtual replicas mix in its order
  const bool by_micro_batch = options.training.gradient_order == GradientOrder::kMicroBatch;
  const auto fits = [&] {
    return options.devices.all_reduce || lifo || by_micro_batch
               ? shape.virtual_replicas == shape.replicas
               : can_divide(shape.virtual_replicas, shape.replicas);
  };
  const Source chosen = resolve_parts(table, kVirtualReplicas, shape.virtual_replicas, "replicas",
                                      shape.replicas, fits);
  if (!fits()) {
    throw_usage(
        "option {}: its sums depend on the replicas, but --virtual-replicas is {} with --replicas "
        "{}; leave one of the two out",
        lifo             ? "--schedule gpipe-lifo"
        : by_micro_batch ? "--gradient-order micro-batch"
                         : "--all-reduce",
        shape.virtual_replicas, shape.replicas);
  }
  return chosen;
}

// What a save says of shards of the parameters goes where other shards are given.
void yield_to_shards(const OptionTable& table, PipelineOptions::Shape& shape) {
  if (shape.shard == ShardLevel::kParameters) return;
  const Source level = table.source_of("shard");
  if (table.source_of("shard-gather") < level) shape.shard_gather = ShardGather::kAuto;
  if (table.source_of("shard-group") < level) shape.shard_group = 0;
}

void resolve_shards(const OptionTable& table, TrainOptions& options) {
  PipelineOptions::Shape& shape = options.pipeline.shape;
  int& shards = shape.tensor_shards;
  (void)resolve_parts(table, kTensorShards, shards, "tensor", shape.tensor,
                      [&] { return can_divide(shards, shape.tensor); });
  if (shards == 1 || options.model.logit_chunks == 1) return;
  throw_usage(
      "option --logit-chunks: {} with --tensor {} --tensor-shards {}, whose logits are parts of "
      "the vocabulary already; legal is 1, or one shard",
      options.model.logit_chunks, shape.tensor, shards);
}

// Where all three numbers of the batch are given, and one of them, or the virtual replicas
// (`replicas`), by a source that wins over that of another, the number of the lowest source is
// computed anew. A schedule from a file keeps its micro-batches.
void yield_to_higher_source(const OptionTable& table, Source replicas, bool fixed_micro_batches,
                            BatchShape& batch) {
  const std::array numbers = {std::pair("micro-batches", &batch.micro_batches),
                              std::pair("batch-size", &batch.batch_size),
                              std::pair("micro-batch-size", &batch.micro_batch_size)};
  Source highest = replicas;
  for (const auto& [name, value] : numbers) {
    if (!table.given(name)) return;
    highest = std::max(highest, table.source_of(name));
  }
  Source lowest = highest;
  std::int64_t* yields = nullptr;
  for (const auto& [name, value] : numbers) {
    if (table.source_of(name) >= lowest || (fixed_micro_batches && value == &batch.micro_batches)) {
      continue;
    }
    lowest = table.source_of(name);
    yields = value;
  }
  if (yields != nullptr) *yields = 0;
}

// The file fixes schedule, chunks, micro-batches and pipeline. A saved configuration names them
// all, so only a source that wins over the file's can contradict the file.
void resolve_schedule(const OptionTable& table, TrainOptions& options) {
  auto& [shape, order, devices, offload, training, checks, watch, expert] = options.pipeline;
  const std::string& file = options.schedule_file;
  for (const char* name : {"profile", "cluster"}) {
    if (!table.given(name) || (file.empty() && order.schedule == "auto")) continue;
    throw_usage(
        "option --{}: it has costs for --schedule auto, and the order is {}; give that, or "
        "leave it out",
        name, file.empty() ? order.schedule : "that of --schedule-file");
  }
  if (options.profile.empty() && !options.cluster.empty()) {
    throw_usage("option --cluster: it has no times of layers; give --profile as well");
  }
  if (file.empty()) {
    if (order.schedule != "auto" || options.partition == "auto") return;
    throw_usage(
        "option --partition: '{}', but --schedule auto places the layers itself; legal is auto",
        options.partition);
  }
  const Source named = table.source_of("schedule-file");
  for (const char* name : {"schedule", "chunks"}) {
    const Source source = table.source_of(name);
    if (source < named || (source == named && source != Source::kCommandLine)) continue;
    if (source == named) {
      throw_usage("option --{}: --schedule-file determines it; give one of the two", name);
    }
    options.schedule_file.clear();
    return;
  }
  auto [loaded, source, made_for] = load_schedule(file);
  options.made_for = std::move(made_for);
  const auto take = [&](const char* name, int& value, int from_file) {
    const bool binding = table.given(name) && table.source_of(name) >= named;
    if (binding && value != 0 && value != from_file) {
      throw_usage("option --{}: {}, but the schedule of '{}' is for {}; legal is {}", name, value,
                  file, from_file, from_file);
    }
    value = from_file;
  };
  const int shares = shape.virtual_replicas / shape.replicas;
  if (loaded.micro_batches % shares != 0) {
    throw_usage(
        "option --schedule-file: '{}' is for {} micro-batches, but each replica computes those of "
        "{} virtual replicas; legal is a multiple of {}",
        file, loaded.micro_batches, shares, shares);
  }
  take("micro-batches", shape.micro_batches, loaded.micro_batches / shares);
  take("pipeline", shape.pipeline, loaded.placement.ranks());
  if (loaded.forward_only) {
    throw_usage("option --schedule-file: '{}' has no backward actions, so it cannot train", file);
  }
  order.given = std::make_shared<const Schedule>(std::move(loaded));
}

void resolve_batch(const OptionTable& table, Source replicas, PipelineOptions& options) {
  PipelineOptions::Shape& shape = options.shape;
  BatchShape batch = {shape.batch_size, shape.micro_batch_size, shape.micro_batches,
                      shape.virtual_replicas};
  if (shape.virtual_replicas != shape.replicas) batch.name = "virtual replicas";
  yield_to_higher_source(table, replicas, options.order.given != nullptr, batch);
  const int shares = shape.virtual_replicas / shape.replicas;
  batch = complete_batch_shape(batch, std::max(kMaxMicroBatches / shares, 1));
  shape.batch_size = batch.batch_size;
  shape.micro_batch_size = batch.micro_batch_size;
  shape.micro_batches = static_cast<int>(batch.micro_batches);
}

// Nothing may be written over the data, or by two writers at once. Paths of other kinds than files
// and directories, such as /dev/null, may repeat.
void require_distinct_files(const TrainOptions& options) {
  std::vector<std::pair<const char*, fs::path>> seen;  // option, path
  for (const auto& [option, name] : {std::pair<const char*, std::string>{"data", options.data},
                                     {"weights", options.weights},
                                     {"schedule-file", options.schedule_file},
                                     {"profile", options.profile},
                                     {"cluster", options.cluster},
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
    if (error) continue;  // opening the file will report the cause
    for (const auto& [other, other_path] : seen) {
      if (path != other_path && !fs::equivalent(path, other_path, error)) continue;
      throw_usage("option --{}: --{} names '{}' as well; give each a file of its own", option,
                  other, name);
    }
    seen.emplace_back(option, path);
  }
}

constexpr RealRange kWatchSeconds = {.low = 1, .high = 1e6};
constexpr int kMostPort = 65535;

// "46300-46399", "46300" or nothing.
void take_ports(const std::string& ports, PipelineOptions::Watch& watch) {
  int first = 0, last = 0;
  if (!ports.empty() &&
      (!parse_range(ports, first, last) || first < 1 || last < first || last > kMostPort)) {
    throw_usage(
        "option --watchdog-ports: '{}' is no range of ports; legal is FIRST-LAST, from 1 "
        "to {}, such as 46300-46399",
        ports, kMostPort);
  }
  watch.first_port = first;
  watch.last_port = last;
}

std::string ports_of(const PipelineOptions::Watch& watch) {
  return watch.first_port == 0 ? "" : range_text(watch.first_port, watch.last_port);
}

}  // namespace

PipelineOptions program_pipeline() {
  PipelineOptions options;
  options.devices.choices = {{.kind = DeviceChoice::Kind::kAuto}};
  options.watch = {.on = true, .ends_process = true};
  return options;
}

void add_watch_options(OptionTable& table, PipelineOptions::Watch& watch) {
  table.heading("When it hangs");
  table.add_choice("watchdog", watch.on, {{"on", true}, {"off", false}},
                   "each rank tells the others what it does; a rank that stops or dies is named");
  table.add_real("timeout", watch.timeout, kWatchSeconds,
                 "seconds without a sign of life, or without progress of any rank, that end the "
                 "job; auto: 30, or 10 of the slowest recent step; 300 before step 3",
                 "auto");
  table.add_real("action-timeout", watch.action_timeout, kWatchSeconds,
                 "seconds that one action, save or batch may take; none: no limit", "none");
  table.add_parsed(
      "watchdog-ports", "FIRST-LAST", "TCP ports that ranks listen on at the start; default: any",
      [&](const std::string& text) { take_ports(text, watch); }, [&] { return ports_of(watch); });
}

void add_devices(OptionTable& table, std::vector<DeviceChoice>& choices, const std::string& help) {
  table.add_parsed(
      "device", "LIST", help, [&](const std::string& text) { choices = parse_devices(text); },
      [&] { return to_string(choices); });
}

void add_rank_order(OptionTable& table, RankOrder& order) {
  table.add_choice("rank-order", order,
                   {{"auto", RankOrder::kAuto},
                    {"pipeline-first", RankOrder::kPipelineFirst},
                    {"replica-first", RankOrder::kReplicaFirst}},
                   "which ranks are neighbours; auto: by hosts");
}

void add_transport(OptionTable& table, TransportChoice& transport, const std::string& help) {
  table.add_choice("transport", transport,
                   {{"auto", TransportChoice::kAuto},
                    {"mpi", TransportChoice::kMpi},
                    {"nccl", TransportChoice::kNccl}},
                   help);
}

TrainOptions parse_train_options(const std::vector<std::string>& arguments, int ranks) {
  TrainTable train;
  OptionTable& table = train.table;
  TrainOptions& options = train.options;
  table.parse(arguments);
  if (table.help_wanted()) {
    options.help = table.help();
    return std::move(options);
  }
  resolve_resume(train, ranks);
  resolve_weights(train);
  options.model.kind = *options.architecture;
  const bool bf16 = options.precision == MatmulPrecision::kBf16;
  options.model.precision = bf16 ? DType::kBf16 : DType::kF32;
  take_recompute(options.recompute, options.model);
  if (options.recompute.automatic && options.pipeline.devices.memory == 0) {
    throw_usage("option --recompute: auto takes the least that fits; give --memory SIZE as well");
  }
  yield_to_shards(table, options.pipeline.shape);
  options.pipeline.devices.tf32 = options.precision == MatmulPrecision::kTf32;
  resolve_learning_rate(table, options);
  validate(options.model);
  const Source replicas = resolve_replicas(table, options.pipeline);
  resolve_shards(table, options);
  resolve_schedule(table, options);
  resolve_batch(table, replicas, options.pipeline);
  require_effect(train);
  if (options.data.empty() && !options.dry_run) {
    throw_usage("option --data is missing: give a text or token file to train on (or --dry-run)");
  }
  require_distinct_files(options);
  if (options.profile_operators && options.pipeline.devices.cuda_graphs) {
    throw_usage(
        "option --profile-operators: --cuda-graphs replays recorded calls, which cannot be "
        "measured one by one; leave one of the two out");
  }
  options.pipeline.checks.trace = !options.trace.empty();
  options.pipeline.expert.configuration = table.values();
  options.pipeline.expert.save_copy = !options.save.empty();
  options.pipeline.watch.directory = options.save;
  options.checkpoint.directory = options.save;
  options.checkpoint.options = table.values();
  std::erase_if(options.checkpoint.options,
                [&](const auto& option) { return table.marked(option.first, kOneRun); });
  if (options.resume.from) (void)changes_since(*options.resume.from, options);
  return std::move(options);
}

std::string changes_since(const SavedRun& saved, const TrainOptions& options) {
  TrainTable before;
  before.table.lay_under(saved.options, saved.directory.string());
  std::vector<std::string> changes, refused, keys;
  for (const auto& [name, value] : before.table.values()) {
    const bool saved_by_name = before.table.given(name) || before.table.marked(name, kListedLater);
    const std::string now = value_of(options.checkpoint.options, name);
    if (before.table.marked(name, kOneRun) || !saved_by_name || now == value) continue;
    changes.push_back(fmt::format("{} {} -> {}", name, value.empty() ? "none" : value,
                                  now.empty() ? "none" : now));
    // A path is no function; data_changes_since() compares the data.
    if (name == "data" || !before.table.marked(name, kModel | kFunction) ||
        contains(options.resume.allow, name)) {
      continue;
    }
    refused.push_back(changes.back());
    keys.push_back(name);
  }
  if (!refused.empty()) {
    throw_usage(
        "option --resume: {} since '{}' would train another function; leave the options as they "
        "were saved, or give --change {}",
        joined(refused, ", "), saved.directory.string(), joined(keys, ","));
  }
  return joined(changes, ", ");
}

std::string bits_change_since(const SavedRun& saved, const TrainOptions& options) {
  const PipelineOptions::Shape& now = options.pipeline.shape;
  std::vector<std::string> others;
  const auto compare = [&](int was, int is, const DivisionNames& names) {
    if (was == 0 || was == is) return;
    others.push_back(fmt::format("{} {}, the save has {}", is, names.parts, was));
  };
  compare(saved.virtual_replicas, now.virtual_replicas, kVirtualReplicas);
  compare(saved.tensor_shards, now.tensor_shards, kTensorShards);
  if (const GradientOrder is = options.pipeline.training.gradient_order;
      is != saved.gradient_order) {
    others.push_back(fmt::format("gradients in the order {}, those of the save in the order {}",
                                 name_of(is), name_of(saved.gradient_order)));
  } else if (is == GradientOrder::kMicroBatch) {
    const std::string size = fmt::format("{}", now.micro_batch_size);
    for (const auto& [name, value] : saved.options) {
      if (name != "micro-batch-size" || value == size) continue;
      others.push_back(fmt::format("micro-batches of {}, the save has {}", size, value));
    }
  }
  if (others.empty()) return "";
  return fmt::format("other bits from step {} on: {}", saved.step + 1, joined(others, "; "));
}

std::string rate_jump_since(const SavedRun& saved, const TrainOptions& options) {
  constexpr double kJump = 1.1;
  if (value_of(saved.options, "steps").empty()) return "";
  TrainTable before;
  before.table.lay_under(saved.options, saved.directory.string());
  resolve_learning_rate(before.table, before.options);
  const std::uint64_t next = saved.step + 1;
  const double was = before.options.pipeline.training.learning_rate.at(next);
  const double is = options.pipeline.training.learning_rate.at(next);
  if (before.options.steps == options.steps || std::max(was, is) <= kJump * std::min(was, is)) {
    return "";
  }
  return fmt::format(
      "--steps {0} takes the learning rate of step {1} from {2:.3g} to {3:.3g}; "
      "--learning-rate-decay constant --warmup 0 --learning-rate {2:.3g} keeps it",
      options.steps, next, was, is);
}

std::string data_changes_since(const SavedRun& saved, const TrainOptions& options,
                               const OptionValues& now) {
  const std::string change = data_difference(saved.data, now);
  if (!change.empty() && !contains(options.resume.allow, "data")) {
    throw_usage(
        "option --data: '{}' is not the data of '{}': {}; give the same data, or --change data",
        options.data, saved.directory.string(), change);
  }
  return change;
}

std::string describe_configuration(const OptionValues& options) {
  constexpr std::size_t kWidth = 100;
  std::string text = "Configuration";
  std::size_t column = text.size();
  for (const auto& [name, value] : options) {
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

}  // namespace sluice
