#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/draw.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

std::string name_in(const Schedule& schedule, const Action& action) {
  const bool one_stage = schedule.placement.stages() == schedule.placement.ranks();
  return concat(one_stage ? std::string() : std::to_string(action.stage), name_of(action.kind),
                action.micro_batch);
}

// Three digits.
std::string time_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", value);
  return text.data();
}

std::string percent_text(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * share);
  return text.data();
}

}  // namespace

std::string draw_timeline(const Schedule& schedule, const Simulation& simulation, int columns) {
  if (columns < 1) refuse("a timeline of ", columns, " columns; at least 1 is legal");
  if (simulation.timeline.size() != at(schedule.placement.ranks())) {
    throw std::invalid_argument("timeline of '" + schedule.name +
                                "': the simulation has none, or one of other ranks");
  }
  const std::size_t label = std::to_string(simulation.timeline.size() - 1).size();
  const double scale = simulation.makespan > 0 ? columns / simulation.makespan : 0;
  // An action has the columns whose middle it covers.
  const auto column = [&](double time) {
    const double first = std::ceil(time * scale - 0.5);
    return static_cast<std::size_t>(std::clamp(first, 0.0, static_cast<double>(columns)));
  };
  std::string text;
  for (std::size_t rank = 0; rank < simulation.timeline.size(); ++rank) {
    std::string row(at(columns), ' ');
    for (const SimulatedAction& each : simulation.timeline[rank]) {
      const std::size_t first = column(each.start), last = std::max(first, column(each.end));
      std::string name = name_in(schedule, each.action);
      name.resize(last - first, '-');
      row.replace(first, name.size(), name);
    }
    row.erase(row.find_last_not_of(' ') + 1);
    const std::string number = std::to_string(rank);
    text += concat("rank ", std::string(label - number.size(), ' '), number, " |", row, "\n");
  }
  return text + concat("makespan ", time_text(simulation.makespan), ", bubble ",
                       percent_text(simulation.bubble_makespan), "\n");
}

}  // namespace sluice
