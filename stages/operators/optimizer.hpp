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

// State for the parameters it is given (the owners, not other uses of tied ones), in that order.
// `seed`: of the random rounding of moments. Throws what require_sensible() throws.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        std::span<Parameter* const> parameters,
                                                        const DeviceMemory& memory,
                                                        std::uint64_t seed = 0);
// Bytes of its state per element of the parameters, and so in a save.
[[nodiscard]] std::size_t state_bytes_per_element(const OptimizerConfig& config);
// Bytes of memory that the state of one parameter takes, whose values take `bytes`
// (parameter_bytes).
[[nodiscard]] std::size_t optimizer_bytes(const OptimizerConfig& config, std::size_t bytes);

// The factor that brings a gradient of this norm to at most `clip` (<= 0: no clipping, factor 1).
[[nodiscard]] double clip_factor(double norm, double clip);

}  // namespace sluice
