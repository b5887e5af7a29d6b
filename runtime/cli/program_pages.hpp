// The manual page of the program and its completion for bash: what stands around the parts that the
// commands' option tables write (options/option_pages.hpp).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace sluice {

using CommandSummary = std::pair<std::string_view, std::string_view>;  // name, what it does

// What comes before the sections of the commands, and what comes after them.
[[nodiscard]] std::string man_head(std::string_view version,
                                   std::span<const CommandSummary> commands);
[[nodiscard]] std::string man_tail(std::string_view exit_codes);

// What comes before the branches of the commands, and what comes after them.
[[nodiscard]] std::string bash_head(std::span<const CommandSummary> commands);
[[nodiscard]] std::string bash_tail();

}  // namespace sluice
