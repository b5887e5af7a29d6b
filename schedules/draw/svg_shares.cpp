#include "schedules/draw/svg_shares.hpp"

#include <algorithm>

#include "schedules/model/index.hpp"

namespace sluice {
namespace {

constexpr std::size_t kMostRows = 128, kMostColumns = 1200;

// Adds the action's time to the columns it lies in. `width`: of a column.
void add(const SimulatedAction& action, double width, std::vector<std::array<double, 4>>& columns) {
  const auto last = columns.size() - 1;
  const auto column_of = [&](double time) {
    return std::min(static_cast<std::size_t>(std::max(time / width, 0.0)), last);
  };
  for (std::size_t c = column_of(action.start); c <= column_of(action.end); ++c) {
    const double begin = std::max(action.start, static_cast<double>(c) * width);
    const double end = std::min(action.end, static_cast<double>(c + 1) * width);
    if (end > begin) columns[c][at(action.action.kind)] += end - begin;
  }
}

}  // namespace

ActionShares action_shares(const Simulation& simulation, std::size_t most_cells) {
  const std::size_t ranks = simulation.timeline.size();
  ActionShares shares;
  const std::size_t per_row = (ranks + kMostRows - 1) / kMostRows;
  shares.ranks_per_row = static_cast<int>(per_row);
  shares.rows.resize((ranks + per_row - 1) / per_row);
  const std::size_t columns =
      std::clamp<std::size_t>(most_cells / shares.rows.size(), 1, kMostColumns);
  const double width = simulation.makespan / static_cast<double>(columns);
  for (std::size_t row = 0; row < shares.rows.size(); ++row) {
    shares.rows[row].resize(columns);
    if (!(width > 0)) continue;
    const std::size_t end = std::min((row + 1) * per_row, ranks);
    for (std::size_t rank = row * per_row; rank < end; ++rank) {
      for (const SimulatedAction& each : simulation.timeline[rank]) {
        add(each, width, shares.rows[row]);
      }
    }
    // Two actions of a pair fill the same time: no column is more than full.
    for (std::array<double, 4>& column : shares.rows[row]) {
      double sum = 0;
      for (const double each : column) sum += each;
      const double full = width * static_cast<double>(end - row * per_row);
      for (double& each : column) each /= std::max(sum, full);
    }
  }
  return shares;
}

}  // namespace sluice
