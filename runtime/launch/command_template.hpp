// The command of a job with placeholders: {ranks}, {hostfile}, {pipeline}, {replicas}. Nothing else
// of a command is looked at: braces around other text, and "${ranks}" of a shell, stay as they are.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice {

using Placeholders = std::vector<std::pair<std::string, std::string>>;  // name, value

class CommandTemplate {
 public:
  // Error(kUsage) for no words, an empty first word, and a placeholder that is nearly one of the
  // four.
  explicit CommandTemplate(std::vector<std::string> words);

  [[nodiscard]] bool uses(std::string_view placeholder) const;
  // The words with the values in place. All placeholders that are used must be in `values`.
  [[nodiscard]] std::vector<std::string> fill(const Placeholders& values) const;
  // The first word, for messages.
  [[nodiscard]] const std::string& program() const { return words_.front(); }

 private:
  std::vector<std::string> words_;
};

}  // namespace sluice
