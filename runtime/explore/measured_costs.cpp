#include "runtime/explore/measured_costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

#include "runtime/files/mapped_file.hpp"

namespace sluice {
namespace {

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

// Of one stage.
struct Sums {
  Sum forward, backward, backward_input, backward_weight;
};

Sum& sum_of(Sums& sums, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return sums.forward;
    case ActionKind::kBackwardInput:
      return sums.backward_input;
    case ActionKind::kBackwardWeight:
      return sums.backward_weight;
    default:
      return sums.backward;
  }
}

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

class TraceReader {
 public:
  explicit TraceReader(std::string file) : file_(std::move(file)) {}

  MeasuredCosts read(std::string_view text, double input_share) {
    const auto json = nlohmann::json::parse(text, nullptr, false);
    const auto events = json.is_object() ? json.find("traceEvents") : json.end();
    if (json.is_discarded() || events == json.end() || !events->is_array()) {
      fail(
          "is neither a trace nor metrics; legal is what 'sluice train' writes for --trace or "
          "--metrics");
    }
    for (const nlohmann::json& event : *events) read_label(event);
    for (const nlohmann::json& event : *events) read_event(event);
    return summary(input_share);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorCode::kData, fmt::format("profile '{}' {}", file_, why));
  }

  // "rank 3: replica 1, pipeline rank 1" of process 3.
  void read_label(const nlohmann::json& event) {
    if (!event.is_object() || event.value("name", nlohmann::json()) != "process_name") return;
    const auto pid = event.find("pid");
    const auto args = event.find("args");
    if (pid == event.end() || !pid->is_number_integer() || args == event.end()) return;
    const auto name = args->is_object() ? args->find("name") : args->end();
    if (!args->is_object() || name == args->end() || !name->is_string()) return;
    constexpr std::string_view kWord = "replica ";
    const std::string& label = name->get_ref<const std::string&>();
    const std::size_t at = label.find(kWord);
    if (at == std::string::npos) return;
    int replica = 0;
    const char* const begin = label.data() + at + kWord.size();
    if (std::from_chars(begin, label.data() + label.size(), replica).ec == std::errc()) {
      replicas_[pid->get<std::int64_t>()] = replica;
    }
  }

  void read_event(const nlohmann::json& event) {
    if (!event.is_object() || event.value("ph", nlohmann::json()) != "X") return;
    const nlohmann::json category = event.value("cat", nlohmann::json());
    if (category != "compute" && category != "receives") return;
    const double start = number(event, "ts") / 1000;
    const double time = number(event, "dur") / 1000;
    const nlohmann::json name = event.value("name", nlohmann::json());
    std::optional<Action> action;
    try {
      if (name.is_string()) action = parse_action(name.get_ref<const std::string&>());
    } catch (const std::invalid_argument&) {
    }
    if (!action || time < 0) fail("has an event that is no action: " + event.dump());
    const auto found = replicas_.find(event.value("pid", nlohmann::json()).is_number_integer()
                                          ? event["pid"].get<std::int64_t>()
                                          : -1);
    const int replica = found == replicas_.end() ? 0 : found->second;
    if (is_compute(action->kind)) {
      sum_of(stages_[action->stage], action->kind).add(time);
      if (action->kind != ActionKind::kBackwardWeight) {
        const bool forward = action->kind == ActionKind::kForward;
        tensors_[{replica, forward, action->stage, action->micro_batch}].made.push_back(start +
                                                                                        time);
      }
    } else if (is_message(action->kind)) {
      const bool forward = action->kind == ActionKind::kRecvForward;
      const int maker = action->stage + (forward ? -1 : 1);
      tensors_[{replica, forward, maker, action->micro_batch}].received.push_back(start + time);
    }
  }

  double number(const nlohmann::json& event, const char* key) const {
    const auto found = event.find(key);
    if (found == event.end() || !found->is_number() || !std::isfinite(found->get<double>())) {
      fail(fmt::format("has an event without the number '{}': {}", key, event.dump()));
    }
    return found->get<double>();
  }

