// What the options of a pipeline must be whatever its stages are, and the values that every rank of
// a job must agree on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/parameter.hpp>

#include "comm/group/collectives.hpp"

namespace sluice {

// Throws Error(kUsage) that names the option, its value and what is legal.
void require_sensible(const PipelineOptions& options);

// The same of a learning rate. Optimizers get it in f32, times each group's factor: products that
// f32 cannot hold are refused.
void require_sensible(const LearningRate& rate, std::span<const ParameterGroup> groups);
// The same of what the rate is in one step: a factor above 1 makes it grow.
void require_sensible_at(std::uint64_t step, const LearningRate& rate,
                         std::span<const ParameterGroup> groups);

// options.expert.configuration, followed by the options of the pipeline itself. Requires options of
// require_sensible(). Throws Error(kUsage) for a given order that no schedule file can hold.
[[nodiscard]] Facts agreed_values(const PipelineOptions& options);

// Collective. Throws the same Error(kMismatch) on every rank where values differ; it names the
// first key that differs, the first rank that differs from rank 0, and both values.
void require_same_configuration(Collectives& comm, const Facts& values);

}  // namespace sluice
