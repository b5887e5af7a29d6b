// What no pipeline can work with, whatever its stages are: checked before anything is made, and
// before a value from the program is looked up in a table.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/options.hpp>
#include <sluice/parameter.hpp>

namespace sluice {

// Throws Error(kUsage) that names the option, its value and what is legal.
void require_sensible(const PipelineOptions& options);

// The same of a learning rate. Optimizers get it in f32, times each group's factor: products that
// f32 cannot hold are refused.
void require_sensible(const LearningRate& rate, std::span<const ParameterGroup> groups);
// The same of what the rate is in one step: a factor above 1 makes it grow.
void require_sensible_at(std::uint64_t step, const LearningRate& rate,
                         std::span<const ParameterGroup> groups);

}  // namespace sluice