  MeasuredCosts summary(double input_share) {
    MeasuredCosts costs;
    std::int64_t whole = 0, parted = 0;
    for (const auto& [stage, sums] : stages_) {
      if (stage != static_cast<int>(costs.stages.size())) {
        fail(
            fmt::format("has no compute of stage {}, but of stage {}", costs.stages.size(), stage));
      }
      if (sums.forward.count == 0) fail(fmt::format("has no forward of stage {}", stage));
      const double backward = sums.backward.mean();
      costs.stages.push_back(
          {.forward = sums.forward.mean(),
           .backward_input = backward * input_share + sums.backward_input.mean(),
           .backward_weight = backward * (1 - input_share) + sums.backward_weight.mean()});
      whole += sums.backward.count;
      parted += sums.backward_input.count;
    }
    if (costs.stages.empty()) fail("has no compute actions");
    if (whole + parted == 0) {
      fail("has no backward actions; a profile comes from training");
    }
    costs.message = quickest_message();
    costs.source = fmt::format("{}: means of {} stages in milliseconds, messages take {:.4g}",
                               file_, costs.stages.size(), costs.message);
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

  std::string file_;
  std::map<std::int64_t, int> replicas_;  // [process]
  std::map<int, Sums> stages_;
  std::map<Tensor, Ends> tensors_;
};

// Metrics know how long ranks were busy, but neither kinds nor stages.
class MetricsReader {
 public:
  explicit MetricsReader(std::string file) : file_(std::move(file)) {}

  MeasuredCosts read(std::string_view text, double input_share) {
    for (int line = 1; !text.empty(); ++line) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      read_line(nlohmann::json::parse(text.substr(0, end), nullptr, false), line);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (busy_.empty()) fail("has no step");
    if (busy_.size() > 1) busy_.erase(busy_.begin());  // the first step warms up
    Sum busy;
    for (const double each : busy_) busy.add(each);
    const double work = busy.mean() / micro_batches_;  // of one micro-batch on one rank's share
    constexpr double kForwardShare = 1.0 / 3;
    const double backward = work * (1 - kForwardShare);
    MeasuredCosts costs;
    costs.stages.assign(ranks_, {.forward = work * kForwardShare,
                                 .backward_input = backward * input_share,
                                 .backward_weight = backward * (1 - input_share)});
    costs.source = fmt::format(
        "{}: metrics tell how long ranks were busy (mean of {} steps), not with what: {} ranks "
        "counted alike, a third forward, {:.4g} of the rest input half, messages 0; milliseconds",
        file_, busy_.size(), costs.stages.size(), input_share);
    return costs;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorCode::kData, fmt::format("profile '{}' {}", file_, why));
  }

  void read_line(const nlohmann::json& json, int line) {
    if (!json.is_object() || !json.contains("step")) {
      fail(fmt::format("is neither a trace nor metrics of 'sluice train': line {}", line));
    }
    if (line == 1) micro_batches_ = micro_batches(json);
    if (json.contains("val_loss")) return;
    const auto seconds = json.value("seconds", nlohmann::json());
    const auto bubble = json.value("bubble_measured", nlohmann::json());
    const auto ranks = json.value("peak_in_flight", nlohmann::json());
    const bool legal = seconds.is_number() && bubble.is_number() && seconds.get<double>() >= 0 &&
                       bubble.get<double>() >= 0 && bubble.get<double>() <= 1 && ranks.is_array() &&
                       !ranks.empty();
    if (!legal) {
      fail(fmt::format("lacks seconds, bubble_measured or peak_in_flight in line {}", line));
    }
    ranks_ = ranks.size();
    busy_.push_back(seconds.get<double>() * (1 - bubble.get<double>()) * 1000);
  }

  // Of the run that the first line describes.
  int micro_batches(const nlohmann::json& json) const {
    const nlohmann::json::json_pointer pointer("/run/options/micro-batches");
    const auto found = json.contains(pointer) ? json.at(pointer) : nlohmann::json();
    const std::string text = found.is_string() ? found.get<std::string>() : "";
    int value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || value < 1) {
      fail("does not say the run's micro-batches in its first line");
    }
    return value;
  }

  std::string file_;
  int micro_batches_ = 1;
  std::size_t ranks_ = 1;     // of the pipeline
  std::vector<double> busy_;  // [step] milliseconds of a rank, mean over ranks
};

}  // namespace

MeasuredCosts read_measured_costs(const std::filesystem::path& path, double input_share) {
  const MappedFile file(path, ErrorCode::kData);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  const bool metrics = text.starts_with("{\"step\"");
  return metrics ? MetricsReader(path.string()).read(text, input_share)
                 : TraceReader(path.string()).read(text, input_share);
}

}  // namespace sluice
