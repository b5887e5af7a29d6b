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
      shares.push_back({entries[i].name, entries[i].elements, plans.placement().rank_of(stage),
                        /*replica=*/0, entries[i].ends});
    }
  }
  const std::size_t parameters_end = shares.size();
  std::map<int, std::vector<std::int64_t>> loads;  // by rank: [replica] elements
  for (int stage = 0; stage < plans.num_stages(); ++stage) {
    const int rank = plans.placement().rank_of(stage);
    for (const ParameterEntry& buffer : parameters.stages[at(stage)].buffers) {
      shares.push_back({buffer.name, buffer.elements, rank, /*replica=*/0, /*ends=*/{}});
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

std::int64_t SavedParameter::state_elements(int of_replica) const {
  if (ends.empty()) return of_replica == replica ? elements : 0;
  return ends[at(of_replica)] - (of_replica == 0 ? 0 : ends[at(of_replica) - 1]);
}

std::size_t most_saved_bytes(const std::vector<SavedParameter>& shares, int rank, int replicas,
                             std::size_t state) {
  std::size_t most = 0;
  for (int replica = 0; replica < replicas; ++replica) {
    std::size_t values = 0, states = 0;  // elements
    for (const SavedParameter& share : shares) {
      if (share.rank != rank) continue;
      if (share.replica == replica) values += static_cast<std::size_t>(share.elements);
      states += static_cast<std::size_t>(share.state_elements(replica));
    }
    most = std::max(
        most, sum_of_bytes({multiply_bytes(sizeof(float), values), multiply_bytes(state, states)}));
  }
  return most;
}

}  // namespace sluice
