// Optimizers over a stage's parameters, and the clipping of their gradients. Internal: users choose
// one by OptimizerConfig (<sluice/parameter.hpp>).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/parameter.hpp>

namespace sluice {

// Throws Error(kUsage) for settings that contradict each other, and for numbers that no step can
// work with.
void require_sensible(const OptimizerConfig& config);

// State for the slices it is given (of owners, not of other uses of tied parameters), in that
// order. A slice begins at a multiple of kSumBlock = 16,384 elements of its shard, and ends at one
// or with a shard (shard_elements()); how parameters are cut changes no bit. `seed`: of the random
// rounding of moments. Throws what require_sensible() throws.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        std::span<const ParameterSlice> slices,
                                                        const DeviceMemory& memory,
                                                        std::uint64_t seed = 0);
// All of each parameter.
[[nodiscard]] std::vector<ParameterSlice> whole_slices(std::span<Parameter* const> parameters);
// Bytes of its state per element of the parameters, and so in a save.
[[nodiscard]] std::size_t state_bytes_per_element(const OptimizerConfig& config);
// Bytes of memory that the state of one slice takes.
[[nodiscard]] std::size_t optimizer_bytes(const OptimizerConfig& config, std::int64_t elements);

// The factor that brings a gradient of this norm to at most `clip` (<= 0: no clipping, factor 1).
[[nodiscard]] double clip_factor(double norm, double clip);

}  // namespace sluice
