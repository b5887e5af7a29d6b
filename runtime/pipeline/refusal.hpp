// Calls that all ranks refuse: the pipeline is as it was before, and stays usable.
#pragma once

#include <functional>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"

namespace sluice {

// What all ranks throw, or none, while nothing has changed.
struct Refused {
  Error error;
};

// Collective, and a barrier. Runs `body`, which calls no other rank. Where it throws on any rank,
// all ranks throw Refused with what the lowest of them threw, as an Error that names the rank.
void on_all_ranks(Collectives& world, const std::function<void()>& body);

}  // namespace sluice
