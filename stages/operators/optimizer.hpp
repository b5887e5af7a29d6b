// Optimizers over a stage's parameters, and the clipping of their gradients. Internal: users choose
// one by OptimizerConfig (<sluice/parameter.hpp>).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/parameter.hpp>

namespace sluice {

// Throws Error(kUsage) for settings that contradict each other, and for numbers that no step can
// work with.
void require_sensible(const OptimizerConfig& config);

// State of optimizers that is not in memory: a vector for each kind, of which equal pieces of all
// are brought while they are updated.
class StatePieces {
 public:
  virtual ~StatePieces() = default;
  // Makes `bytes` of each vector the caller's, behind those of earlier calls, and says where they
  // begin. They are zeros.
  [[nodiscard]] virtual std::size_t take(std::size_t bytes) = 0;
  // What stands for the vector's bytes from `begin` on: an address of nothing (AbsentMemory).
  [[nodiscard]] virtual std::byte* address(std::size_t kind, std::size_t begin) const = 0;
  // Calls each(begin, end, memory) for one part of the bytes [begin, end) after the other:
  // memory[kind] has the vector's, and what it has afterwards is kept. All that is taken is visited
  // in its order, again and again. Throws Error(kIo) where some of it is lost: for good.
  using Visit =
      std::function<void(std::size_t begin, std::size_t end, std::span<std::byte* const> memory)>;
  virtual void visit(std::size_t begin, std::size_t end, const Visit& each) = 0;
};

// State for the slices it is given (of owners, not of other uses of tied parameters), in that
// order. A slice begins at a multiple of kSumBlock = 16,384 elements of its shard, and ends at one
// or with a shard (shard_elements()); how parameters are cut changes no bit. `seed`: of the random
// rounding of moments. `pieces`, which outlives it, has its state where it is not null. Throws what
// require_sensible() throws.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        std::span<const ParameterSlice> slices,
                                                        const DeviceMemory& memory,
                                                        std::uint64_t seed = 0,
                                                        StatePieces* pieces = nullptr);
// All of each parameter.
[[nodiscard]] std::vector<ParameterSlice> whole_slices(std::span<Parameter* const> parameters);
// Kinds of its state: vectors with as many elements as the parameters.
[[nodiscard]] std::size_t state_kinds(const OptimizerConfig& config);
// Bytes of its state per element of the parameters, and so in a save.
[[nodiscard]] std::size_t state_bytes_per_element(const OptimizerConfig& config);
// Bytes of memory that the state of one slice takes.
[[nodiscard]] std::size_t optimizer_bytes(const OptimizerConfig& config, std::int64_t elements);

// The factor that brings a gradient of this norm to at most `clip` (<= 0: no clipping, factor 1).
[[nodiscard]] double clip_factor(double norm, double clip);

}  // namespace sluice
