// The command line and `--config FILE` of `sluice train`, resolved and checked.
//
// A configuration file has one `key = value` a line with the long option names as keys; '#' starts
// a comment. The command line wins. Every check that needs no data and no MPI happens here; it
// throws Error(kUsage), which names the option, its value and what would be legal.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/transformer.hpp>

#include "runtime/options/option_table.hpp"

namespace sluice {

using OptionValues = std::vector<std::pair<std::string, std::string>>;  // name, value

struct TrainOptions {
  TransformerConfig model;
  // The batch is complete. Order::given: what --schedule-file holds. Checks::configuration: every
  // option with its value, defaults included, in the order of the help. The trainer sets
  // Training::evaluations and the order of --schedule auto.
  PipelineOptions pipeline = {
      .shape = {.micro_batches = 0, .micro_batch_size = 0},
      .training = {
          .optimizer = {.weight_decay = 0.1F}, .learning_rate = {.warmup = 100}, .clip = 1}};
  std::string schedule_file;
  std::string partition = "auto";
  std::string data;
  double validation_share = 0.1;
  std::uint64_t steps = 2000;
  std::uint64_t validate_every = 0;     // 0: at the end only
  std::int64_t validation_samples = 0;  // 0: the whole split
  std::string resume, metrics, trace, save;
  std::uint64_t save_every = 0;
  bool dry_run = false;
  std::string help;  // not empty: --help was given, and nothing else is set
};

// --rank-order and --transport, which 'sluice doctor' has as well.
void add_rank_order(OptionTable& table, RankOrder& order);
void add_transport(OptionTable& table, TransportChoice& transport, const std::string& help);

[[nodiscard]] TrainOptions parse_train_options(const std::vector<std::string>& arguments);

// "Configuration  model gpt2  layers 4 ...", in lines of at most 100 columns; options without a
// value are left out.
[[nodiscard]] std::string describe_configuration(const OptionValues& options);
// The lines of a configuration file that gives `options` again.
[[nodiscard]] std::string to_config_text(const OptionValues& options);

}  // namespace sluice
