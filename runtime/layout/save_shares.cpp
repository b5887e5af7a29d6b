#include "runtime/layout/save_shares.hpp"

#include <algorithm>
#include <map>

#include "comm/base/index.hpp"

namespace sluice {

std::vector<SavedParameter> share_saves(const StepPlans& plans, const ParameterTable& parameters,
                                        int replicas) {
  std::vector<SavedParameter> shares;
  for (int stage = 0; stage < plans.num_stages(); ++stage) {
    const auto& entries = parameters.stages[at(stage)].parameters;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (!parameters.is_owner(stage, static_cast<int>(i))) continue;
      shares.push_back(
          {entries[i].name, entries[i].elements, plans.placement().rank_of(stage), /*replica=*/0});
    }
  }
  const std::size_t parameters_end = shares.size();
  std::map<int, std::vector<std::int64_t>> loads;  // by rank: [replica] elements
  for (int stage = 0; stage < plans.num_stages(); ++stage) {
    const int rank = plans.placement().rank_of(stage);
    for (const ParameterEntry& buffer : parameters.stages[at(stage)].buffers) {
      shares.push_back({buffer.name, buffer.elements, rank, /*replica=*/0});
      loads[rank].resize(at(replicas));
      loads[rank][0] += buffer.elements;
    }
  }
  std::vector<SavedParameter*> largest_first;
  for (std::size_t i = 0; i < parameters_end; ++i) largest_first.push_back(&shares[i]);
  std::stable_sort(
      largest_first.begin(), largest_first.end(),
      [](const SavedParameter* a, const SavedParameter* b) { return a->elements > b->elements; });
  for (SavedParameter* share : largest_first) {
    std::vector<std::int64_t>& load = loads[share->rank];
    load.resize(at(replicas));
    const auto least = std::min_element(load.begin(), load.end());
    share->replica = static_cast<int>(least - load.begin());
    *least += share->elements;
  }
  return shares;
}

std::int64_t most_saved_elements(const std::vector<SavedParameter>& shares, int rank) {
  std::map<int, std::int64_t> by_replica;
  std::int64_t most = 0;
  for (const SavedParameter& share : shares) {
    if (share.rank != rank) continue;
    most = std::max(most, by_replica[share.replica] += share.elements);
  }
  return most;
}

}  // namespace sluice
