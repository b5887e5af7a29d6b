// Costs of actions, messages and activations: the options that `sluice schedule`, its `compare` and
// `auto` share, and the input of simulate() that follows from them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

#include "runtime/options/option_table.hpp"

namespace sluice {

// What one number of a list refers to.
enum class CostsOf {
  kStage,      // one chunk: X for all stages, or one per stage
  kRankShare,  // one p-th of the model: X for all, or p of them in the model's order
};

// Call add_options(), parse the table, then resolve(), then the rest. An object keeps its address
// as long as the table is used.
class Costs {
 public:
  // The options stand under the heading "Costs".
  void add_options(OptionTable& table, CostsOf scope);
  // Reads the profile and the cluster file where they are given. Throws Error(kUsage) naming the
  // option, Error(kData) naming the file.
  void resolve(const OptionTable& table, CostsOf scope);

  // With a cluster file, --ranks that are not given become its pipeline's. Throws Error(kUsage)
  // where they are given and differ.
  void resolve_ranks(const OptionTable& table, int& ranks) const;

  // For a pipeline of `ranks` ranks that cuts the model into `stages`. Throws Error(kUsage) for
  // lists of another length, and where `ranks` are not those of the cluster file.
  [[nodiscard]] SimulationTimes times(int ranks, int stages) const;

  // Most bytes a rank may hold; nothing where no bytes are given.
  [[nodiscard]] std::optional<std::int64_t> memory_limit() const { return memory_limit_; }
  // --memory-limit where no bytes are given: micro-batches in flight on a rank, each chunk counting
  // as its share of one.
  [[nodiscard]] std::optional<double> in_flight_limit() const { return in_flight_limit_; }
  // The profile with the assumptions about its times, and the cluster file; empty: neither.
  [[nodiscard]] const std::string& source() const { return source_; }

 private:
  // Options that take one number, or one per piece of the model; bytes from kOutput on.
  enum List : std::size_t {
    kForward,
    kBackwardInput,
    kBackwardWeight,
    kReduce,
    kOutput,
    kOutputGradient,
    kUntilInput,
    kUntilWeight,
    kResident,
    kReduced,
    kLists
  };
  static constexpr std::array<const char*, kLists> kNames = {
      "forward-time",     "backward-input-time",     "backward-weight-time",
      "reduce-time",      "message-bytes",           "gradient-message-bytes",
      "activation-bytes", "weight-activation-bytes", "resident-bytes",
      "reduce-bytes"};

  void add_list(OptionTable& table, List list, const std::string& help);
  void read_memory_limit();
  void read_profile(const OptionTable& table);
  void use_cluster(const OptionTable& table);
  void require_cluster_of(int ranks) const;
  [[nodiscard]] SimulationTimes of_pieces(int pieces) const;

  // Targets of the options. Empty texts: not given.
  std::array<std::string, kLists> texts_ = {"1", "1", "1", "0"};
  std::string overlap_ = "sum", links_, limit_, profile_, cluster_;
  double input_share_ = 0.5;
  SimulationTimes common_;  // all but stages and bytes
  // Set by resolve().
  CostsOf scope_ = CostsOf::kStage;
  std::array<std::vector<double>, kLists> values_;
  bool has_bytes_ = false;
  std::vector<StageTimes> measured_;  // [stage of the measured run]; empty: none
  std::optional<int> cluster_ranks_;
  std::optional<std::int64_t> memory_limit_;
  std::optional<double> in_flight_limit_;
  std::string source_;
};

}  // namespace sluice
