#include "schedules/files/file_text.hpp"

#include <algorithm>

#include <sluice/schedule_file.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/text.hpp"

namespace sluice {

std::string quoted_excerpt(std::string_view text) {
  constexpr std::size_t kMost = 40;
  std::string excerpt = "'";
  for (const char c : text.substr(0, kMost)) excerpt += c >= ' ' && c <= '~' ? c : '?';
  return excerpt + (text.size() > kMost ? "...'" : "'");
}

bool is_action_text(std::string_view text) {
  constexpr std::size_t kMost = 64;
  return !text.empty() && text.size() <= kMost &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

void require_file_size(std::string_view reader, std::string_view text) {
  if (text.size() <= kMaxScheduleFileBytes) return;
  refuse(reader, ": ", text.size(), " bytes; at most ", kMaxScheduleFileBytes, " are legal");
}

void require_action_count(std::string_view reader, std::int64_t actions) {
  if (actions <= kMaxScheduleActions) return;
  refuse(reader, ": more than ", kMaxScheduleActions, " actions, which is the most");
}

void require_enough_actions(std::string_view reader, std::int64_t stages,
                            std::int64_t micro_batches, std::int64_t actions) {
  if (stages <= actions && micro_batches <= actions && stages * micro_batches <= actions) return;
  refuse(reader, ": ", stages, " stages with ", micro_batches, " micro-batches, but only ", actions,
         " compute actions; every stage needs at least a forward of every micro-batch");
}

void find_forward_only(Schedule& schedule) {
  schedule.forward_only = true;
  for (const std::vector<Step>& steps : schedule.ranks) {
    for_each_action(steps, [&](const Action& action) {
      if (makes_gradient(action.kind) || ends_backward(action.kind)) schedule.forward_only = false;
    });
  }
}

bool looks_like_json(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

}  // namespace sluice
