#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>

#include "schedules/files/file_text.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kJsonReader = "schedule file";
constexpr std::string_view kFormat = "sluice-schedule";
constexpr std::string_view kCount = "an integer from 1 up";
constexpr std::string_view kActions = "a list per rank of actions such as \"0F0\"";
constexpr const char* kMadeFor = "made_for";  // the only key that may be missing
constexpr std::array kKeys = {"format",        "version",   "name",  "ranks", "stages",
                              "micro_batches", "placement", "lists", kMadeFor};

template <class... Parts>
[[noreturn]] void fail(const Parts&... what) {
  refuse(kJsonReader, ": ", what...);
}

std::string keys_text() {
  std::string text = "legal is one object with the keys";
  for (const char* name : kKeys) (text += ' ') += name;
  return text;
}

// Refuses a value. Ranks and positions count from 0.
[[noreturn]] void unexpected(const std::string& where, const Json& value, std::string_view legal) {
  const std::string what = value.is_string()
                               ? "the text " + quoted_excerpt(value.get<std::string>())
                           : value.is_number() ? "the number " + value.dump()
                           : value.is_array()  ? "a list"
                           : value.is_object() ? "an object"
                                               : value.dump();
  fail(where, " has ", what, "; legal is ", legal);
}

bool printable(std::string_view name) {
  return std::none_of(name.begin(), name.end(),
                      [](char c) { return (c >= 0 && c < ' ') || c == '\x7f'; });
}

void require_name(std::string_view what, std::string_view name) {
  if (!name.empty() && name.size() <= kMaxScheduleNameBytes && printable(name)) return;
  refuse(what, quoted_excerpt(name), " is not 1 to ", kMaxScheduleNameBytes,
         " bytes without control characters");
}

// The document, in which no object has a key twice; it is no deeper than a schedule is.
Json parsed(std::string_view text) {
  constexpr int kMostLevels = 4;            // one more, which is refused by its place
  std::vector<std::set<std::string>> seen;  // keys of the objects that are open
  std::string top;                          // the outermost one's last key
  const auto watch = [&](int level, Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (level >= kMostLevels && (event == Event::object_start || event == Event::array_start)) {
      fail("more than ", kMostLevels, " levels of lists and objects");
    }
    if (event == Event::object_start) seen.emplace_back();
    if (event == Event::object_end) seen.pop_back();
    if (event != Event::key) return true;
    const std::string& key = value.get_ref<const std::string&>();
    if (seen.size() == 1) top = key;
    if (seen.back().insert(key).second) return true;
    fail("the key ", quoted_excerpt(key), " appears a second time",
         seen.size() == 1 ? "" : " in " + quoted_excerpt(top));
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::parse_error& error) {
    fail("no JSON at byte ", error.byte, "; ", keys_text());
  } catch (const Json::out_of_range&) {
    fail("it has a number that no double holds");
  }
}

// An integer from `least` to the largest index.
bool is_index(const Json& value, std::int64_t least) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kMost}) return false;
  return value.is_number_integer() && value.get<std::int64_t>() >= least;
}

int count_of(const Json& json, const char* key) {
  if (!is_index(json[key], 1)) unexpected(concat("key '", key, "'"), json[key], kCount);
  return json[key].get<int>();
}

MadeFor made_for_of(const Json& json) {
  const auto number = [&](const char* key, double most) {
    const double value = json.contains(key) && json[key].is_number() ? json[key].get<double>() : -1;
    return std::isfinite(value) && value >= 0 && value <= most;
  };
  bool legal = json.is_object() && json.size() == 4 && json.contains("first_layer") &&
               json["first_layer"].is_array() && json.contains("milliseconds") &&
               json["milliseconds"].is_boolean() && number("bubble", 1) &&
               number("makespan", std::numeric_limits<double>::max());
  MadeFor made_for;
  if (legal) {
    for (const Json& layer : json["first_layer"]) {
      std::vector<int>& first = made_for.first_layer;
      legal = legal && is_index(layer, first.empty() ? 0 : first.back()) &&
              (!first.empty() || layer == 0);
      if (legal) first.push_back(layer.get<int>());
    }
  }
  if (!legal) {
    fail("key 'made_for' has ", quoted_excerpt(json.dump()),
         "; legal is one object with the keys first_layer (ascending from 0, one entry more "
         "than stages, or empty), makespan (a number from 0 up), bubble (0 to 1) and "
         "milliseconds (true or false)");
  }
  made_for.makespan = json["makespan"].get<double>();
  made_for.bubble = json["bubble"].get<double>();
  made_for.milliseconds = json["milliseconds"].get<bool>();
  return made_for;
}

Step step_of(const Json& value, const std::string& place) {
  const bool is_text = value.is_string() && is_action_text(value.get_ref<const std::string&>());
  if (!is_text) unexpected("key 'lists', " + place, value, kActions);
  Step step;
  try {
    step = parse_step(value.get_ref<const std::string&>());
  } catch (const Error& error) {
    fail(place + ": " + error.what());
  }
  if (is_compute(step.action.kind) || is_sharding(step.action.kind)) return step;
  fail(place, ": ", step.action,
       " does not compute; legal are F, B, I, W, overlapped pairs of them, UNSHARD, RESHARD and "
       "REDUCE_GRAD");
}

