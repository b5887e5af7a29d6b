#include <algorithm>
#include <array>
#include <cstddef>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, kTransportModels> kModelNames = {
    "eager", "rendezvous", "bounded", "nccl", "nccl-edges"};

}  // namespace

std::string_view name_of(TransportModel model) { return kModelNames[at(model)]; }

bool Verification::progresses(TransportModel model) const {
  return std::find(progresses_under.begin(), progresses_under.end(), model) !=
         progresses_under.end();
}

}  // namespace sluice
