// Schedule files for tests: samples next to the tests, refusals as text.
#pragma once

#include <functional>
#include <string>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

namespace sluice::testing {

// Of tests/schedules/data.
[[nodiscard]] std::string sample(const std::string& file);
// Empty where it cannot be read.
[[nodiscard]] std::string contents(const std::string& path);

// The message of the Error that `action` throws; "" where it throws none.
[[nodiscard]] std::string refusal(const std::function<void()>& action);

// Checks, plans and verifies. Returns the first complaint, "" for none.
[[nodiscard]] std::string complaint_about(const Schedule& schedule);

// Everything but the name.
[[nodiscard]] bool same_steps(const Schedule& one, const Schedule& two);

}  // namespace sluice::testing
