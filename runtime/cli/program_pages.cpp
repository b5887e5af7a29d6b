#include "runtime/cli/program_pages.hpp"

#include <fmt/format.h>

#include <iterator>

#include "runtime/options/option_pages.hpp"

namespace sluice {

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
    fmt::format_to(std::back_inserter(text), ".TP\n.B {}\n{}\n", name, roff_text(summary));
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
