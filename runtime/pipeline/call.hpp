// What ranks call of a pipeline, all the same, and calls that all ranks refuse: the pipeline is as
// it was before, and stays usable.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/group/configuration.hpp"

namespace sluice {

enum class Call : std::int32_t {
  kTrain,
  kTrainSource,
  kAccumulate,
  kGradients,
  kUpdate,
  kDrop,
  kEvaluate,
  kEvaluateSource,
  kInfer,
  kState,
  kSetState,
  kValuesChanged,
  kSave,
  kLoad,
  kLoader,
  kTimeline,
  kClose,
  kValues,  // within another call: what its batch holds
};

// What all ranks throw, or none, while nothing has changed.
struct Refused {
  Error error;
};

// What `body` throws, of any type, as an Error; nothing where it throws nothing.
[[nodiscard]] std::optional<Error> error_of(const std::function<void()>& body);

// Collective, and a barrier. Runs `body`, which calls no other rank. Where it throws on any rank,
// all ranks throw Refused with what the lowest of them threw, as an Error that names the rank.
void on_all_ranks(Collectives& world, const std::function<void()>& body);
// Collective. Throws Refused with Error(kMismatch) where values differ; see configuration.hpp.
void require_same_or_refuse(Collectives& world, const Facts& values);

}  // namespace sluice
