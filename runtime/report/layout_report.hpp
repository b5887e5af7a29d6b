// The text on a job's layout that `sluice train` prints before the first step.
#pragma once

#include <string>

#include <sluice/stage.hpp>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// A row per rank of a pipeline with its stages, layers and memory; then, where a rank computes on a
// GPU, devices and routes; then the notes of stages.
[[nodiscard]] std::string describe_layout(const JobLayout& layout, const Partition& partition);

}  // namespace sluice
