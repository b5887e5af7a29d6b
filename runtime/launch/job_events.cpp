#include "runtime/launch/job_events.hpp"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

namespace sluice {
namespace {

using nlohmann::json;

constexpr std::string_view kMark = "sluice-event {";
constexpr std::string_view kTagged = "<stderr>:";
constexpr std::size_t kMostNames = 1000;  // hosts or ranks of one report

std::optional<JobEvent::Kind> kind_of(const std::string& name) {
  using Kind = JobEvent::Kind;
  constexpr std::array<std::pair<std::string_view, Kind>, 5> kKinds = {{{"start", Kind::kStart},
                                                                        {"step", Kind::kStep},
                                                                        {"save", Kind::kSave},
                                                                        {"end", Kind::kEnd},
                                                                        {"hang", Kind::kHang}}};
  for (const auto& [text, kind] : kKinds) {
    if (text == name) return kind;
  }
  return std::nullopt;
}

JobEvent event_of(const json& object, JobEvent::Kind kind) {
  JobEvent event;
  event.kind = kind;
  event.step = object.value("step", std::uint64_t{0});
  event.seconds = object.value("seconds", 0.0);
  event.deadlock = object.value("kind", std::string()) == "deadlock";
  event.hosts = object.value("hosts", std::vector<std::string>());
  event.ranks = object.value("ranks", std::vector<int>());
  return event;
}

}  // namespace

std::optional<JobEvent> parse_event(std::string_view text) {
  try {
    const json object = json::parse(text);
    if (!object.is_object()) return std::nullopt;
    const auto kind = kind_of(object.value("event", std::string()));
    if (!kind) return std::nullopt;
    // nlohmann-json converts any number to an unsigned one.
    const auto step = object.find("step");
    if (step != object.end() && !step->is_number_unsigned()) return std::nullopt;
    JobEvent event = event_of(object, *kind);
    if (!std::isfinite(event.seconds) || event.seconds < 0) return std::nullopt;
    if (event.hosts.size() > kMostNames || event.ranks.size() > kMostNames) return std::nullopt;
    return event;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

EventText event_in(std::string_view line) {
  const std::size_t mark = line.find(kMark);
  if (mark == std::string_view::npos) return {};
  const std::string_view before = line.substr(0, mark);
  const bool tagged = before.starts_with('[') && before.ends_with(kTagged);
  return {tagged ? std::string_view() : before, line.substr(mark + kMark.size() - 1)};
}

}  // namespace sluice
