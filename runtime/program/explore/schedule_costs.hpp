// Costs of actions, messages and activations: the options that `sluice schedule`, its `compare` and
// `auto` share, and the input of simulate() that follows from them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/simulate.hpp>

#include "runtime/program/explore/measured_costs.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {

// What stands between the separators; an empty text has no part.
[[nodiscard]] std::vector<std::string> parts_of(std::string_view text, char separator = ',');

// What one number of a list refers to.
enum class CostsOf {
  kStage,      // one chunk, one per stage; X alone: a rank's chunks in equal parts
  kRankShare,  // one p-th of the model: X for all, or p of them in the model's order
};

// What the collectives of tensor ranks come to, of one micro-batch over the whole model, per rank
// of those that share it.
struct TensorCosts {
  int ranks = 1;
  double calls = 0, bytes = 0;  // bytes that a rank passes
  double time = 0;
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

  // Of the placement's stages. Measured times of layers are added up by stage: as `first_layer`
  // says where it is not empty, else by cut_layers(). Throws Error(kUsage) for lists of another
  // length, and where the ranks are not those of the cluster file.
  [[nodiscard]] SimulationTimes times(const Placement& placement,
                                      const std::vector<int>& first_layer = {}) const;
  // Of `layers` layers, one entry each; of `ranks` equal shares of the model.
  [[nodiscard]] SimulationTimes of_layers(int ranks, int layers) const;
  [[nodiscard]] SimulationTimes of_shares(int ranks) const;

  // The layers that the profile says, embedding and head included; 0: none.
  [[nodiscard]] int measured_layers() const { return static_cast<int>(layers_.size()); }
  // What makes these costs of the placement's stages doubtful, a sentence each.
  [[nodiscard]] std::vector<std::string> remarks(const Placement& placement) const;
  // Whether times are milliseconds: of a profile, or of a cluster file.
  [[nodiscard]] bool milliseconds() const { return !source_.empty(); }

  // --memory-limit: one for all ranks, or one per rank; empty: none. Most bytes a rank may hold
  // where bytes are given. Else micro-batches in flight on a rank, each chunk counting as its share
  // of one. Throws Error(kUsage) where there are several, but not one per rank.
  [[nodiscard]] const std::vector<std::int64_t>& byte_limit(int ranks) const;
  [[nodiscard]] const std::vector<double>& in_flight_limit(int ranks) const;
  // Whether activations leave their rank: half_resident().
  [[nodiscard]] bool offloads() const { return offload_; }
  // Where tensor ranks share stages; times() and its like have their collectives.
  [[nodiscard]] const TensorCosts& tensor() const { return tensor_costs_; }
  // The profile with the assumptions about its times, and the cluster file; empty: neither.
  [[nodiscard]] const std::string& source() const { return source_; }

 private:
  // Options that take one number, or one per piece of the model; bytes from kOutput on.
  enum List : std::size_t {
    kForward,
    kBackwardInput,
    kBackwardWeight,
    kReduce,
    kOverlap,
    kOutput,
    kOutputGradient,
    kUntilInput,
    kUntilWeight,
    kResident,
    kReduced,
    kGathered,
    kLists
  };
  static constexpr std::array<const char*, kLists> kNames = {"forward-time",
                                                             "backward-input-time",
                                                             "backward-weight-time",
                                                             "reduce-time",
                                                             "overlap-time",
                                                             "message-bytes",
                                                             "gradient-message-bytes",
                                                             "activation-bytes",
                                                             "weight-activation-bytes",
                                                             "resident-bytes",
                                                             "reduce-bytes",
                                                             "gather-bytes"};

  void add_list(OptionTable& table, List list, const std::string& help);
  // `of`: what a number is of.
  void add_memory(OptionTable& table, const std::string& of);
  void read_memory_limit();
  [[nodiscard]] MeasuredCosts read_profile(const OptionTable& table);
  void use_cluster(const OptionTable& table);
  // Throws Error(kUsage) where the costs of so many are not known.
  void require_tensor_ranks(const MeasuredCosts& measured) const;
  void share_stages(const OptionTable& table, const MeasuredCosts& measured);
  void require_cluster_of(int ranks) const;
  void require_limits_of(int ranks) const;
  // Of equal pieces of the model, or of its layers: what the options say, and for `measured`
  // [piece] what the profile says, if any. A number alone is of so many `parts`, pieces or not;
  // messages have no parts.
  [[nodiscard]] SimulationTimes of_pieces(int pieces, double parts) const;
  [[nodiscard]] static SimulationTimes with(const std::vector<StageTimes>& measured,
                                            SimulationTimes times);

  // Targets of the options. Empty texts: not given.
  std::array<std::string, kLists> texts_ = {"1", "1", "1", "0", "sum"};
  std::string links_, limit_, profile_, cluster_;
  bool offload_ = false;
  double input_share_ = 0.5;
  int tensor_ = 0;  // 0: not given
  LinkCost tensor_link_;
  SimulationTimes common_;  // all but stages and bytes
  // Set by resolve().
  CostsOf scope_ = CostsOf::kStage;
  std::array<std::vector<double>, kLists> values_;
  bool has_bytes_ = false;
  std::vector<StageTimes> measured_;  // [stage of the measured run]; empty: none
  std::vector<StageTimes> layers_;    // [layer of it]; empty: not known
  bool messages_free_ = false;        // nothing says what a message takes
  std::optional<int> cluster_ranks_;
  int cluster_tensor_ = 1;
  TensorCosts tensor_costs_;
  std::vector<std::int64_t> byte_limit_;
  std::vector<double> in_flight_limit_;
  std::string source_;
};

}  // namespace sluice
