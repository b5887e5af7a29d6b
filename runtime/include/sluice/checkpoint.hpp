// Checkpoints: a pipeline's parameters and optimizer state in a directory (see weights.hpp for the
// files), keyed by global names, so that they do not depend on the layout that wrote them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sluice {

class Pipeline;         // <sluice/pipeline.hpp>
struct JobLayout;       // runtime/layout/job_layout.hpp

// Collective. The ranks of replica 0 write what they own; rank 0 adds the index, `config` as
// config.json, removes files of an earlier save that the index no longer names, and, last of all,
// writes state.json.
void save_checkpoint(Pipeline& pipeline, const std::filesystem::path& directory,
                     const std::string& config);

// Collective. Values of all parameters; the files may hold nothing else. Error(kWeights) names the
// first parameter that is missing, superfluous or of another shape.
void load_weights(Pipeline& pipeline, const std::filesystem::path& directory);

// Not collective: what load_checkpoint() would say of parameters that are missing, superfluous or
// of another size, and of the step, which it returns; values are not read.
[[nodiscard]] std::uint64_t require_fitting_checkpoint(const JobLayout& layout,
                                                       const std::filesystem::path& directory);

// Collective. Weights, optimizer state and step.
void load_checkpoint(Pipeline& pipeline, const std::filesystem::path& directory);

}  // namespace sluice
