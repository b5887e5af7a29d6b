// Options: the command line and `--config FILE` of the program, resolved and checked.
//
// A configuration file has one `key = value` a line with the long option names as keys ('#'
// comments); the command line wins. Unknown keys and options are refused by name. Every check that
// needs no data and no MPI happens here, as Error(kUsage) naming the option, what it was and what
// would be legal.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/parameter.hpp>
#include <sluice/schedule.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/topology.hpp"

namespace sluice {

struct TrainOptions {
  TransformerConfig model;  // --model --layers --heads --kv-heads --width --context --vocabulary
                            // --mlp-width --dropout --untie --precision --recompute
  std::string data;         // --data FILE
  double validation_share = 0.1;
  int pipeline = 0;  // --pipeline P; 0: all ranks / replicas
  int replicas = 1;  // --replicas D
  RankOrder rank_order = RankOrder::kPipelineFirst;
  std::string schedule = "1f1b";
  int chunks = 1;
  std::string schedule_file;                        // --schedule-file PATH, in place of those two
  std::shared_ptr<const Schedule> order = nullptr;  // what it holds
  std::string partition = "auto";
  int micro_batches = 0;  // 0: from the other two
  std::int64_t micro_batch_size = 0;
  std::int64_t batch_size = 0;  // samples per step over all replicas
  std::uint64_t steps = 0;
  std::uint64_t seed = 1;
  int threads = 1;
  std::vector<DeviceChoice> devices = {{DeviceChoice::Kind::kAuto}};  // --device LIST
  TransportChoice transport = TransportChoice::kAuto;
  bool all_reduce = false;
  bool cuda_graphs = false;
  bool tf32 = false;                    // --precision tf32
  OptimizerConfig optimizer;            // --optimizer --beta1 --beta2 --weight-decay --momentum
  LearningRate learning_rate;           // --learning-rate --warmup --final-learning-rate-share
  double clip = 1;                      // 0: off
  std::uint64_t validate_every = 0;     // 0: at the end only
  std::int64_t validation_samples = 0;  // 0: the whole split
  std::string resume;                   // --resume DIR
  bool dry_run = false;
  std::uint64_t check_replicas = 0;
  std::string metrics, trace, save;
  std::uint64_t save_every = 0;
};

// Fills micro_batches, micro_batch_size and batch_size from each other:
// batch_size = replicas * micro_batches * micro_batch_size where it divides; a given batch_size may
// leave a smaller last micro-batch.
struct ParsedTrain {
  TrainOptions options;
  bool help = false;
  std::string help_text;
  // Every option with its value, defaults included, in the order of the help: printed at start,
  // saved beside weights, compared between ranks.
  std::vector<std::pair<std::string, std::string>> resolved;
};
[[nodiscard]] ParsedTrain parse_train_options(const std::vector<std::string>& arguments);

// "Configuration  model gpt2  layers 4 ...", in lines of at most 100 columns; what has no value is
// left out.
[[nodiscard]] std::string describe_configuration(
    const std::vector<std::pair<std::string, std::string>>& resolved);
// The lines of a configuration file that gives `resolved` again.
[[nodiscard]] std::string to_config_text(
    const std::vector<std::pair<std::string, std::string>>& resolved);

}  // namespace sluice
