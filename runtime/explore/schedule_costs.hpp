// What actions, messages and activations cost: the options that `sluice schedule`, its `compare`
// and `auto` share, and what simulate() takes made from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

#include "runtime/options/option_table.hpp"

namespace sluice {

// Texts hold one number or a list with commas; empty: not given. Bytes are whole, also as 1.5e9.
struct CostOptions {
  std::string forward = "1", backward_input = "1", backward_weight = "1";
  std::string overlap = "sum";
  double message = 0, bandwidth = 0;
  int ranks_per_node = 0;
  double node_message = 0, node_bandwidth = 0;
  std::string links;
  std::string message_bytes, gradient_message_bytes;
  std::string activation_bytes, weight_activation_bytes, resident_bytes;
  std::string reduce = "0", reduce_bytes;
  double reduce_bandwidth = 0;
  bool reduce_overlap = false;
  std::string memory_limit;
  std::string profile;
  double input_share = 0.5;
};

// What the numbers are of.
enum class CostsOf {
  kStage,      // one chunk: X for all stages alike, or one per stage
  kRankShare,  // one p-th of the model: X for all alike, or p of them in the model's order
};

// The options stand under the heading "Costs". `options` outlives the table.
void add_cost_options(OptionTable& table, CostOptions& options, CostsOf scope);

class Costs {
 public:
  // Reads the profile where there is one. Throws Error(kUsage) naming the option, Error(kData)
  // naming the profile.
  Costs(const CostOptions& options, const OptionTable& table, CostsOf scope);

  // For a pipeline of `ranks` ranks that cuts the model into `stages`. Throws Error(kUsage) for
  // lists of another length.
  [[nodiscard]] SimulationTimes times(int ranks, int stages) const;

  // Most bytes a rank may hold; nothing where no bytes are given.
  [[nodiscard]] std::optional<std::int64_t> memory_limit() const { return memory_limit_; }
  // What the same option says where none are: micro-batches in flight on a rank, each chunk
  // counting as its share of one.
  [[nodiscard]] std::optional<double> in_flight_limit() const { return in_flight_limit_; }
  // Where measured times come from and what was assumed about them; empty: nothing measured.
  [[nodiscard]] const std::string& source() const { return source_; }

 private:
  // Values of one option, one or one per piece of the model.
  struct List {
    std::string option;
    std::vector<double> values;
  };

  void read_memory_limit(const std::string& text);
  void read_profile(const CostOptions& options, const OptionTable& table);
  [[nodiscard]] SimulationTimes of_pieces(int pieces) const;

  CostsOf scope_;
  SimulationTimes common_;  // all but stages and bytes
  List forward_, backward_input_, backward_weight_, reduce_;
  List output_, output_gradient_, until_input_, until_weight_, resident_, reduced_;
  bool has_bytes_ = false;
  std::vector<StageTimes> measured_;  // [stage of the measured run]; empty: none
  std::optional<std::int64_t> memory_limit_;
  std::optional<double> in_flight_limit_;
  std::string source_;
};

}  // namespace sluice
