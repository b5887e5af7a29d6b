#include "runtime/launch/job_environment.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "runtime/options/supervisor_events.hpp"

namespace sluice {
namespace {

// What mpirun of Open MPI 4.1 gives to its ranks among its own settings.
constexpr std::array<std::string_view, 8> kMadeByMpirun = {
    "OMPI_MCA_orte_",         "OMPI_MCA_ess",
    "OMPI_MCA_pmix=",         "OMPI_MCA_shmem_RUNTIME_QUERY_hint=",
    "OMPI_MCA_initial_wdir=", "OMPI_MCA_mpi_oversubscribe=",
    "OMPI_MCA_prte_",         "OMPI_MCA_mca_base_component_show_load_errors="};
constexpr std::array<std::string_view, 4> kSettings = {"OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_",
                                                       "OMPI_ALLOW_RUN_AS_ROOT"};
constexpr std::array<std::string_view, 6> kOfLaunchers = {"OMPI_", "PMIX_", "PRTE_",
                                                          "PMI_",  "HYDI_", "MV2_COMM_WORLD_"};

template <std::size_t count>
bool begins_with_one(std::string_view text, const std::array<std::string_view, count>& beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view each) { return text.starts_with(each); });
}

std::optional<std::string_view> value_of(std::span<const std::string> environment,
                                         std::string_view name) {
  for (const std::string& entry : environment) {
    const std::string_view text = entry;
    if (text.starts_with(name) && text.substr(name.size()).starts_with('=')) {
      return text.substr(name.size() + 1);
    }
  }
  return std::nullopt;
}

}  // namespace

std::vector<std::string> job_environment(std::span<const std::string> current) {
  const bool of_a_rank = value_of(current, "OMPI_COMM_WORLD_RANK").has_value();
  std::vector<std::string> result;
  for (const std::string& entry : current) {
    const bool setting = begins_with_one(entry, kSettings);
    if (begins_with_one(entry, kOfLaunchers) && !setting) continue;
    if (of_a_rank && begins_with_one(entry, kMadeByMpirun)) continue;
    const std::string_view name = std::string_view(entry).substr(0, entry.find('='));
    if (name == kSupervised) continue;
    result.push_back(entry);
  }
  result.push_back(std::string(kSupervised) + "=1");
  result.push_back(std::string(kSupervisedByMpi) + "=1");
  return result;
}

int ranks_around(std::span<const std::string> current) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"}) {
    if (const auto value = value_of(current, name)) {
      return std::max(1, std::atoi(std::string(*value).c_str()));
    }
  }
  return 1;
}

}  // namespace sluice
