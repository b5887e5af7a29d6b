// The command of a job, with placeholders, and its environment.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

using Placeholders = std::map<std::string, std::string, std::less<>>;  // value by name

// A command with {ranks}, {hostfile}, {pipeline}, {replicas}, {tensor}. Braces around other text,
// and "${ranks}" of a shell, stay as they are.
class JobCommand {
 public:
  // Error(kUsage) for no words, an empty first word, and a name that begins like one of these.
  explicit JobCommand(std::vector<std::string> words);

  [[nodiscard]] bool uses(std::string_view placeholder) const {
    return used_.contains(placeholder);
  }
  // The number after --`option`, in a word or between blanks of one, as for a shell; none: there is
  // none, or what follows is no number from 1.
  [[nodiscard]] std::optional<int> number_of(std::string_view option) const;
  // The words with the values in place. All placeholders that are used must be in `values`.
  [[nodiscard]] std::vector<std::string> fill(const Placeholders& values) const;

 private:
  std::vector<std::string> words_;
  std::set<std::string, std::less<>> used_;
};

// `current` ("NAME=value") without what a launcher gives to its ranks, so that the launcher of the
// job starts as if by hand. Settings of a user stay: OMPI_MCA_*, PMIX_MCA_*, PRTE_MCA_* and
// OMPI_ALLOW_RUN_AS_ROOT*. Adds what makes ranks speak to the supervisor, on all hosts.
// Error(kUsage) for the environment of a rank that Open MPI has started, or of one of several.
[[nodiscard]] std::vector<std::string> job_environment(std::span<const std::string> current);

}  // namespace sluice
