// Calls of the program's own data. What they throw says which call it was.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <span>
#include <string>

#include <sluice/data.hpp>

#include "comm/group/rethrow_from.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice {

inline std::string batch_name(Phase phase, std::uint64_t step) {
  return phase == Phase::kTrain ? fmt::format("step {}", step) : "an evaluation";
}

// `read` writes into these; where `watched`, numbers that it leaves unwritten are Error(kUsage).
template <typename Read>
void watch_reading(std::span<const Tensor> into, bool watched, const char* what, const Read& read) {
  for (const Tensor& tensor : into) {
    if (watched) mark_unwritten(tensor);
  }
  read();
  for (std::size_t i = 0; watched && i < into.size(); ++i) {
    require_written(into[i], fmt::format("{} {}", what, i));
  }
}

// Of a micro-batch: its targets, or its inputs.
inline void read_batch(const DataSource& source, Phase phase, std::uint64_t step, SampleRange range,
                       bool targets, std::span<const Tensor> into, bool watched) {
  const char* const what = targets ? "target" : "input";
  const auto read = [&] {
    targets ? source.targets(phase, step, range, into) : source.inputs(phase, step, range, into);
  };
  calling([&] { return fmt::format("the source, {}s() of {}", what, batch_name(phase, step)); },
          [&] { watch_reading(into, watched, what, read); });
}

[[nodiscard]] inline std::int64_t size_of(const Dataset& data) {
  return calling("the data set, size()", [&] { return data.size(); });
}

[[nodiscard]] inline BatchSpec spec_of(const Dataset& data) {
  return calling("the data set, spec()", [&] { return data.spec(); });
}

}  // namespace sluice
