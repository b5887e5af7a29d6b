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

// State for the parameters it is given (the owners, not other uses of tied ones), in that order.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        std::span<Parameter* const> parameters,
                                                        const DeviceMemory& memory);
// Bytes of its state, if the parameters' values take `bytes` (parameter_bytes) in total.
[[nodiscard]] std::size_t optimizer_bytes(const OptimizerConfig& config, std::size_t bytes);

// The factor that brings a gradient of this norm to at most `clip` (<= 0: no clipping, factor 1).
[[nodiscard]] double clip_factor(double norm, double clip);

}  // namespace sluice
