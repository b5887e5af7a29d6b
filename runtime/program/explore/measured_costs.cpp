#include "runtime/program/explore/measured_costs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/mapped_file.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMostCollectiveBytes = std::uint64_t{1} << 53;

struct Sum {
  double milliseconds = 0;
  std::int64_t count = 0;

  void add(double more) {
    milliseconds += more;
    ++count;
  }
  [[nodiscard]] double mean() const {
    return count == 0 ? 0 : milliseconds / static_cast<double>(count);
  }
};

// Of one stage's actions that compute, whose kinds are the first four.
// [F, B, I, W, RECOMPUTE]
struct Sums : std::array<Sum, 5> {
  [[nodiscard]] static std::size_t place(ActionKind kind) {
    return kind == ActionKind::kRecompute ? 4 : static_cast<std::size_t>(kind);
  }
  [[nodiscard]] const Sum& of(ActionKind kind) const { return (*this)[place(kind)]; }
};

// One tensor: made by `kind` of the stage for the micro-batch.
struct Tensor {
  int replica = 0;
  bool forward = true;
  int stage = 0, micro_batch = 0;
  friend auto operator<=>(const Tensor&, const Tensor&) = default;
};

// When the steps of the trace made or received it, milliseconds, one entry per step.
struct Ends {
  std::vector<double> made, received;
};

// Throws std::runtime_error with `what` as a sentence about the profile; read_measured_costs() adds
// its name.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) {
  throw std::runtime_error(fmt::format(what, std::forward<Args>(args)...));
}

// The field, or null where `json` is no object or lacks it.
const Json& field(const Json& json, const char* key) {
  static const Json null;
  const auto found = json.find(key);
  return found == json.end() ? null : *found;
}

double number(const Json& event, const char* key) {
  const Json& found = field(event, key);
  if (!found.is_number() || !std::isfinite(found.get<double>())) {
    fail("has an event without the number '{}': {}", key, dump_json(event));
  }
  return found.get<double>();
}

// The layers of the run's stages, as LayerTable writes them (runtime/report/timeline.hpp).
struct Layers {
  std::vector<int> first;         // as LayerTable::first_layer; empty: the file says none
  std::vector<StageTimes> times;  // [layer]
  int tensor_ranks = 1, tensor_shards = 1;
  std::vector<StageCollectives> collectives;  // [layer]; empty: the file says none
};

double time_of(const Json& json) {
  const double time = json.is_number() ? json.get<double>() : -1;
  if (!std::isfinite(time) || time < 0) {
    fail("has a time of a layer that is none: {}", dump_json(json));
  }
  return time;
}

std::vector<PlannedCollective> calls_of(const Json& json) {
  std::vector<PlannedCollective> calls;
  const auto wrong = [&] { fail("has collectives of a layer that are none: {}", dump_json(json)); };
  if (!json.is_array()) wrong();
  for (const Json& each : json) {
    if (!each.is_array() || each.size() != 2 || !each[1].is_number_unsigned()) wrong();
    int kind = 0;
    while (kind < kCollectiveKinds && each[0] != name_of(static_cast<CollectiveKind>(kind))) ++kind;
    if (kind == kCollectiveKinds || each[1].get<std::uint64_t>() > kMostCollectiveBytes) wrong();
    calls.push_back({.kind = static_cast<CollectiveKind>(kind), .bytes = each[1]});
  }
  return calls;
}

