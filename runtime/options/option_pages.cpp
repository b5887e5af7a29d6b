#include "runtime/options/option_pages.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>
#include <vector>

namespace sluice {
namespace {

bool is_upper(char letter) { return std::isupper(static_cast<unsigned char>(letter)) != 0; }

char to_upper(char letter) {
  return static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
}

// The legal words among the alternatives of a placeholder; "FILE" and "N" stand for others.
std::vector<std::string> words_of(std::string_view placeholder) {
  std::vector<std::string> words;
  std::istringstream alternatives{std::string(placeholder)};
  for (std::string word; std::getline(alternatives, word, '|');) {
    if (std::none_of(word.begin(), word.end(), is_upper)) words.push_back(word);
  }
  return placeholder.find('|') == std::string_view::npos ? std::vector<std::string>() : words;
}

// Paragraphs; indented lines are kept as they are.
std::string roff_paragraphs(std::string_view about) {
  std::string result = ".PP\n";
  std::istringstream lines{std::string(about)};
  bool example = false, parted = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) {
      parted = true;
      continue;
    }
    const bool indented = line.starts_with(' ');
    if (example && !indented) result += ".EE\n";
    if (parted) result += ".PP\n";
    if (indented && !example) result += ".EX\n";
    result += roff_text(line) + '\n';
    example = indented;
    parted = false;
  }
  if (example) result += ".EE\n";
  return result;
}

}  // namespace

std::string roff_text(std::string_view text) {
  std::string result = text.starts_with('.') || text.starts_with('\'') ? "\\&" : "";
  for (const char letter : text) {
    if (letter == '\\') {
      result += "\\e";
    } else if (letter == '-') {
      result += "\\-";
    } else if (letter == '\'') {
      result += "\\(aq";
    } else if (letter == '|') {
      result += "|\\:";  // a line may break here
    } else {
      result += letter;
    }
  }
  return result;
}

std::string man_section(std::string_view program, std::string_view usage, std::string_view about,
                        std::span<const OptionLine> options) {
  std::string name(program);
  std::transform(name.begin(), name.end(), name.begin(), to_upper);
  std::string result =
      fmt::format(".SH {}\n.B {}\n{}", name, roff_text(usage), roff_paragraphs(about));
  std::string_view heading;
  for (const OptionLine& option : options) {
    if (option.heading != heading) {
      heading = option.heading;
      fmt::format_to(std::back_inserter(result), ".SS {}\n", roff_text(heading));
    }
    fmt::format_to(std::back_inserter(result), ".TP\n\\fB\\-\\-{}\\fR", roff_text(option.name));
    if (!option.placeholder.empty()) {
      fmt::format_to(std::back_inserter(result), " \\fI{}\\fR", roff_text(option.placeholder));
    }
    fmt::format_to(std::back_inserter(result), "\n{}\n", roff_text(option.help));
  }
  return result;
}

std::string bash_branch(std::string_view program, bool argument,
                        std::span<const OptionLine> options) {
  std::vector<std::string> names, valued;
  std::string choices;
  for (const OptionLine& option : options) {
    names.push_back(fmt::format("--{}", option.name));
    if (option.placeholder.empty()) continue;
    valued.push_back(names.back());
    const std::vector<std::string> words = words_of(option.placeholder);
    if (words.empty()) continue;
    fmt::format_to(std::back_inserter(choices), "        {}) words='{}' ;;\n", names.back(),
                   fmt::join(words, " "));
  }
  std::string result =
      fmt::format("    '{}')\n      options='{}' argument={}\n",
                  program.substr(program.find(' ') + 1), fmt::join(names, " "), argument ? 1 : 0);
  if (!valued.empty()) {
    fmt::format_to(std::back_inserter(result),
                   "      case $previous in\n        {}) value=1 ;;\n      esac\n",
                   fmt::join(valued, " | "));
  }
  if (!choices.empty()) {
    fmt::format_to(std::back_inserter(result), "      case $previous in\n{}      esac\n", choices);
  }
  return result + "      ;;\n";
}

}  // namespace sluice
