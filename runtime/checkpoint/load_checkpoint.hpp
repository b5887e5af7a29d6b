// What can be said of a save without a pipeline.
#pragma once

#include <cstdint>
#include <filesystem>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Not collective. Makes the checks of load_checkpoint() on names and sizes of parameters, for the
// save that it would try first, and returns its step. It reads no values and compares no hashes.
[[nodiscard]] std::uint64_t require_fitting_save(const JobLayout& layout,
                                                 const std::filesystem::path& path);

// The step of a save of version 0.1. Throws Error(kWeights): state.json is missing, damaged or of
// another format. Reads no weights.
[[nodiscard]] std::uint64_t step_of_0_1(const std::filesystem::path& directory);

}  // namespace sluice
