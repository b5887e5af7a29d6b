#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

#include "schedules/model/dataflow.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

struct Cell {
  int column = 0;
  int position = 0;  // in the rank's list
};
using Cells = std::vector<std::vector<Cell>>;  // [rank][cell], columns ascending

bool drawable(const Schedule& schedule) {
  if (schedule.micro_batches < 1) return false;
  const auto in_range = [&](const Action& action) {
    return (!is_compute(action.kind) && !is_message(action.kind)) ||
           (action.stage >= 0 && action.stage < schedule.placement.stages() &&
            action.micro_batch >= 0 && action.micro_batch < schedule.micro_batches);
  };
  if (schedule.ranks.size() != at(schedule.placement.ranks())) return false;
  for (const std::vector<Step>& steps : schedule.ranks) {
    for (const Step& step : steps) {
      if (!in_range(step.action)) return false;
      if (!step.overlapped) continue;
      const bool computes = is_compute(step.action.kind) && is_compute(step.overlapped->kind);
      if (!computes || !in_range(*step.overlapped)) return false;
    }
  }
  return true;
}

// Compute steps at the time they would start if each took one unit and messages none. False where
// the schedule cannot run.
bool cells_by_time(const Schedule& schedule, Cells& cells) {
  if (!drawable(schedule)) return false;
  Schedule units = schedule;
  units.forward_only = false;  // a broken one may have backwards all the same
  for (std::vector<Step>& steps : units.ranks) {
    for (Step& step : steps) {
      // A whole backward takes the time of I and of W, here it shall take one unit.
      if (step.action.kind == ActionKind::kBackward) step.action.kind = ActionKind::kBackwardInput;
      if (step.overlapped && step.overlapped->kind == ActionKind::kBackward) {
        step.overlapped->kind = ActionKind::kBackwardInput;
      }
    }
  }
  if (!Dataflow(units).run([](int, int, const Step&) {})) return false;
  StageTimes pairs_in_one;
  pairs_in_one.overlap = 1;
  const Simulation simulation = simulate(units, {.stages = {pairs_in_one}});
  for (std::size_t rank = 0; rank < cells.size(); ++rank) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      const Step& step = schedule.ranks[rank][i];
      if (step.action.kind == ActionKind::kRecompute) ++next;  // drawn by its B or I
      if (!is_compute(step.action.kind)) continue;
      const auto column = static_cast<int>(simulation.timeline[rank][next].start);
      cells[rank].push_back({column, static_cast<int>(i)});
      next += step.overlapped ? 2 : 1;
    }
  }
  return true;
}

// One column per step, in list order.
void cells_by_position(const Schedule& schedule, bool with_messages, Cells& cells) {
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    cells[rank].clear();
    for (std::size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      if (!with_messages && !is_compute(schedule.ranks[rank][i].action.kind)) continue;
      cells[rank].push_back(Cell{static_cast<int>(cells[rank].size()), static_cast<int>(i)});
    }
  }
}

bool has_one_stage_per_rank(const Schedule& schedule) {
  return schedule.placement.stages() == schedule.placement.ranks();
}

// With one stage per rank the row says the stage, unless the action is in the wrong row.
std::string cell_text(const Schedule& schedule, int rank, const Step& step) {
  const auto one = [&](const Action& action) {
    const std::string text = to_string(action);
    const bool known = has_one_stage_per_rank(schedule) && action.stage == rank;
    return known ? text.substr(text.find(name_of(action.kind))) : text;
  };
  return step.overlapped ? one(step.action) + '+' + one(*step.overlapped) : one(step.action);
}

bool marks_message(const Schedule& schedule, const Violation* mark) {
  if (mark == nullptr || mark->rank < 0 || mark->position < 0) return false;
  if (at(mark->rank) >= schedule.ranks.size()) return false;
  const std::vector<Step>& steps = schedule.ranks[at(mark->rank)];
  const auto position = at(mark->position);
  return position < steps.size() && !is_compute(steps[position].action.kind);
}

std::string name_in(const Schedule& schedule, const Action& action) {
  return concat(has_one_stage_per_rank(schedule) ? "" : std::to_string(action.stage),
                name_of(action.kind), action.micro_batch);
}

}  // namespace

std::string draw_grid(const Schedule& schedule, const Violation* mark) {
  Cells cells(schedule.ranks.size());
  const bool with_messages = marks_message(schedule, mark);
  if (with_messages || !cells_by_time(schedule, cells)) {
    cells_by_position(schedule, with_messages, cells);
  }

  const auto text_at = [&](std::size_t rank, const Cell& cell) {
    const std::string text =
        cell_text(schedule, static_cast<int>(rank), schedule.ranks[rank][at(cell.position)]);
    const bool marked =
        mark != nullptr && mark->rank == static_cast<int>(rank) && mark->position == cell.position;
    return marked ? '[' + text + ']' : text;
  };
  std::size_t width = 0;
  for (std::size_t rank = 0; rank < cells.size(); ++rank) {
    for (const Cell& cell : cells[rank]) width = std::max(width, text_at(rank, cell).size());
  }
  const std::size_t label_width = std::to_string(cells.empty() ? 0 : cells.size() - 1).size();

  std::string grid;
  for (std::size_t rank = 0; rank < cells.size(); ++rank) {
    const bool marked = mark != nullptr && mark->rank == static_cast<int>(rank);
    std::string row =
        concat(marked ? "rank>" : "rank ",
               std::string(label_width - std::to_string(rank).size(), ' '), rank, " |");
    const std::size_t margin = row.size() + 1;
    for (const Cell& cell : cells[rank]) {
      row.resize(margin + at(cell.column) * (width + 1), ' ');
      row += text_at(rank, cell);
    }
    grid += row + '\n';
  }
  return grid;
}

std::string describe(const Schedule& schedule, const Violation& violation) {
  return violation.message + '\n' + draw_grid(schedule, &violation);
}

std::string draw_timeline(const Schedule& schedule, const Simulation& simulation, int columns) {
  if (columns < 1) refuse("a timeline of ", columns, " columns; at least 1 is legal");
  if (simulation.timeline.size() != at(schedule.placement.ranks())) {
    refuse("timeline of '", schedule.name, "': the simulation has none, or one of other ranks");
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
  std::array<char, 64> figures{};
  std::snprintf(figures.data(), figures.size(), "makespan %.3g, bubble %.1f %%\n",
                simulation.makespan, 100 * simulation.bubble_makespan);
  return text + figures.data();
}

}  // namespace sluice
