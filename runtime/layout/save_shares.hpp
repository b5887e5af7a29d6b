// Which rank saves which parameter, so that replicas share the writing. A function of the layout
// alone: every rank computes the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct SavedParameter {
  std::string name;
  std::int64_t elements = 0;
  int rank = 0;                    // of the pipeline: the owner's
  int replica = 0;                 // the one that saves it
  std::vector<std::int64_t> ends;  // ParameterEntry's

  // How many elements' optimizer state `of_replica` saves: of its own part, or of the whole with
  // the values.
  [[nodiscard]] std::int64_t state_elements(int of_replica) const;
};

// Every parameter once, in order of stage, then every buffer, which replica 0 saves. The replicas
// of a rank get its parameters, the largest first, each to the replica with the fewest elements so
// far.
[[nodiscard]] std::vector<SavedParameter> share_saves(const StepPlans& plans,
                                                      const ParameterTable& parameters,
                                                      int replicas);

// The most bytes that one of `replicas` of pipeline rank `rank` saves: fp32 values, and `state`
// bytes per element of optimizer state. kTooManyBytes where it is more.
[[nodiscard]] std::size_t most_saved_bytes(const std::vector<SavedParameter>& shares, int rank,
                                           int replicas, std::size_t state);

}  // namespace sluice
