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

}  // namespace sluice
