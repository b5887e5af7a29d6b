// The option --offload as text: WHAT[,WHAT]:WHERE[,WHAT:WHERE], or none.
#pragma once

#include <string>

#include <sluice/options.hpp>

namespace sluice {

// A directory ends where another WHAT begins. Throws Error(kUsage).
[[nodiscard]] PipelineOptions::Offload parse_offload(const std::string& text);
[[nodiscard]] std::string text_of(const PipelineOptions::Offload& offload);

}  // namespace sluice
