// What a pipeline does before the first call of a stage, for tests without one.
#pragma once

#include <sluice/stage.hpp>

namespace sluice::testing {

inline void prepare(Stage& stage, const StageSetup& setup) {
  ParameterSet* const parameters = stage.parameters();
  if (parameters != nullptr) {
    parameters->allocate(setup.compute->memory(), setup.seed, setup.trains);
  }
  stage.prepare(setup);
}

}  // namespace sluice::testing