void read_collectives(const Json& json, Layers& layers) {
  const Json& lists = field(json, "collectives");
  if (lists.is_null()) return;
  const auto count = [&](const char* key) {
    const Json& value = field(json, key);
    const std::int64_t number = value.is_number_integer() ? value.get<std::int64_t>() : 0;
    if (number < 1 || number > std::numeric_limits<int>::max()) {
      fail("has layers with '{}' {}; legal is a whole number from 1", key, dump_json(value));
    }
    return static_cast<int>(number);
  };
  layers.tensor_ranks = count("tensor_ranks");
  layers.tensor_shards = count("tensor_shards");
  if (!lists.is_array() || lists.size() != layers.times.size()) {
    fail("has {} layers, and collectives of {}", layers.times.size(), lists.size());
  }
  for (const Json& each : lists) {
    if (!each.is_array() || each.size() != 3) {
      fail("has collectives of a layer that are none: {}", dump_json(each));
    }
    layers.collectives.push_back({.forward = calls_of(each[0]),
                                  .backward_input = calls_of(each[1]),
                                  .backward_weight = calls_of(each[2])});
  }
}

Layers layers_of(const Json& json) {
  Layers layers;
  if (json.is_null()) return layers;
  const Json &first = field(json, "first"), &times = field(json, "times");
  const auto wrong = [&] {
    fail("has layers without their stages and times: {}", dump_json(json));
  };
  if (!first.is_array() || !times.is_array() || first.size() < 2 || times.empty()) wrong();
  for (const Json& each : first) {
    const std::int64_t layer = each.is_number_integer() ? each.get<std::int64_t>() : -1;
    const int least = layers.first.empty() ? 0 : layers.first.back();
    const auto most = layers.first.empty() ? 0 : static_cast<std::int64_t>(times.size());
    if (layer < least || layer > most) wrong();
    layers.first.push_back(static_cast<int>(layer));
  }
  if (layers.first.back() != static_cast<int>(times.size())) wrong();
  for (const Json& each : times) {
    if (!each.is_array() || each.size() != 3) wrong();
    layers.times.push_back({time_of(each[0]), time_of(each[1]), time_of(each[2])});
  }
  read_collectives(json, layers);
  return layers;
}

class TraceReader {
 public:
  MeasuredCosts read(std::string_view text, double input_share) {
    const Json json = parse_json(text, NoJson::kDiscard);
    const Json& events = field(json, "traceEvents");
    if (!events.is_array()) {
      fail("is no trace; legal is what 'sluice train' writes for --trace");
    }
    layers_ = layers_of(field(json, "layers"));
    for (const Json& event : events) read_label(event);
    for (const Json& event : events) read_event(event);
    return summary(input_share);
  }

 private:
  // "rank 3: replica 1, pipeline rank 1" of process 3.
  void read_label(const Json& event) {
    const Json& pid = field(event, "pid");
    const Json& name = field(field(event, "args"), "name");
    if (field(event, "name") != "process_name" || !pid.is_number_integer() || !name.is_string()) {
      return;
    }
    constexpr std::string_view kWord = "replica ";
    const std::string& label = name.get_ref<const std::string&>();
    const std::size_t at = label.find(kWord);
    if (at == std::string::npos) return;
    int replica = 0;
    const char* const begin = label.data() + at + kWord.size();
    if (std::from_chars(begin, label.data() + label.size(), replica).ec == std::errc()) {
      replicas_[pid.get<std::int64_t>()] = replica;
    }
  }

  static Action action_of(const Json& event) {
    try {
      return parse_action(field(event, "name").get<std::string>());
    } catch (const std::exception&) {  // no string, or no action
      fail("has an event that is no action: {}", dump_json(event));
    }
  }

  void read_event(const Json& event) {
    const Json& category = field(event, "cat");
    if (field(event, "ph") != "X" || (category != "compute" && category != "receives")) return;
    const double start = number(event, "ts") / 1000;
    const double time = number(event, "dur") / 1000;
    const Action action = action_of(event);
    if (time < 0) fail("has an event that is no action: {}", dump_json(event));
    const Json& pid = field(event, "pid");
    const auto found = replicas_.find(pid.is_number_integer() ? pid.get<std::int64_t>() : -1);
    const int replica = found == replicas_.end() ? 0 : found->second;
    const bool again = action.kind == ActionKind::kRecompute;
    if (again || is_compute(action.kind)) {
      stages_[action.stage][Sums::place(action.kind)].add(time);
      if (again) return;
      if (action.kind == ActionKind::kBackwardWeight) return;
      const bool forward = action.kind == ActionKind::kForward;
      tensors_[{replica, forward, action.stage, action.micro_batch}].made.push_back(start + time);
    } else if (is_message(action.kind)) {
      const bool forward = action.kind == ActionKind::kRecvForward;
      const int maker = action.stage + (forward ? -1 : 1);
      tensors_[{replica, forward, maker, action.micro_batch}].received.push_back(start + time);
    }
  }

