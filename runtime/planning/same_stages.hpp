// What ranks of a job must say alike of their stages. All throw Error(kMismatch) or Error(kUsage)
// that names both ranks, the stage and the parameter. Internal to the layout.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/group/collectives.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Refuses members whose texts differ, with the first line that does; one without a text agrees with
// all. `member`: what one is called. `texts`: [member].
void require_same_texts(const std::vector<std::string>& texts, std::string_view member);

// Collective over `replicas`, which make the same stages of the same slices: they add their
// gradients up by place, divide parameters by units and wait for each other's sums.
void require_same_replicas(Collectives& replicas, const std::vector<StageEntry>& stages);

// The stages of the ranks that share a pipeline's, by tensor coordinate, differ in the slices
// alone. Those of a parameter or buffer that is cut follow each other and are the whole.
void require_parts_of_whole(std::span<const ParameterTable> tensor_ranks);

}  // namespace sluice
