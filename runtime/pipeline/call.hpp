// What ranks call of a pipeline. All ranks make the same calls: they are compared.
#pragma once

#include <cstdint>

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

}  // namespace sluice
