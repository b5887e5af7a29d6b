#include "runtime/launch/command_template.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "comm/base/throw_error.hpp"
#include "runtime/options/option_table.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"ranks", "hostfile", "pipeline", "replicas"};
// A name that begins with so many letters of a placeholder is a mistake, such as {hosts}.
constexpr std::size_t kSameLetters = 4;

bool is_known(std::string_view name) {
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// "; did you mean 'ranks'?" for a name that is nearly a placeholder; empty for any other.
std::string nearly(std::string_view name) {
  for (const std::string_view known : kNames) {
    if (name.substr(0, kSameLetters) == known.substr(0, kSameLetters)) {
      return fmt::format("; did you mean '{}'?", known);
    }
  }
  return suggestion(name, {kNames.begin(), kNames.end()}, "");
}

bool looks_like_a_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || c == '_' || c == '-';
  });
}

// The word with each "{name}" replaced by value(name), in one pass: a value is not looked at again.
std::string replaced(std::string_view word,
                     const std::function<std::string(std::string_view name)>& value) {
  std::string result;
  while (true) {
    const std::size_t open = word.find('{');
    const std::size_t close = word.find('}', open == std::string_view::npos ? 0 : open);
    if (open == std::string_view::npos || close == std::string_view::npos) break;
    const std::string_view name = word.substr(open + 1, close - open - 1);
    const bool of_a_shell = open > 0 && word[open - 1] == '$';
    if (of_a_shell || !looks_like_a_name(name)) {
      result += word.substr(0, open + 1);
      word.remove_prefix(open + 1);
      continue;
    }
    result += word.substr(0, open);
    result += value(name);
    word.remove_prefix(close + 1);
  }
  return result.append(word);
}

}  // namespace

CommandTemplate::CommandTemplate(std::vector<std::string> words) : words_(std::move(words)) {
  if (words_.empty() || words_.front().empty()) {
    throw_usage(
        "the command is missing; usage: sluice run [options] -- mpirun ... sluice train ...");
  }
  for (const std::string& word : words_) {
    (void)replaced(word, [](std::string_view name) {
      if (!is_known(name)) {
        const std::string near = nearly(name);
        if (!near.empty()) {
          throw_usage(
              "unknown placeholder '{{{}}}'{} legal are {{ranks}}, {{hostfile}}, {{pipeline}} and "
              "{{replicas}}",
              name, near);
        }
      }
      return std::string();
    });
  }
}

bool CommandTemplate::uses(std::string_view placeholder) const {
  bool found = false;
  for (const std::string& word : words_) {
    (void)replaced(word, [&](std::string_view name) {
      found = found || name == placeholder;
      return std::string();
    });
  }
  return found;
}

std::vector<std::string> CommandTemplate::fill(const Placeholders& values) const {
  std::vector<std::string> words;
  for (const std::string& word : words_) {
    words.push_back(replaced(word, [&](std::string_view name) {
      for (const auto& [known, value] : values) {
        if (known == name) return value;
      }
      return fmt::format("{{{}}}", name);
    }));
  }
  return words;
}

}  // namespace sluice
