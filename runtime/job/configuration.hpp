// The values that every rank of a job must agree on, and their comparison.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/group/collectives.hpp"

namespace sluice {

struct PipelineOptions;

using NamedValues = std::vector<std::pair<std::string, std::string>>;

// options.checks.configuration, followed by the options of the pipeline itself. Requires options of
// require_sensible(). Throws Error(kUsage) for a given order that no schedule file can hold.
[[nodiscard]] NamedValues agreed_values(const PipelineOptions& options);

// Collective. Throws the same Error(kMismatch) on every rank where values differ; it names the
// first key that differs, the first rank that differs from rank 0, and both values.
void require_same_configuration(Collectives& comm, const NamedValues& values);

}  // namespace sluice
