// Stale gradients: left by the previous step, to be overwritten by the first write
// (Parameter::is_stale()). A gradient is a sum over a step's micro-batches. Where its stage asks
// next_write() before each write, the step's first write replaces what is there, and nobody zeroes
// the gradient before. Other gradients are never stale. Internal to stages/ and runtime/. Threading
// is that of ParameterSet.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/parameter.hpp>

namespace sluice {

struct GradientAccess {
  // How to write to the gradient now: kOverwrite where it is stale, which it is no longer after
  // that.
  [[nodiscard]] static Write next(Parameter& parameter) {
    parameter.asked_ = true;
    return std::exchange(parameter.stale_, false) ? Write::kOverwrite : Write::kAdd;
  }
  // Whether next() was called since this was. For a record of what a call does.
  [[nodiscard]] static bool take_asked(Parameter& parameter) {
    return std::exchange(parameter.asked_, false);
  }
  // The state alone; a gradient whose stage does not ask stays as it is.
  static void set_stale(Parameter& parameter, bool stale) {
    parameter.stale_ = stale && parameter.asks_next_write;
  }
  static void set_stale(ParameterSet& set, bool stale);
  // Makes gradients stale whose stage asks, and zeroes the others, in stream order.
  static void mark_stale(ParameterSet& set, StreamView stream);
  // Zeroes gradients that are still stale, of those that lie in flat_grads() from float `begin` on;
  // unless `joined`, not those that have shares, which are added to them later.
  static void zero_stale(ParameterSet& set, StreamView stream, std::size_t begin = 0,
                         bool joined = true);
};

// Zeroes the gradient in order of `stream` if it is stale, which it is no longer after that.
void zero_if_stale(Parameter& parameter, StreamView stream);

// While this object exists, gradients and their shares point to scratch memory, so that a warm-up
// leaves them unchanged. Stale ones stay where they are, and may hold other numbers afterwards. The
// work that writes gradients must be done before the object ends.
class GradientsAside {
 public:
  // Takes the bytes of the largest that is not stale. Throws what `memory` does. The set outlives
  // it.
  GradientsAside(ParameterSet& set, const DeviceMemory& memory);
  ~GradientsAside();
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;

 private:
  struct Had {
    Parameter* parameter;
    void* data;
    bool stale;
    std::vector<Tensor> shares;
  };
  std::vector<Had> had_;
  Buffer memory_;
};

}  // namespace sluice
