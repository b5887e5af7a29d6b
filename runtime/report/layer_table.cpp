#include "runtime/report/layer_table.hpp"

#include <nlohmann/json.hpp>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

// The part of `total` that falls on a layer of cost `cost`; `costs`: of all layers of the stage.
// Layers without cost share equally.
double part_of(double total, double cost, double costs, int layers) {
  return costs > 0 ? total * cost / costs : total / layers;
}

// [layer] milliseconds.
std::vector<StageTimes> divided(const LayerTable& table, std::span<const StageTimes> stages) {
  std::vector<StageTimes> times;
  for (std::size_t s = 0; s + 1 < table.first_layer.size(); ++s) {
    const int first = table.first_layer[s], last = table.first_layer[s + 1];
    StageTimes sum = {0, 0, 0};
    for (int layer = first; layer < last; ++layer) {
      const StageTimes& cost = table.costs[at(layer)];
      sum.forward += cost.forward;
      sum.backward_input += cost.backward_input;
      sum.backward_weight += cost.backward_weight;
    }
    const StageTimes& took = stages[s];
    for (int layer = first; layer < last; ++layer) {
      const StageTimes& cost = table.costs[at(layer)];
      const auto part = [&](double total, double own, double all) {
        return 1000 * part_of(total, own, all, last - first);
      };
      times.push_back(
          {.forward = part(took.forward, cost.forward, sum.forward),
           .backward_input = part(took.backward_input, cost.backward_input, sum.backward_input),
           .backward_weight =
               part(took.backward_weight, cost.backward_weight, sum.backward_weight)});
    }
  }
  return times;
}

}  // namespace

std::string to_json_text(const LayerTable& table, std::span<const StageTimes> stages) {
  nlohmann::ordered_json json;
  json["first"] = table.first_layer;
  json["times"] = nlohmann::ordered_json::array();
  for (const StageTimes& each : stages.empty() ? table.costs : divided(table, stages)) {
    json["times"].push_back({each.forward, each.backward_input, each.backward_weight});
  }
  return json.dump();
}

}  // namespace sluice
