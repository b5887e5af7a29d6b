// The command line and `--config FILE` of `sluice train`, resolved and checked.
//
// A configuration file has one `key = value` a line with the long option names as keys; '#' starts
// a comment. The command line wins. With --resume the options of the save lie below both. Every
// check that needs no data and no MPI happens here; it throws Error(kUsage), which names the
// option, its value and what would be legal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/transformer.hpp>

#include "runtime/process/process.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/recompute_choice.hpp"
#include "runtime/program/train/saved_run.hpp"
#include "runtime/report/job_gpus.hpp"

namespace sluice {

// The pipeline of a command before its options: on the devices there are, and with a watchdog that
// ends the job.
[[nodiscard]] PipelineOptions program_pipeline();

struct ResumeOptions {
  std::string given;               // --resume
  std::string path;                // empty: no --resume; --resume auto: of --save
  bool automatic = false;          // --resume auto
  Verify verify = Verify::kFull;   // before values are read
  std::vector<std::string> allow;  // --change: keys that may change what the model computes
  std::optional<SavedRun> from;    // nothing: the run starts anew
};

struct TrainOptions {
  // Values of validation_samples.
  static constexpr std::int64_t kSomeWindows = 0;  // as many as the training justifies
  static constexpr std::int64_t kAllWindows = std::int64_t{1} << 40;
  // Of warmup: 100 steps, at most a tenth of all.
  static constexpr std::uint64_t kAutoWarmup = std::uint64_t{1} << 40;

  TransformerConfig model;
  // Of `model` in two options; no architecture: that of `weights`.
  std::optional<TransformerKind> architecture = TransformerKind::kGpt2;
  MatmulPrecision precision = MatmulPrecision::kF32;
  // In `model`, unless it is auto, which the trainer resolves.
  RecomputeOption recompute;
  std::string weights;  // the model that the run starts from; of no effect where it goes on
  // The batch is complete. Order::given: what --schedule-file holds. Checks::configuration: every
  // option with its value, defaults included, in the order of the help. The trainer sets
  // Training::evaluations, the order of --schedule auto, and CheckpointOptions::data and model.
  PipelineOptions pipeline = program_pipeline();
  std::string schedule_file;
  std::optional<MadeFor> made_for;  // what schedule_file says of its search
  std::string profile, cluster;     // files of costs for --schedule auto; cluster only with profile
  std::string partition = "auto";
  std::string data;
  double validation_share = 0.1;
  std::uint64_t steps = 2000;
  std::uint64_t warmup = kAutoWarmup;   // as given; Training::learning_rate has the number
  bool constant_learning_rate = false;  // after warmup
  std::uint64_t validate_every = 0;     // 0: at the end only
  std::int64_t validation_samples = kSomeWindows;
  bool profile_operators = false;
  std::string metrics, trace, save;
  CheckpointOptions checkpoint;
  ResumeOptions resume;
  int max_skips = 10;  // steps whose loss is not finite, where these are skipped
  bool dry_run = false;
  std::string help;  // not empty: --help was given, and nothing else is set
};

// Options that other commands with ranks have as well.
void add_rank_order(OptionTable& table, RankOrder& order);
void add_devices(OptionTable& table, std::vector<DeviceChoice>& choices, const std::string& help);
void add_transport(OptionTable& table, TransportChoice& transport, const std::string& help);
void add_watch_options(OptionTable& table, PipelineOptions::Watch& watch);

// `ranks`: of the job. Where a save of other ranks is resumed, its layout is not taken.
// Error(kWeights) where --resume names no save.
[[nodiscard]] TrainOptions parse_train_options(const std::vector<std::string>& arguments,
                                               int ranks = launched_size());

// "learning-rate 0.001 -> 0.1, ...": how `options` differ from those of the save. Empty where
// nothing does. Throws Error(kUsage) where an option that changes what the model computes does, and
// --change does not name it.
[[nodiscard]] std::string changes_since(const SavedRun& saved, const TrainOptions& options);
// The same for the data, whose key is "data". `now`: data_identity().
[[nodiscard]] std::string data_changes_since(const SavedRun& saved, const TrainOptions& options,
                                             const OptionValues& now);
// A sentence where the virtual replicas or shards are others than the save's, as its bits are then;
// else empty.
[[nodiscard]] std::string bits_change_since(const SavedRun& saved, const TrainOptions& options);
// A sentence on the learning rate, and how to keep it, where other --steps than those of the save
// make it jump in the next step; else empty.
[[nodiscard]] std::string rate_jump_since(const SavedRun& saved, const TrainOptions& options);

// "Configuration  model gpt2  layers 4 ...", in lines of at most 100 columns; options without a
// value are left out.
[[nodiscard]] std::string describe_configuration(const OptionValues& options);

}  // namespace sluice
