#include <array>
#include <charconv>
#include <limits>
#include <system_error>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

struct KindRow {
  ActionKind kind;
  std::string_view name;
  bool has_micro_batch;
};

// Indexed by ActionKind.
constexpr std::array kKinds = {
    KindRow{ActionKind::kForward, "F", true},
    KindRow{ActionKind::kBackward, "B", true},
    KindRow{ActionKind::kBackwardInput, "I", true},
    KindRow{ActionKind::kBackwardWeight, "W", true},
    KindRow{ActionKind::kSendForward, "SEND_F", true},
    KindRow{ActionKind::kRecvForward, "RECV_F", true},
    KindRow{ActionKind::kSendBackward, "SEND_B", true},
    KindRow{ActionKind::kRecvBackward, "RECV_B", true},
    KindRow{ActionKind::kReduceGrad, "REDUCE_GRAD", false},
    KindRow{ActionKind::kReduceTied, "REDUCE_TIED", false},
    KindRow{ActionKind::kUnshard, "UNSHARD", false},
    KindRow{ActionKind::kReshard, "RESHARD", false},
    KindRow{ActionKind::kRecompute, "RECOMPUTE", true},
    KindRow{ActionKind::kOptimizer, "OPTIMIZER", false},
};

constexpr std::string_view kOverlapSuffix = ")OVERLAP_F_B";

// A program may have made the kind from any number.
const KindRow& row_of(ActionKind kind) {
  static constexpr KindRow kUnknown{ActionKind::kForward, "?", false};
  return at(kind) < kKinds.size() ? kKinds[at(kind)] : kUnknown;
}

std::string known_kinds() {
  std::string names;
  for (const KindRow& row : kKinds) {
    names += names.empty() ? "" : " ";
    names += row.name;
  }
  return names;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_kind_letter(char c) { return (c >= 'A' && c <= 'Z') || c == '_'; }

// Reads one action from left to right; every failure names the whole text.
class ActionReader {
 public:
  explicit ActionReader(std::string_view text) : text_(text), rest_(text) {}

  Action read() {
    Action action;
    action.stage = read_number("a stage index", std::numeric_limits<std::int32_t>::max());
    const KindRow& row = read_kind();
    action.kind = row.kind;
    if (row.has_micro_batch) {
      action.micro_batch = read_number(std::string(row.name) + " needs a micro-batch index",
                                       std::numeric_limits<std::int32_t>::max());
    }
    if (is_message(action.kind) && take('>')) {
      action.to_stage =
          read_number("'>' needs a stage index", std::numeric_limits<std::int32_t>::max());
    }
    if (take('@')) {
      action.copy = static_cast<std::uint8_t>(
          read_number("'@' needs a copy index", std::numeric_limits<std::uint8_t>::max()));
      if (action.copy == 0) fail("copy 0 is written without '@0'");
    }
    if (!rest_.empty()) {
      fail("unexpected '" + std::string(rest_) + "' after " + std::string(row.name) +
           (row.has_micro_batch ? " and its micro-batch" : ", which takes no micro-batch"));
    }
    return action;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorCode::kUsage, "action '" + std::string(text_) + "': " + why +
                                       "; legal is <stage><KIND>[micro_batch], e.g. 2F0, 3SEND_B1, "
                                       "0REDUCE_GRAD");
  }

  bool take(char c) {
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  std::int32_t read_number(const std::string& what, std::int32_t most) {
    std::size_t digits = 0;
    while (digits < rest_.size() && is_digit(rest_[digits])) ++digits;
    if (digits == 0) {
      fail(what + " expected at '" + std::string(rest_) + "'");
    }
    if (digits > 1 && rest_.front() == '0') {
      fail("number '" + std::string(rest_.substr(0, digits)) + "' has a leading zero");
    }
    std::int32_t value = 0;
    const auto result = std::from_chars(rest_.data(), rest_.data() + digits, value);
    if (result.ec != std::errc() || value > most) {
      fail(concat("number '", std::string(rest_.substr(0, digits)), "' exceeds ", most));
    }
    rest_.remove_prefix(digits);
    return value;
  }

  const KindRow& read_kind() {
    std::size_t letters = 0;
    while (letters < rest_.size() && is_kind_letter(rest_[letters])) ++letters;
    const std::string_view name = rest_.substr(0, letters);
    for (const KindRow& row : kKinds) {
      if (row.name == name) {
        rest_.remove_prefix(letters);
        return row;
      }
    }
    if (name.empty()) fail("a kind expected at '" + std::string(rest_) + "'");
    fail("unknown kind '" + std::string(name) + "', known are " + known_kinds());
  }

  std::string_view text_;
  std::string_view rest_;
};

}  // namespace

bool has_micro_batch(ActionKind kind) { return row_of(kind).has_micro_batch; }

std::string_view name_of(ActionKind kind) { return row_of(kind).name; }

std::string to_string(const Action& action) {
  std::string text = std::to_string(action.stage);
  text += name_of(action.kind);
  if (has_micro_batch(action.kind)) text += std::to_string(action.micro_batch);
  if (action.to_stage >= 0) text += concat('>', action.to_stage);
  if (action.copy != 0) text += concat('@', action.copy);
  return text;
}

std::string to_string(const Step& step) {
  if (!step.overlapped) return to_string(step.action);
  return '(' + to_string(step.action) + ';' + to_string(*step.overlapped) +
         std::string(kOverlapSuffix);
}

Action parse_action(std::string_view text) { return ActionReader(text).read(); }

Step parse_step(std::string_view text) {
  if (text.empty() || text.front() != '(') return Step{parse_action(text), std::nullopt};
  const std::string legal = "; legal is (<action>;<action>)OVERLAP_F_B, e.g. (0F7;7B3)OVERLAP_F_B";
  const std::size_t middle = text.find(';');
  if (!text.ends_with(kOverlapSuffix) || middle == std::string_view::npos) {
    throw Error(ErrorCode::kUsage,
                "step '" + std::string(text) + "' is not an overlapped pair" + legal);
  }
  const std::size_t end = text.size() - kOverlapSuffix.size();
  Step step{parse_action(text.substr(1, middle - 1)),
            parse_action(text.substr(middle + 1, end - middle - 1))};
  for (const Action& action : {step.action, *step.overlapped}) {
    if (!is_compute(action.kind)) {
      throw Error(ErrorCode::kUsage, "step '" + std::string(text) + "': " + to_string(action) +
                                         " does not compute, only F, B, I and W overlap" + legal);
    }
  }
  return step;
}

}  // namespace sluice
