#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <system_error>

#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

// Indexed by ActionKind.
constexpr auto kKindNames = std::to_array<std::string_view>(
    {"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "REDUCE_TIED",
     "UNSHARD", "RESHARD", "OPTIMIZER", "OFFLOAD", "FETCH", "RECOMPUTE"});
static_assert(kKindNames.size() == at(ActionKind::kRecompute) + 1);

constexpr std::string_view kOverlapSuffix = ")OVERLAP_F_B";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_kind_letter(char c) { return (c >= 'A' && c <= 'Z') || c == '_'; }

// Reads one action from left to right; every failure names the whole text.
class ActionReader {
 public:
  explicit ActionReader(std::string_view text) : text_(text), rest_(text) {}

  Action read() {
    Action action;
    action.stage = read_number("a stage index");
    action.kind = read_kind();
    const std::string name(name_of(action.kind));
    const bool numbered = has_micro_batch(action.kind);
    if (numbered) action.micro_batch = read_number(name + " needs a micro-batch index");
    if (!rest_.empty()) {
      fail("unexpected '", rest_, "' after ", name,
           (numbered ? " and its micro-batch" : ", which takes no micro-batch"));
    }
    return action;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... why) const {
    refuse("action '", text_, "': ", why...,
           "; legal is <stage><KIND>[micro_batch], e.g. 2F0, 3SEND_B1, 0REDUCE_GRAD");
  }

  std::int32_t read_number(const std::string& what) {
    std::size_t digits = 0;
    while (digits < rest_.size() && is_digit(rest_[digits])) ++digits;
    if (digits == 0) {
      fail(what, " expected at '", rest_, "'");
    }
    if (digits > 1 && rest_.front() == '0') {
      fail("number '", rest_.substr(0, digits), "' has a leading zero");
    }
    std::int32_t value = 0;
    const auto result = std::from_chars(rest_.data(), rest_.data() + digits, value);
    if (result.ec != std::errc()) {
      fail("number '", rest_.substr(0, digits), "' exceeds ",
           std::numeric_limits<std::int32_t>::max());
    }
    rest_.remove_prefix(digits);
    return value;
  }

  ActionKind read_kind() {
    std::size_t letters = 0;
    while (letters < rest_.size() && is_kind_letter(rest_[letters])) ++letters;
    const std::string_view name = rest_.substr(0, letters);
    const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
    if (found != kKindNames.end()) {
      rest_.remove_prefix(letters);
      return static_cast<ActionKind>(found - kKindNames.begin());
    }
    if (name.empty()) fail("a kind expected at '", rest_, "'");
    std::string known;
    for (const std::string_view each : kKindNames) known.append(" ").append(each);
    fail("unknown kind '", name, "', known are", known);
  }

  std::string_view text_;
  std::string_view rest_;
};

}  // namespace

std::string_view name_of(ActionKind kind) {
  return at(kind) < kKindNames.size() ? kKindNames[at(kind)] : "?";
}

std::string to_string(const Action& action) {
  std::string text = std::to_string(action.stage);
  text += name_of(action.kind);
  if (has_micro_batch(action.kind)) text += std::to_string(action.micro_batch);
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
    refuse("step '", text, "' is not an overlapped pair", legal);
  }
  const std::size_t end = text.size() - kOverlapSuffix.size();
  Step step{parse_action(text.substr(1, middle - 1)),
            parse_action(text.substr(middle + 1, end - middle - 1))};
  for (const Action& action : {step.action, *step.overlapped}) {
    if (!is_compute(action.kind)) {
      refuse("step '", text, "': ", action, " does not compute, only F, B, I and W overlap", legal);
    }
  }
  return step;
}

}  // namespace sluice
