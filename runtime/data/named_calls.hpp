// Calls of the program's own data. What they throw says which call it was.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>

#include <sluice/data.hpp>

#include "comm/group/rethrow_from.hpp"

namespace sluice {

inline std::string batch_name(Phase phase, std::uint64_t step) {
  return phase == Phase::kTrain ? fmt::format("step {}", step) : "an evaluation";
}

inline void read_inputs(const DataSource& source, Phase phase, std::uint64_t step,
                        SampleRange range, std::span<const Tensor> into) {
  calling([&] { return "the source, inputs() of " + batch_name(phase, step); },
          [&] { source.inputs(phase, step, range, into); });
}

inline void read_targets(const DataSource& source, Phase phase, std::uint64_t step,
                         SampleRange range, std::span<const Tensor> into) {
  calling([&] { return "the source, targets() of " + batch_name(phase, step); },
          [&] { source.targets(phase, step, range, into); });
}

[[nodiscard]] inline std::int64_t size_of(const Dataset& data) {
  return calling("the data set, size()", [&] { return data.size(); });
}

[[nodiscard]] inline BatchSpec spec_of(const Dataset& data) {
  return calling("the data set, spec()", [&] { return data.spec(); });
}

}  // namespace sluice
