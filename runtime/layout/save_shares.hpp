// Which rank saves which parameter, so that the ranks that hold it share the writing. A function of
// the layout alone: every rank computes the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/group/topology.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct SavedParameter {
  std::string name;
  std::int64_t elements = 0;                   // of the whole
  int rank = 0;                                // of the pipeline: the owner's
  int replica = 0, tensor = 0;                 // of the one that saves its values
  std::vector<const ParameterEntry*> entries;  // [tensor coordinate] of the layout

  // Whether tensor ranks have slices of it. Then each saves the state of its own.
  [[nodiscard]] bool sliced() const { return !entries.front()->slice.all(); }
  [[nodiscard]] bool has_state() const { return entries.front()->updated; }
  // How many elements' optimizer state a rank saves: of the part that it updates, or with the
  // values.
  [[nodiscard]] std::int64_t state_elements(int of_replica, int of_tensor) const;
};

// Every parameter once, in order of stage, then every buffer, which the first replica and tensor
// rank saves. The other ranks that hold a parameter get it as follows: the largest first, each to
// the one with the fewest elements so far, by replica, then tensor rank. Valid as long as `layout`.
[[nodiscard]] std::vector<SavedParameter> share_saves(const JobLayout& layout);

// The most bytes that one of `replicas` of a place saves: fp32 values, and `state` bytes per
// element of optimizer state. kTooManyBytes where it is more.
[[nodiscard]] std::size_t most_saved_bytes(const std::vector<SavedParameter>& shares,
                                           const Place& place, int replicas, std::size_t state);

}  // namespace sluice
