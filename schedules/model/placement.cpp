#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

void require_ranks(int ranks) {
  if (ranks < 1) {
    refuse("placement over ", ranks, " ranks; at least 1 is needed");
  }
}

// ranks * chunks, refused where it does not fit an index.
std::size_t stage_count(int ranks, int chunks) {
  require_ranks(ranks);
  if (chunks < 1) {
    refuse("placement with ", chunks, " chunks per rank; at least 1 is needed");
  }
  const std::int64_t stages = std::int64_t{ranks} * chunks;
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (stages > most) {
    refuse("placement of ", ranks, " ranks with ", chunks, " chunks each has ", stages,
           " stages; at most ", most / ranks, " chunks are legal");
  }
  return at(stages);
}

}  // namespace

Placement::Placement(int ranks, std::vector<int> stage_to_rank)
    : ranks_(ranks), stage_to_rank_(std::move(stage_to_rank)) {
  rank_to_stages_.resize(at(ranks));
  for (int stage = 0; stage < stages(); ++stage) {
    rank_to_stages_[at(rank_of(stage))].push_back(stage);
  }
}

Placement Placement::linear(int ranks) { return looped(ranks, 1); }

Placement Placement::looped(int ranks, int chunks) {
  std::vector<int> stage_to_rank(stage_count(ranks, chunks));
  for (std::size_t stage = 0; stage < stage_to_rank.size(); ++stage) {
    stage_to_rank[stage] = static_cast<int>(stage % at(ranks));
  }
  return Placement(ranks, std::move(stage_to_rank));
}

Placement Placement::v_shape(int ranks) {
  std::vector<int> stage_to_rank(stage_count(ranks, 2));
  for (std::size_t stage = 0; stage < stage_to_rank.size(); ++stage) {
    const std::size_t there = stage;
    const std::size_t back = stage_to_rank.size() - 1 - stage;
    stage_to_rank[stage] = static_cast<int>(there < back ? there : back);
  }
  return Placement(ranks, std::move(stage_to_rank));
}

Placement Placement::custom(int ranks, std::vector<int> stage_to_rank) {
  require_ranks(ranks);
  std::vector<bool> owns(at(ranks));
  for (std::size_t stage = 0; stage < stage_to_rank.size(); ++stage) {
    const int rank = stage_to_rank[stage];
    if (rank < 0 || rank >= ranks) {
      refuse("placement puts stage ", stage, " on rank ", rank, "; legal ranks are 0 to ",
             ranks - 1);
    }
    owns[at(rank)] = true;
  }
  for (std::size_t rank = 0; rank < owns.size(); ++rank) {
    if (!owns[rank]) {
      refuse("placement leaves rank ", rank, " without a stage; every rank must own at least one");
    }
  }
  return Placement(ranks, std::move(stage_to_rank));
}

}  // namespace sluice
