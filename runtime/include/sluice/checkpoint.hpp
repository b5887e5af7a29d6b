// Checkpoints: a pipeline's parameters and optimizer state in a directory (see weights.hpp for the
// files), keyed by global names, so they do not depend on the layout that wrote them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sluice {

class Pipeline;    // <sluice/pipeline.hpp>
struct JobLayout;  // runtime/layout/job_layout.hpp

// Collective. The ranks of replica 0 write the parameters they own. Rank 0 writes the index and
// `config` as config.json, removes files of an earlier save, and writes state.json last.
void save_checkpoint(Pipeline& pipeline, const std::filesystem::path& directory,
                     const std::string& config);

// Collective. Values of all parameters; the files may hold nothing else. Error(kWeights) names the
// first parameter that is missing, superfluous or of another shape.
void load_weights(Pipeline& pipeline, const std::filesystem::path& directory);

// Not collective. Makes the checks of load_checkpoint() on names and sizes of parameters and on the
// step, which it returns. It reads no values.
[[nodiscard]] std::uint64_t require_fitting_checkpoint(const JobLayout& layout,
                                                       const std::filesystem::path& directory);

// Collective. Weights, optimizer state and step.
void load_checkpoint(Pipeline& pipeline, const std::filesystem::path& directory);

}  // namespace sluice
