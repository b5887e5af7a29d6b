#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"

namespace sluice {

Schedule empty_schedule(std::string_view name, const Placement& placement, int micro_batches,
                        int steps_per_rank) {
  Schedule schedule = {.name = std::string(name),
                       .placement = placement,
                       .micro_batches = micro_batches,
                       .ranks = std::vector<std::vector<Step>>(at(placement.ranks()))};
  for (std::vector<Step>& steps : schedule.ranks) {
    steps.reserve(at(steps_per_rank));
  }
  return schedule;
}

}  // namespace sluice
