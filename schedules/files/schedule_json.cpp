#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include <sluice/schedule_file.hpp>

#include "schedules/files/file_text.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

constexpr std::string_view kJsonReader = "schedule file";
constexpr std::string_view kFormat = "sluice-schedule";

enum Key : std::size_t {
  kFormatKey,
  kVersionKey,
  kNameKey,
  kRanksKey,
  kStagesKey,
  kMicroBatchesKey,
  kPlacementKey,
  kListsKey,
  kMadeForKey,
  kKeys
};
constexpr std::array<std::string_view, kKeys> kKeyNames = {"format",    "version", "name",
                                                           "ranks",     "stages",  "micro_batches",
                                                           "placement", "lists",   "made_for"};

// Both count from 0, as ranks do.
std::string at_list(std::size_t list, std::size_t position) {
  return concat("list ", list, ", position ", position);
}

bool printable(std::string_view name) {
  return std::none_of(name.begin(), name.end(),
                      [](char c) { return (c >= 0 && c < ' ') || c == '\x7f'; });
}

// The object of the key "made_for", event by event. Each function returns false for what it does
// not take there.
class MadeForHandler {
 public:
  bool key(const std::string& name) {
    const auto found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) return false;
    key_ = static_cast<std::size_t>(found - kNames.begin());
    return !std::exchange(seen_[key_], true);
  }
  bool boolean(bool value) {
    if (key_ != kMilliseconds) return false;
    made_for_.milliseconds = value;
    return true;
  }
  bool number(double value) {
    if (in_list_) return layer(value);
    if (!std::isfinite(value) || value < 0) return false;
    if (key_ == kMakespan) {
      made_for_.makespan = value;
      return true;
    }
    if (key_ != kBubble || value > 1) return false;
    made_for_.bubble = value;
    return true;
  }
  bool start_list() { return key_ == kFirstLayer && !std::exchange(in_list_, true); }
  void end_list() { in_list_ = false; }
  [[nodiscard]] bool complete() const {
    return std::all_of(seen_.begin(), seen_.end(), [](bool seen) { return seen; });
  }
  // Requires: complete().
  [[nodiscard]] MadeFor take() { return std::move(made_for_); }

  static constexpr std::string_view kLegal =
      "one object with the keys first_layer (ascending from 0, one entry more than stages, or "
      "empty), makespan (a number from 0 up), bubble (0 to 1) and milliseconds (true or false)";

 private:
  enum Key : std::size_t { kFirstLayer, kMakespan, kBubble, kMilliseconds, kNone };
  static constexpr std::array<std::string_view, kNone> kNames = {"first_layer", "makespan",
                                                                 "bubble", "milliseconds"};

  bool layer(double value) {
    std::vector<int>& first = made_for_.first_layer;
    const double least = first.empty() ? 0 : first.back();
    const double most = first.empty() ? 0 : std::numeric_limits<int>::max();
    if (!(value >= least && value <= most) || value != std::floor(value)) return false;
    first.push_back(static_cast<int>(value));
    return true;
  }

  MadeFor made_for_;
  std::array<bool, kNone> seen_{};
  std::size_t key_ = kNone;
  bool in_list_ = false;
};