// Returns how many actions compute.
std::int64_t read_lists(const Json& lists, Schedule& schedule) {
  if (!lists.is_array()) unexpected("key 'lists'", lists, kActions);
  require_action_count(kJsonReader, static_cast<std::int64_t>(lists.size()));
  std::int64_t actions = 0, sharding = 0;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    if (!lists[rank].is_array()) unexpected("key 'lists'", lists[rank], kActions);
    std::vector<Step>& steps = schedule.ranks.emplace_back();
    for (const Json& value : lists[rank]) {
      const Step step = step_of(value, concat("list ", rank, ", position ", steps.size()));
      sharding += is_sharding(step.action.kind) ? 1 : 0;
      actions += step.overlapped ? 2 : 1;
      require_action_count(kJsonReader, actions);
      steps.push_back(step);
    }
  }
  return actions - sharding;
}

void require_keys(const Json& json) {
  if (!json.is_object()) unexpected("the file", json, "one object");
  for (const auto& [key, value] : json.items()) {
    if (std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end()) continue;
    fail("unknown key " + quoted_excerpt(key) + "; " + keys_text());
  }
  for (const char* key : kKeys) {
    if (!json.contains(key) && std::string_view(key) != kMadeFor)
      fail("the key '", key, "' is missing");
  }
  if (json["format"] != kFormat) {
    unexpected("key 'format'", json["format"], "the text \"sluice-schedule\"");
  }
  if (const int version = count_of(json, "version"); version != kScheduleFileVersion) {
    fail("version ", version, "; this program reads version ", kScheduleFileVersion);
  }
}

}  // namespace

ScheduleFile parse_schedule_json(std::string_view text) {
  require_file_size(kJsonReader, text);
  const Json json = parsed(text);
  require_keys(json);
  ScheduleFile file;
  Schedule& schedule = file.schedule;
  if (!json["name"].is_string()) unexpected("key 'name'", json["name"], "a text");
  schedule.name = json["name"].get<std::string>();
  require_name("schedule file: the name ", schedule.name);
  const int ranks = count_of(json, "ranks"), stages = count_of(json, "stages");
  schedule.micro_batches = count_of(json, "micro_batches");
  const Json& places = json["placement"];
  std::vector<int> placement;
  for (const Json& rank : places.is_array() ? places : Json::array({places})) {
    const bool legal = places.is_array() && is_index(rank, 0);
    if (!legal) unexpected("key 'placement'", rank, "a list of ranks, one per stage");
    placement.push_back(rank.get<int>());
  }
  const std::int64_t computes = read_lists(json["lists"], schedule);
  const auto agree = [&](std::size_t found, int said, const char* what, const char* key) {
    if (found == static_cast<std::size_t>(said)) return;
    fail("'", key, "' has ", found, " entries, but the file says ", said, " ", what);
  };
  agree(placement.size(), stages, "stages", "placement");
  agree(schedule.ranks.size(), ranks, "ranks", "lists");
  require_enough_actions(kJsonReader, stages, schedule.micro_batches, computes);
  try {
    schedule.placement = Placement::custom(ranks, std::move(placement));
  } catch (const Error& error) {
    fail(error.what());
  }
  find_forward_only(schedule);
  if (!json.contains(kMadeFor)) return file;
  file.made_for = made_for_of(json[kMadeFor]);
  if (const std::size_t entries = file.made_for->first_layer.size(); entries > 0) {
    agree(entries - 1, stages, "stages, and first_layer one entry more", kMadeFor);
  }
  return file;
}

std::string to_schedule_json(const Schedule& schedule, const std::optional<MadeFor>& made_for) {
  require_name("the schedule's name ", schedule.name);
  const auto line = [](std::string_view key, const Json& value) {
    return " \"" + std::string(key) +
           "\": " + value.dump(-1, ' ', false, Json::error_handler_t::replace) + ",\n";
  };
  std::vector<int> placement;
  for (int stage = 0; stage < schedule.placement.stages(); ++stage) {
    placement.push_back(schedule.placement.rank_of(stage));
  }
  std::string text = "{\n" + line("format", kFormat) + line("version", kScheduleFileVersion) +
                     line("name", schedule.name) + line("ranks", schedule.placement.ranks()) +
                     line("stages", schedule.placement.stages()) +
                     line("micro_batches", schedule.micro_batches) + line("placement", placement);
  if (made_for) {
    text += line("made_for", {{"first_layer", made_for->first_layer},
                              {"makespan", made_for->makespan},
                              {"bubble", made_for->bubble},
                              {"milliseconds", made_for->milliseconds}});
  }
  text += " \"lists\": [";
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    text += rank == 0 ? "\n  [" : ",\n  [";
    for (std::size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      const Step& step = schedule.ranks[rank][i];
      if (!is_compute(step.action.kind) && !is_sharding(step.action.kind)) {
        refuse("schedule '", schedule.name, "': ", step,
               " does not compute; a schedule file holds F, B, I, W, UNSHARD, RESHARD and "
               "REDUCE_GRAD");
      }
      text += i == 0 ? "\"" : ", \"";
      text += to_string(step);
      text += '"';
    }
    text += ']';
  }
  return text + "\n ]\n}\n";
}

}  // namespace sluice
