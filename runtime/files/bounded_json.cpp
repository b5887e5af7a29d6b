#include "runtime/files/bounded_json.hpp"

#include <vector>

namespace sluice {

nlohmann::ordered_json parse_bounded(std::string_view text, int levels, std::size_t keys) {
  using Json = nlohmann::ordered_json;
  using Event = Json::parse_event_t;
  bool bounded = true;
  std::vector<std::size_t> counts;  // keys of each open object
  const auto note = [&](int depth, Event event, const Json&) {
    if (event == Event::object_start) counts.push_back(0);
    if (event == Event::object_end) counts.pop_back();
    if (event == Event::key && ++counts.back() > keys) bounded = false;
    const bool starts = event == Event::object_start || event == Event::array_start;
    if (starts && depth >= levels) bounded = false;
    return bounded;
  };
  Json json = Json::parse(text, note, false);
  return bounded ? json : Json(Json::value_t::discarded);
}

}  // namespace sluice
