// Optimizers over a stage's parameters, and the learning-rate schedule.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stages/compute.hpp"
#include "stages/parameter.hpp"

namespace sluice {

struct OptimizerConfig {
  enum class Kind { kAdamW, kSgd };
  Kind kind = Kind::kAdamW;
  float beta1 = 0.9F, beta2 = 0.95F, epsilon = 1e-8F;  // AdamW (Loshchilov and Hutter 2019)
  float momentum = 0;                                  // SGD
  float weight_decay = 0;                              // only where Parameter::decay
};
// "adamw" | "sgd", else Error(kUsage).
[[nodiscard]] OptimizerConfig::Kind parse_optimizer(std::string_view text);

// One parameter's state by name ("exp_avg", "exp_avg_sq" or "momentum"), for checkpoints.
struct OptimizerState {
  std::string parameter, kind;
  Tensor tensor;  // f32, the parameter's shape; owned by the optimizer
};

// State for the parameters it is given (the owners, not other uses of tied ones), in that order.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // step counts from 1. grad_scale multiplies gradients (clipping). Allocates nothing.
  virtual void update(ComputeContext& ctx, std::uint64_t step, float learning_rate,
                      float grad_scale) = 0;
  [[nodiscard]] virtual std::vector<OptimizerState> state() = 0;
  [[nodiscard]] virtual std::size_t state_bytes() const = 0;
};
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        std::span<Parameter* const> parameters,
                                                        const DeviceMemory& memory);
// What its state takes, for parameters whose values take `bytes` (parameter_bytes) in all.
[[nodiscard]] std::size_t optimizer_bytes(const OptimizerConfig& config, std::size_t bytes);

// Linear warmup from 0 over `warmup` steps, then half a cosine down to `final_share` of the peak at
// `steps`. step counts from 1.
struct LearningRate {
  double peak = 1e-3, final_share = 0.1;
  std::uint64_t warmup = 0, steps = 1;
  bool constant = false;  // no decay after warmup
  [[nodiscard]] double at(std::uint64_t step) const;
};

// The factor that brings a gradient of this norm to at most `clip` (<= 0: no clipping, factor 1).
[[nodiscard]] double clip_factor(double norm, double clip);

}  // namespace sluice
