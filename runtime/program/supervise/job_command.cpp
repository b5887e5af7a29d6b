#include "runtime/program/supervise/job_command.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <sstream>

#include "comm/base/throw_error.hpp"
#include "runtime/process/supervisor_events.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"ranks", "hostfile", "pipeline", "replicas",
                                                    "tensor"};
// A name that begins with so many letters of a placeholder is a mistake, such as {hosts}.
constexpr std::size_t kSameLetters = 4;

constexpr std::array<std::string_view, 4> kSettings = {"OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_",
                                                       "OMPI_ALLOW_RUN_AS_ROOT"};
constexpr std::array<std::string_view, 6> kOfLaunchers = {"OMPI_", "PMIX_", "PRTE_",
                                                          "PMI_",  "HYDI_", "MV2_COMM_WORLD_"};

bool looks_like_a_name(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
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
    const bool is_one = !of_a_shell && looks_like_a_name(name);
    result += word.substr(0, is_one ? open : open + 1);
    if (is_one) result += value(name);
    word.remove_prefix(is_one ? close + 1 : open + 1);
  }
  return result.append(word);
}

template <std::size_t count>
bool begins_with_one(std::string_view text, const std::array<std::string_view, count>& beginnings) {
  return std::ranges::any_of(beginnings,
                             [&](std::string_view each) { return text.starts_with(each); });
}

// Whether a variable shows that this process is a rank itself. The variables of a Slurm script do
// not count: it may start jobs.
bool is_of_a_rank(std::string_view name, const std::string& value) {
  const bool of_others = name == "PMI_SIZE" || name == "MV2_COMM_WORLD_SIZE";
  return name == "OMPI_COMM_WORLD_SIZE" || (of_others && std::atoi(value.c_str()) > 1);
}

}  // namespace

JobCommand::JobCommand(std::vector<std::string> words) : words_(std::move(words)) {
  if (words_.empty() || words_.front().empty()) {
    throw_usage(
        "the command is missing; usage: sluice run [options] -- mpirun ... sluice train ...");
  }
  for (const std::string& word : words_) {
    (void)replaced(word, [this](std::string_view name) {
      if (std::ranges::find(kNames, name) != kNames.end()) used_.emplace(name);
      for (const std::string_view known : kNames) {
        const bool near = known.substr(0, kSameLetters) == name.substr(0, kSameLetters);
        if (used_.contains(name) || !near) continue;
        throw_usage(
            "unknown placeholder '{{{}}}'; did you mean '{}'? legal are {{ranks}}, {{hostfile}}, "
            "{{pipeline}}, {{replicas}} and {{tensor}}",
            name, known);
      }
      return std::string();
    });
  }
}

std::optional<int> JobCommand::number_of(std::string_view name) const {
  const std::string option = fmt::format("--{}", name);
  std::optional<int> found;
  bool follows = false;
  for (const std::string& word : words_) {
    std::istringstream in(word);
    for (std::string part; in >> part;) {
      const bool joined = part.starts_with(option) && part.substr(option.size()).starts_with('=');
      if (follows || joined) {  // the last one counts
        int number = 0;
        const std::string_view value =
            std::string_view(part).substr(joined ? option.size() + 1 : 0);
        found = parse_whole(value, number) && number >= 1 ? std::optional(number) : std::nullopt;
      }
      follows = part == option;
    }
  }
  return found;
}

std::vector<std::string> JobCommand::fill(const Placeholders& values) const {
  std::vector<std::string> words;
  for (const std::string& word : words_) {
    words.push_back(replaced(word, [&](std::string_view name) {
      const auto known = values.find(name);
      return known == values.end() ? "{" + std::string(name) + "}" : known->second;
    }));
  }
  return words;
}

std::vector<std::string> job_environment(std::span<const std::string> current) {
  std::vector<std::string> result;
  for (const std::string& entry : current) {
    const std::size_t end = std::min(entry.find('='), entry.size());
    const std::string_view name = std::string_view(entry).substr(0, end);
    if (is_of_a_rank(name, entry.substr(std::min(end + 1, entry.size())))) {
      throw_usage("'sluice run' is a rank of an MPI job; start it alone: it starts the launcher");
    }
    if (begins_with_one(name, kOfLaunchers) && !begins_with_one(name, kSettings)) continue;
    if (name != kSupervised) result.push_back(entry);
  }
  result.push_back(std::string(kSupervised) + "=1");
  result.push_back(std::string(kSupervisedByMpi) + "=1");
  return result;
}

}  // namespace sluice
