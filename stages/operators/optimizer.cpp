#include "stages/operators/optimizer.hpp"

#include <fmt/format.h>

#include <cmath>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

namespace sluice {

namespace {

std::size_t padded_floats(const Parameter& parameter) {
  return parameter_bytes(parameter.value.elements()) / sizeof(float);
}

// Adjacent parameters in memory with equal decay form one run. The padding between them is zero in
// value, gradient and state, and both updates keep it zero. StateMemory sets the state.
std::vector<UpdateRun> make_runs(std::span<Parameter* const> parameters) {
  std::vector<UpdateRun> runs;
  for (const Parameter* parameter : parameters) {
    UpdateRun next{.value = parameter->value.as<float>(),
                   .grad = parameter->grad.as<float>(),
                   .count = static_cast<std::int64_t>(padded_floats(*parameter)),
                   .decay = parameter->decay};
    if (next.value == nullptr || next.grad == nullptr) {
      throw Error(ErrorCode::kInternal, fmt::format("parameter {} reaches the optimizer before it "
                                                    "has memory",
                                                    parameter->name));
    }
    UpdateRun* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->decay == next.decay && last->value + last->count == next.value &&
        last->grad + last->count == next.grad) {
      last->count += next.count;
    } else {
      runs.push_back(next);
    }
  }
  return runs;
}

// Names of the state vectors, each as large as the values.
std::vector<std::string> kinds_of(const OptimizerConfig& config) {
  if (config.kind != OptimizerConfig::Kind::kSgd) return {"exp_avg", "exp_avg_sq"};
  if (config.momentum != 0) return {"momentum"};
  return {};
}

// One zeroed vector per kind, each with the parameters' layout.
class StateMemory {
 public:
  StateMemory(std::span<Parameter* const> parameters, std::vector<std::string> kinds,
              const DeviceMemory& memory)
      : parameters_(parameters.begin(), parameters.end()), kinds_(std::move(kinds)) {
    for (const Parameter* parameter : parameters_) {
      floats_ += padded_floats(*parameter);
    }
    const Stream stream(memory.device());
    for (size_t i = 0; i < kinds_.size(); ++i) {
      buffers_.push_back(memory.allocate(floats_ * sizeof(float)));
      fill_zero_async(buffers_.back().data(), buffers_.back().size(), stream.view());
    }
    stream.view().synchronize();
  }

  // Gives each run its part of the state; `runs` are those of the same parameters.
  void assign(std::span<UpdateRun> runs) const {
    std::int64_t offset = 0;
    for (UpdateRun& run : runs) {
      run.first = buffers_.empty() ? nullptr : at(0, offset);
      run.second = buffers_.size() < 2 ? nullptr : at(1, offset);
      offset += run.count;
    }
  }
  [[nodiscard]] std::vector<OptimizerState> list() const {
    std::vector<OptimizerState> result;
    std::size_t offset = 0;
    for (const Parameter* parameter : parameters_) {
      for (size_t kind = 0; kind < kinds_.size(); ++kind) {
        result.push_back(
            {parameter->name, kinds_[kind],
             Tensor{buffers_[kind].data() + offset * sizeof(float), parameter->value.spec}});
      }
      offset += padded_floats(*parameter);
    }
    return result;
  }

 private:
  [[nodiscard]] float* at(size_t kind, std::int64_t offset) const {
    return reinterpret_cast<float*>(buffers_[kind].data()) + offset;
  }

  std::vector<Parameter*> parameters_;
  std::vector<std::string> kinds_;
  std::vector<Buffer> buffers_;
  std::size_t floats_ = 0;
};

// AdamW, Adam, or SGD with momentum.
class RunOptimizer final : public Optimizer {
 public:
  RunOptimizer(const OptimizerConfig& config, std::span<Parameter* const> parameters,
               const DeviceMemory& memory)
      : config_(config),
        runs_(make_runs(parameters)),
        state_(parameters, kinds_of(config), memory) {
    state_.assign(runs_);
  }

  void update(ComputeContext& ctx, std::uint64_t step, float learning_rate,
              float grad_scale) override {
    if (config_.kind == OptimizerConfig::Kind::kSgd) {
      sgd(ctx,
          {.learning_rate = learning_rate,
           .momentum = config_.momentum,
           .weight_decay = config_.weight_decay,
           .grad_scale = grad_scale,
           .nesterov = config_.nesterov},
          runs_);
      return;
    }
    const auto correction = [step](float beta) {
      return static_cast<float>(1.0 -
                                std::pow(static_cast<double>(beta), static_cast<double>(step)));
    };
    adamw(ctx,
          {.learning_rate = learning_rate,
           .beta1 = config_.beta1,
           .beta2 = config_.beta2,
           .epsilon = config_.epsilon,
           .weight_decay = config_.weight_decay,
           .correction1 = correction(config_.beta1),
           .correction2 = correction(config_.beta2),
           .grad_scale = grad_scale,
           .coupled = config_.kind == OptimizerConfig::Kind::kAdam},
          runs_);
  }
  std::vector<OptimizerState> state() override { return state_.list(); }

 private:
  OptimizerConfig config_;
  std::vector<UpdateRun> runs_;
  StateMemory state_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::span<Parameter* const> parameters,
                                          const DeviceMemory& memory) {
  if (config.nesterov && !(config.kind == OptimizerConfig::Kind::kSgd && config.momentum > 0)) {
    throw Error(ErrorCode::kUsage, "nesterov is for SGD with a momentum above 0");
  }
  return std::make_unique<RunOptimizer>(config, parameters, memory);
}

std::size_t optimizer_bytes(const OptimizerConfig& config, std::size_t bytes) {
  return kinds_of(config).size() * bytes;
}

double clip_factor(double norm, double clip) { return clip > 0 && norm > clip ? clip / norm : 1.0; }

}  // namespace sluice
