// What the readers of schedule files share: bounds, and text that is safe to print.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <sluice/schedule.hpp>

namespace sluice {

// At most 40 bytes of it in quotes, everything but printable ASCII as '?'.
[[nodiscard]] std::string quoted_excerpt(std::string_view text);

// Could be a step's text form: 1 to 64 printable bytes without a blank.
[[nodiscard]] bool is_action_text(std::string_view text);

// All throw Error(kUsage) beginning with `reader`, e.g. "schedule file".
void require_file_size(std::string_view reader, std::string_view text);
void require_action_count(std::string_view reader, std::int64_t actions);
// Every pair of stage and micro-batch needs an action of its own: bounds what check() allocates.
void require_enough_actions(std::string_view reader, std::int64_t stages,
                            std::int64_t micro_batches, std::int64_t actions);

// Sets forward_only where no action is a backward.
void find_forward_only(Schedule& schedule);

}  // namespace sluice
