// The cores that this process may run on.
#pragma once

namespace sluice {

// Cores in this process's affinity mask, which a launcher sets for each rank; at least 1.
[[nodiscard]] int affinity_cores();

}  // namespace sluice
