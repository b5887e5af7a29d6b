// `sluice evaluate`: the mean loss of saved weights over the validation part of a file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include <sluice/checkpoint.hpp>
#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"
#include "runtime/report/metrics.hpp"
#include "runtime/tokens/tokenizer_file.hpp"
#include "runtime/train/saved_run.hpp"
#include "runtime/train/train_options.hpp"
#include "runtime/train/validation.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutEvaluate =
    "Prints the mean loss of what 'sluice train --save DIR' wrote over the validation part of a\n"
    "file, as a pipeline over the ranks of an MPI job, or alone. It does not depend on the number\n"
    "of ranks. Without --data and --validation-share these are the training's.\n"
    "\n"
    "  sluice evaluate --weights run";

struct EvaluateOptions {
  std::string weights, data;
  double share = 0;
  bool share_given = false;
  std::int64_t samples = 0, micro_batch_size = 1;
  int pipeline = 0, threads = 1;
  std::string device = "auto", watchdog_ports;
  PipelineOptions::Watch watch = program_watch();
};

OptionTable make_table(EvaluateOptions& options) {
  OptionTable table("sluice evaluate --weights DIR [options]", kAboutEvaluate);
  table.add_text("weights", options.weights, "DIR",
                 "what 'sluice train --save' wrote, or one step of it; required");
  table.add_text("data", options.data, "FILE", "text or tokens; default: the training's");
  table.take_once("data");
  table.add_real("validation-share", options.share, {.low = 0, .high = 1, .high_open = true},
                 "last part of the data; default: the training's");
  table.add_integer("validation-samples", options.samples, 1,
                    std::numeric_limits<std::int64_t>::max(), "windows of it", "all");
  table.add_integer("micro-batch-size", options.micro_batch_size, 1, kMaxInt, "samples");
  table.add_integer("pipeline", options.pipeline, 1, kMaxInt, "ranks; auto: all", "auto");
  table.add_integer("threads", options.threads, 1, ComputeContext::kMostThreads, "per rank");
  table.add_text("device", options.device, "LIST", "as of 'sluice train'");
  add_watch_options(table, options.watch, options.watchdog_ports);
  return table;
}

// A line where `file`, which the training read, holds something else now; empty where it does not.
std::string change_since(const SaveState& saved, const TokenFile& file) {
  const std::string path = file.path().string();
  const auto trained_on = [&](const auto& option) {
    return option.first == "data" && option.second == path;
  };
  if (std::none_of(saved.options.begin(), saved.options.end(), trained_on)) return "";
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
  PipelineOptions pipeline_options;
  pipeline_options.shape = {.pipeline = options.pipeline,
                            .micro_batch_size = options.micro_batch_size};
  pipeline_options.order.schedule = "forward-only";
  pipeline_options.devices.threads = options.threads;
  pipeline_options.devices.choices = parse_devices(options.device);
  pipeline_options.training.inference = true;
  pipeline_options.watch = options.watch;
  const std::int64_t part = validation_part(options.micro_batch_size, /*replicas=*/1);
  pipeline_options.training.evaluations = validation_sizes(samples, part);
  Pipeline pipeline(world, pipeline_options, Transformer(model), *source);
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

int evaluate_command(int argc, char** argv) {
  EvaluateOptions options;
  OptionTable table = make_table(options);
  const std::vector<std::string> arguments(argv, argv + argc);
  return run_command(
      "evaluate", argc, argv,
      [&] {
        table.parse(arguments);
        if (table.help_wanted()) return table.help();
        take_ports(options.watchdog_ports, options.watch);
        if (options.weights.empty()) {
          throw_usage(
              "option --weights is missing: give a directory that 'sluice train --save' wrote");
        }
        options.share_given = table.given("validation-share");
        return std::string();
      },
      [&](Communicator& world) {
        const PlaceSignals place;
        with_newest_save(options.weights, world, [&](const std::filesystem::path& save) {
          evaluate(save, options, world);
        });
        require_stdout();
      });
}

}  // namespace sluice
