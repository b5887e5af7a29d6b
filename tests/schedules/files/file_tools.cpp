#include "tests/schedules/files/file_tools.hpp"

#include <fstream>
#include <sstream>
#include <stdexcept>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>

namespace sluice::testing {

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return file ? text.str() : "";
}

std::string sample(const std::string& file) {
  const std::string text = contents(std::string(SLUICE_SCHEDULE_SAMPLES "/") + file);
  if (text.empty()) throw std::runtime_error("no sample " + file);
  return text;
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string complaint_about(const Schedule& schedule) {
  if (const auto violation = check(schedule)) return violation->message;
  const Schedule lowered = lower(schedule, {});
  if (const auto violation = check(lowered)) return violation->message;
  const Verification verification = verify(make_plan(lowered, {}));
  return verification.ok() ? "" : verification.violation->message;
}

bool same_steps(const Schedule& one, const Schedule& two) {
  return one.placement == two.placement && one.micro_batches == two.micro_batches &&
         one.forward_only == two.forward_only && one.ranks == two.ranks;
}

}  // namespace sluice::testing
