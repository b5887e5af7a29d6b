#include "runtime/files/json_text.hpp"

#include <vector>

namespace sluice {

nlohmann::json parse_json(std::string_view text, NoJson otherwise) {
  return nlohmann::json::parse(text, nullptr, otherwise == NoJson::kThrow);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, NoJson otherwise) {
  return nlohmann::ordered_json::parse(text, nullptr, otherwise == NoJson::kThrow);
}

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

std::string dump_json(const nlohmann::json& json, int indent, InvalidUtf8 invalid) {
  return json.dump(indent, ' ', false, invalid);
}

std::string dump_json(const nlohmann::ordered_json& json, int indent, InvalidUtf8 invalid,
                      bool ascii) {
  return json.dump(indent, ' ', ascii, invalid);
}

std::string to_cbor(const nlohmann::json& json) {
  std::string bytes;
  nlohmann::json::to_cbor(json, bytes);
  return bytes;
}

nlohmann::json from_cbor(std::string_view bytes) { return nlohmann::json::from_cbor(bytes); }

}  // namespace sluice