  MeasuredCosts summary(double input_share) const {
    MeasuredCosts costs;
    std::int64_t whole = 0, split = 0;
    for (const auto& [stage, sums] : stages_) {
      if (stage != static_cast<int>(costs.stages.size())) {
        fail("has no compute of stage {}, but of stage {}", costs.stages.size(), stage);
      }
      const Sum &forward = sums.of(ActionKind::kForward),
                &backward = sums.of(ActionKind::kBackward),
                &input = sums.of(ActionKind::kBackwardInput);
      if (forward.count == 0) fail("has no forward of stage {}", stage);
      costs.stages.push_back({.forward = forward.mean(),
                              .backward_input = backward.mean() * input_share + input.mean() +
                                                sums.of(ActionKind::kRecompute).mean(),
                              .backward_weight = backward.mean() * (1 - input_share) +
                                                 sums.of(ActionKind::kBackwardWeight).mean()});
      whole += backward.count;
      split += input.count;
    }
    if (costs.stages.empty()) fail("has no compute actions");
    if (whole + split == 0) fail("has no backward actions; a profile comes from training");
    if (!layers_.first.empty() && layers_.first.size() != costs.stages.size() + 1) {
      fail("says the layers of {} stages, but has compute of {}", layers_.first.size() - 1,
           costs.stages.size());
    }
    costs.layers = layers_.times;
    costs.first_layer = layers_.first;
    costs.tensor_ranks = layers_.tensor_ranks;
    costs.tensor_shards = layers_.tensor_shards;
    costs.collectives = layers_.collectives;
    costs.message = quickest_message();
    costs.source = fmt::format("means of {} stages in milliseconds, messages take {:.4g}",
                               costs.stages.size(), costs.message);
    if (!costs.layers.empty()) costs.source += fmt::format("; {} layers", costs.layers.size());
    if (whole > 0) {
      costs.source += fmt::format(
          "; backwards are whole in it, counted as {:.4g} input half and "
          "{:.4g} weight half",
          input_share, 1 - input_share);
    }
    return costs;
  }

  [[nodiscard]] double quickest_message() const {
    double quickest = std::numeric_limits<double>::infinity();
    for (const auto& [tensor, ends] : tensors_) {
      if (ends.made.size() != ends.received.size()) continue;
      std::vector<double> made = ends.made, received = ends.received;
      std::sort(made.begin(), made.end());
      std::sort(received.begin(), received.end());
      for (std::size_t i = 0; i < made.size(); ++i) {
        quickest = std::min(quickest, std::max(0.0, received[i] - made[i]));
      }
    }
    return std::isfinite(quickest) ? quickest : 0;
  }

  Layers layers_;
  std::map<std::int64_t, int> replicas_;  // [process]
  std::map<int, Sums> stages_;
  std::map<Tensor, Ends> tensors_;
};

}  // namespace

MeasuredCosts read_measured_costs(const std::filesystem::path& path, double input_share) {
  const MappedFile file(path, ErrorCode::kData);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  try {
    MeasuredCosts costs = TraceReader().read(text, input_share);
    costs.source = fmt::format("{}: {}", path.string(), costs.source);
    return costs;
  } catch (const std::runtime_error& error) {
    throw_error(ErrorCode::kData, "profile '{}' {}", path.string(), error.what());
  }
}

}  // namespace sluice
