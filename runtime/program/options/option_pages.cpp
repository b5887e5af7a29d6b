#include "runtime/program/options/option_pages.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>
#include <vector>

#include "comm/base/joined.hpp"

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
    if (std::ranges::none_of(word, is_upper)) words.push_back(word);
  }
  return placeholder.find('|') == std::string_view::npos ? std::vector<std::string>() : words;
}

// The text as it stands: no character starts a request or an escape of roff.
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
      result += fmt::format(".SS {}\n", roff_text(heading));
    }
    result += fmt::format(".TP\n\\fB\\-\\-{}\\fR", roff_text(option.name));
    if (!option.placeholder.empty()) {
      result += fmt::format(" \\fI{}\\fR", roff_text(option.placeholder));
    }
    result += fmt::format("\n{}\n", roff_text(option.help));
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
    choices += fmt::format("        {}) words='{}' ;;\n", names.back(), joined(words, " "));
  }
  std::string result =
      fmt::format("    '{}')\n      options='{}' argument={}\n",
                  program.substr(program.find(' ') + 1), joined(names, " "), argument ? 1 : 0);
  if (!valued.empty()) {
    result += fmt::format("      case $previous in\n        {}) value=1 ;;\n      esac\n",
                          joined(valued, " | "));
  }
  if (!choices.empty()) {
    result += fmt::format("      case $previous in\n{}      esac\n", choices);
  }
  return result + "      ;;\n";
}

std::string man_head(std::string_view version, std::span<const CommandSummary> commands) {
  std::string text = fmt::format(R"(.TH SLUICE 1 "" "Sluice {}" "Sluice"
.ad l
.SH NAME
sluice \- pipeline\-parallel training over MPI
.SH SYNOPSIS
.B sluice
.I command
.RI [ options ]
.PP
.B sluice \-\-version
.SH DESCRIPTION
Sluice plans, checks and executes pipeline\-parallel training. Its commands are:
)",
                                 version);
  for (const auto& [name, summary] : commands) {
    text += fmt::format(".TP\n.B {}\n{}\n", name, roff_text(summary));
  }
  return text +
         ".PP\n\\fBsluice\\fR \\fIcommand\\fR \\fB\\-\\-help\\fR lists the options of a command.\n";
}

std::string man_tail(std::string_view exit_codes) {
  return fmt::format(".SH EXIT STATUS\n{}\n.SH SEE ALSO\n.BR mpirun (1)\n", roff_text(exit_codes));
}

std::string bash_head(std::span<const CommandSummary> commands) {
  std::string text = R"(# Completion of sluice for bash, made from its option tables.
_sluice() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local command=${COMP_WORDS[1]} options='' words='' value=0 argument=0
  # --option=value is three words.
  if [[ $current == = ]]; then
    current=
  elif [[ $previous == = ]]; then
    previous=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W 'help_words' -- "$current")
    return
  fi
  if [[ $command == schedule && ${COMP_WORDS[2]} =~ ^(auto|compare)$ ]] && ((COMP_CWORD > 2)); then
    command+=" ${COMP_WORDS[2]}"
  fi
  case $command in
)";
  std::string words;
  for (const auto& [name, summary] : commands) words.append(name).append(" ");
  words += "--help --version";
  constexpr std::string_view kPlace = "help_words";
  return text.replace(text.find(kPlace), kPlace.size(), words);
}

std::string bash_tail() {
  return R"(    *) return ;;
  esac
  if [[ $command == schedule ]] && ((COMP_CWORD == 2)); then options+=' auto compare'; fi
  # No reply leaves it to bash, which completes names of files.
  if ((value == 1)); then
    if [[ -n $words ]]; then mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current"); fi
  elif [[ $current == -* ]] || ((argument == 0)); then
    mapfile -t COMPREPLY < <(compgen -W "$options --help" -- "$current")
  fi
}
complete -o bashdefault -o default -F _sluice sluice
)";
}

}  // namespace sluice
