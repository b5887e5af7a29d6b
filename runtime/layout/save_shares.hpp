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
  int rank = 0;     // of the pipeline: the owner's
  int replica = 0;  // the one that saves it
};

// Every parameter once, in order of stage, then every buffer, which replica 0 saves. The replicas
// of a rank get its parameters, the largest first, each to the replica with the fewest elements so
// far.
[[nodiscard]] std::vector<SavedParameter> share_saves(const StepPlans& plans,
                                                      const ParameterTable& parameters,
                                                      int replicas);

// The largest number of elements that a replica of pipeline rank `rank` saves.
[[nodiscard]] std::int64_t most_saved_elements(const std::vector<SavedParameter>& shares, int rank);

}  // namespace sluice
