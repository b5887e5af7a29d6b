#include "runtime/report/rank_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>

#include "comm/base/cores.hpp"
#include "runtime/program/network_facts.hpp"

namespace sluice {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankRow, host, device, replica, stages, cores, host_cores,
                                   threads, interfaces)

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostShown = 64;

std::string cores_text(const RankRow& rank) {
  if (rank.cores.empty()) return "not known";
  return fmt::format("{} of {}", to_cpu_list(rank.cores), rank.host_cores);
}

}  // namespace

std::string rank_table(const std::vector<RankRow>& ranks, std::string_view indent) {
  const std::size_t shown = std::min(ranks.size(), kMostShown);
  std::vector<std::vector<std::string>> lines = {
      {"rank", "host", "device", "replica", "stages", "cores", "threads", "interface"}};
  for (std::size_t rank = 0; rank < shown; ++rank) {
    const RankRow& row = ranks[rank];
    lines.push_back(
        {std::to_string(rank), row.host, row.device, std::to_string(row.replica),
         fmt::format("{}", fmt::join(row.stages, ",")), cores_text(row),
         std::to_string(row.threads),
         row.interfaces.empty() ? "-" : fmt::format("{}", fmt::join(row.interfaces, ","))});
  }
  std::vector<std::size_t> widths(lines.front().size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    std::string row(indent);
    for (std::size_t i = 0; i < line.size(); ++i)
      row += fmt::format("{:<{}}", line[i], widths[i] + 2);
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + '\n';
  }
  if (ranks.size() > shown) {
    text += fmt::format("{}and {} more ranks\n", indent, ranks.size() - shown);
  }
  return text + fmt::format(
                    "{}(cores: those the rank is bound to, of those the job may use on its "
                    "host; interface: of\n{}the rank's TCP connections over IPv4, - none)\n",
                    indent, indent);
}

std::string gather_rank_table(Collectives& world, const JobLayout& layout, int threads,
                              std::string_view indent) {
  const RankPlace& place = layout.place;
  const RankDevice& device = place.devices[static_cast<std::size_t>(place.rank)];
  NetworkFacts network = network_facts();
  network.connections = tcp_connections();
  const RankRow mine = {.host = device.host,
                        .device = to_string(device.device),
                        .replica = place.replica,
                        .stages = layout.plans.placement().stages_of(place.rank),
                        .cores = affinity_list(),
                        .host_cores = host_cores(),
                        .threads = threads,
                        .interfaces = interfaces_used(network)};
  std::vector<RankRow> rows;
  for (const std::string& text :
       world.all_gather_strings(Json(mine).dump(-1, ' ', false, Json::error_handler_t::replace))) {
    rows.push_back(Json::parse(text).get<RankRow>());
  }
  return rank_table(rows, indent);
}

}  // namespace sluice
