#include "runtime/layout/save_shares.hpp"

#include <algorithm>
#include <map>

#include "comm/base/index.hpp"

namespace sluice {

std::vector<SavedParameter> share_saves(const JobLayout& layout) {
  const AxisSizes& size = layout.place.topology.size;
  std::vector<SavedParameter> shares;
  const auto add = [&](int stage, std::vector<ParameterEntry> StageEntry::*list, std::size_t i) {
    const ParameterEntry& entry = (layout.parameters.stages[at(stage)].*list)[i];
    SavedParameter& share = shares.emplace_back();
    share.name = entry.name;
    share.elements = entry.whole_elements;
    share.rank = layout.plans.placement().rank_of(stage);
    for (int tensor = 0; tensor < size.tensor; ++tensor) {
      share.entries.push_back(&(layout.parameters_at(tensor).stages[at(stage)].*list)[i]);
    }
  };
  const auto& stages = layout.parameters.stages;
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    for (std::size_t i = 0; i < stages[at(stage)].parameters.size(); ++i) {
      if (layout.parameters.is_owner(stage, static_cast<int>(i))) {
        add(stage, &StageEntry::parameters, i);
      }
    }
  }
  const std::size_t parameters_end = shares.size();
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    for (std::size_t i = 0; i < stages[at(stage)].buffers.size(); ++i) {
      add(stage, &StageEntry::buffers, i);
    }
  }
  // By pipeline rank: elements of [replica * tensor ranks + tensor].
  std::map<int, std::vector<std::int64_t>> loads;
  for (const SavedParameter& share : shares)
    loads[share.rank].resize(at(size.replica * size.tensor));
  std::vector<SavedParameter*> largest_first;
  for (std::size_t i = 0; i < parameters_end; ++i) largest_first.push_back(&shares[i]);
  for (std::size_t i = parameters_end; i < shares.size(); ++i) {
    loads[shares[i].rank][0] += shares[i].elements;
  }
  std::stable_sort(
      largest_first.begin(), largest_first.end(),
      [](const SavedParameter* a, const SavedParameter* b) { return a->elements > b->elements; });
  for (SavedParameter* share : largest_first) {
    std::vector<std::int64_t>& load = loads[share->rank];
    const auto least = std::min_element(load.begin(), load.end());
    const auto number = static_cast<int>(least - load.begin());
    share->replica = number / size.tensor;
    share->tensor = number % size.tensor;
    *least += share->elements;
  }
  return shares;
}

std::int64_t SavedParameter::state_elements(int of_replica, int of_tensor) const {
  if (!has_state() || (!sliced() && of_tensor != tensor)) return 0;
  const ParameterEntry& entry = *entries[at(of_tensor)];
  return entry.ends.empty() && of_replica != replica ? 0 : entry.part(of_replica).count;
}

std::size_t most_saved_bytes(const std::vector<SavedParameter>& shares, const Place& place,
                             int replicas, std::size_t state) {
  std::size_t most = 0;
  for (int replica = 0; replica < replicas; ++replica) {
    std::size_t values = 0, states = 0;  // elements
    for (const SavedParameter& share : shares) {
      if (share.rank != place.pipeline) continue;
      if (share.replica == replica && share.tensor == place.tensor) {
        values += static_cast<std::size_t>(share.elements);
      }
      states += static_cast<std::size_t>(share.state_elements(replica, place.tensor));
    }
    most = std::max(
        most, sum_of_bytes({multiply_bytes(sizeof(float), values), multiply_bytes(state, states)}));
  }
  return most;
}

}  // namespace sluice
