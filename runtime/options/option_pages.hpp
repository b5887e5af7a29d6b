// The options of one command as a part of the manual page (roff, man(7)) and of the completion for
// bash.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace sluice {

struct OptionLine {
  std::string_view heading, name, placeholder;  // no placeholder: a flag
  std::string help;                             // with the default
};

// `text` as it stands: no character starts a request or an escape of roff.
[[nodiscard]] std::string roff_text(std::string_view text);

// A section `program`, e.g. "sluice train": the usage, what `about` says and the options under
// their headings. Lines of `about` that begin with a blank are commands, set apart.
[[nodiscard]] std::string man_section(std::string_view program, std::string_view usage,
                                      std::string_view about, std::span<const OptionLine> options);

// The branch for `program` in `case $command in`: sets `options`, all options with their dashes;
// `words`, the legal words of the option $previous; `value` to 1 where $previous takes a value, and
// `argument` to 1 where the command takes an argument.
[[nodiscard]] std::string bash_branch(std::string_view program, bool argument,
                                      std::span<const OptionLine> options);

}  // namespace sluice