// Follows the JSON library's parser event by event; nothing of the document is kept but the
// schedule. The depth is at most 3, so deeper nesting ends the parse at once.
class ScheduleHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  ScheduleFile take(std::string_view text) {
    nlohmann::json::sax_parse(text.begin(), text.end(), this);
    for (std::size_t key = 0; key < kKeys; ++key) {
      if (!seen_[key] && key != kMadeForKey)
        fail("the key '" + std::string(kKeyNames[key]) + "' is missing");
    }
    return finish();
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override {
    return (in_made_for_ && made_for_.boolean(value)) || unexpected("a boolean");
  }
  bool number_float(double value, const std::string&) override {
    return (in_made_for_ && made_for_.number(value)) ||
           unexpected(in_made_for_ ? concat("the number ", value) : "a number that is no integer");
  }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }
  bool number_integer(std::int64_t value) override {
    return unexpected(concat("the number ", value));
  }
  bool number_unsigned(std::uint64_t value) override {
    if (in_made_for_) {
      return made_for_.number(static_cast<double>(value)) ||
             unexpected(concat("the number ", value));
    }
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) {
      return unexpected(concat("the number ", value));
    }
    number(static_cast<int>(value));
    return true;
  }
  bool string(std::string& value) override {
    text(value);
    return true;
  }
  bool start_object(std::size_t) override {
    if (in_object_ && key_ == kMadeForKey && depth_ == 0 && !in_made_for_) {
      return in_made_for_ = true;
    }
    if (in_object_) return unexpected("an object");
    in_object_ = true;
    return true;
  }
  bool key(std::string& name) override {
    if (in_made_for_) return made_for_.key(name) || unexpected("the key " + quoted_excerpt(name));
    const auto found = std::find(kKeyNames.begin(), kKeyNames.end(), name);
    if (found == kKeyNames.end()) fail("unknown key " + quoted_excerpt(name) + "; " + keys_text());
    key_ = static_cast<Key>(found - kKeyNames.begin());
    if (std::exchange(seen_[key_], true)) fail("the key '" + name + "' appears a second time");
    return true;
  }
  bool end_object() override {
    if (in_made_for_ && !made_for_.complete()) unexpected("an object that lacks a key");
    in_made_for_ = false;
    key_ = kKeys;
    return true;
  }
  bool start_array(std::size_t) override {
    if (in_made_for_) return made_for_.start_list() || unexpected("a list");
    if (depth_ == 0 && (key_ == kPlacementKey || key_ == kListsKey)) {
      depth_ = 1;
    } else if (depth_ == 1 && key_ == kListsKey) {
      depth_ = 2;
      schedule_.ranks.emplace_back();
      require_action_count(kJsonReader, static_cast<std::int64_t>(schedule_.ranks.size()));
    } else {
      return unexpected("a list");
    }
    return true;
  }
  bool end_array() override {
    if (in_made_for_) {
      made_for_.end_list();
      return true;
    }
    --depth_;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::detail::exception&) override {
    fail(concat("no JSON at byte ", byte, "; ", keys_text()));
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    throw std::invalid_argument(std::string(kJsonReader) + ": " + what);
  }

  static std::string keys_text() {
    std::string text = "legal is one object with the keys";
    for (const std::string_view name : kKeyNames) (text += ' ') += name;
    return text;
  }

  [[nodiscard]] std::string where() const {
    if (!in_object_ || key_ == kKeys) return "the file";
    std::string text = "key '" + std::string(kKeyNames[key_]) + "'";
    if (depth_ == 2) {
      text += ", " + at_list(schedule_.ranks.size() - 1, schedule_.ranks.back().size());
    }
    return text;
  }

  bool unexpected(const std::string& what) const {
    static constexpr std::array<std::string_view, kKeys + 1> kLegal = {
        "the text \"sluice-schedule\"",
        "the number 1",
        "a text",
        "an integer from 1 up",
        "an integer from 1 up",
        "an integer from 1 up",
        "a list of ranks, one per stage",
        "a list per rank of actions such as \"0F0\"",
        MadeForHandler::kLegal,
        "one object"};
    fail(where() + " has " + what + "; legal is " +
         std::string(kLegal[in_object_ ? static_cast<std::size_t>(key_) : kKeys]));
  }

  int at_least_one(int value) const {
    if (value < 1) unexpected(concat("the number ", value));
    return value;
  }

  void number(int value) {
    if (depth_ == 1 && key_ == kPlacementKey) {
      require_action_count(kJsonReader, static_cast<std::int64_t>(placement_.size()) + 1);
      placement_.push_back(value);
    } else if (depth_ == 0 && key_ == kRanksKey) {
      ranks_ = at_least_one(value);
    } else if (depth_ == 0 && key_ == kStagesKey) {
      stages_ = at_least_one(value);
    } else if (depth_ == 0 && key_ == kMicroBatchesKey) {
      schedule_.micro_batches = at_least_one(value);
    } else if (depth_ == 0 && key_ == kVersionKey) {
      if (value != kScheduleFileVersion) {
        fail(concat("version ", value, "; this program reads version ", kScheduleFileVersion));
      }
    } else {
      unexpected(concat("the number ", value));
    }
  }

  void text(const std::string& value) {
    if (depth_ == 2) {
      step(value);
    } else if (depth_ == 0 && key_ == kFormatKey && value == kFormat) {
      return;
    } else if (depth_ == 0 && key_ == kNameKey) {
      if (value.empty() || value.size() > kMaxScheduleNameBytes || !printable(value)) {
        fail(concat("the name ", quoted_excerpt(value), " is not 1 to ", kMaxScheduleNameBytes,
                    " bytes without control characters"));
      }
      schedule_.name = value;
    } else {
      unexpected("the text " + quoted_excerpt(value));
    }
  }

  void step(const std::string& value) {
    std::vector<Step>& steps = schedule_.ranks.back();
    Step step;
    if (!is_action_text(value)) unexpected("the text " + quoted_excerpt(value));
    try {
      step = parse_step(value);
    } catch (const std::invalid_argument& error) {
      fail(at_list(schedule_.ranks.size() - 1, steps.size()) + ": " + error.what());
    }
    if (!is_compute(step.action.kind) && !is_sharding(step.action.kind)) {
      fail(at_list(schedule_.ranks.size() - 1, steps.size()) + ": " + to_string(step.action) +
           " does not compute; legal are F, B, I, W, overlapped pairs of them, UNSHARD, RESHARD "
           "and REDUCE_GRAD");
    }
    sharding_ += is_sharding(step.action.kind) ? 1 : 0;
    actions_ += step.overlapped ? 2 : 1;
    require_action_count(kJsonReader, actions_);
    steps.push_back(step);
  }

  ScheduleFile finish() {
    const auto agree = [&](std::size_t found, int said, const char* what, Key key) {
      if (found == static_cast<std::size_t>(said)) return;
      fail(concat("'", kKeyNames[key], "' has ", found, " entries, but the file says ", said, " ",
                  what));
    };
    agree(placement_.size(), stages_, "stages", kPlacementKey);
    agree(schedule_.ranks.size(), ranks_, "ranks", kListsKey);
    require_enough_actions(kJsonReader, stages_, schedule_.micro_batches, actions_ - sharding_);
    try {
      schedule_.placement = Placement::custom(ranks_, std::move(placement_));
    } catch (const std::invalid_argument& error) {
      fail(error.what());
    }
    find_forward_only(schedule_);
    ScheduleFile file;
    file.schedule = std::move(schedule_);
    if (!seen_[kMadeForKey]) return file;
    file.made_for = made_for_.take();
    if (const std::size_t entries = file.made_for->first_layer.size(); entries > 0) {
      agree(entries - 1, stages_, "stages, and first_layer one entry more", kMadeForKey);
    }
    return file;
  }

  Schedule schedule_;
  std::vector<int> placement_;
  std::array<bool, kKeys> seen_{};
  Key key_ = kKeys;
  int depth_ = 0;  // of lists
  bool in_object_ = false, in_made_for_ = false;
  MadeForHandler made_for_;
  int ranks_ = 0, stages_ = 0;
  std::int64_t actions_ = 0, sharding_ = 0;
};

}  // namespace

ScheduleFile parse_schedule_json(std::string_view text) {
  require_file_size(kJsonReader, text);
  return ScheduleHandler().take(text);
}

std::string to_schedule_json(const Schedule& schedule, const std::optional<MadeFor>& made_for) {
  if (schedule.name.empty() || schedule.name.size() > kMaxScheduleNameBytes ||
      !printable(schedule.name)) {
    refuse("the schedule's name ", quoted_excerpt(schedule.name), " is not 1 to ",
           kMaxScheduleNameBytes, " bytes without control characters");
  }
  const auto line = [](std::string_view key, const nlohmann::json& value) {
    return " \"" + std::string(key) +
           "\": " + value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + ",\n";
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
        throw std::invalid_argument(
            "schedule '" + schedule.name + "': " + to_string(step) +
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
