// The manual page of the program (roff, man(7)) and its completion for bash: the parts that the
// commands' option tables write, and what stands around them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace sluice {

struct OptionLine {
  std::string_view heading, name, placeholder;  // no placeholder: a flag
  std::string help;                             // with the default
};

// A section `program`, e.g. "sluice train": the usage, what `about` says and the options under
// their headings. Lines of `about` that begin with a blank are commands, set apart.
[[nodiscard]] std::string man_section(std::string_view program, std::string_view usage,
                                      std::string_view about, std::span<const OptionLine> options);

// The branch for `program` in `case $command in`: sets `options`, all options with their dashes;
// `words`, the legal words of the option $previous; `value` to 1 where $previous takes a value, and
// `argument` to 1 where the command takes an argument.
[[nodiscard]] std::string bash_branch(std::string_view program, bool argument,
                                      std::span<const OptionLine> options);

using CommandSummary = std::pair<std::string_view, std::string_view>;  // name, what it does

// What comes before the sections of the commands, and what comes after them.
[[nodiscard]] std::string man_head(std::string_view version,
                                   std::span<const CommandSummary> commands);
[[nodiscard]] std::string man_tail(std::string_view exit_codes);

// What comes before the branches of the commands, and what comes after them.
[[nodiscard]] std::string bash_head(std::span<const CommandSummary> commands);
[[nodiscard]] std::string bash_tail();

}  // namespace sluice
