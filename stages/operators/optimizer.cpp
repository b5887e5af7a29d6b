#include "stages/operators/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include <sluice/error.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {

namespace {

// Of a slice, with the padding behind its parameter where it ends there. Others need none.
std::size_t padded_floats(std::int64_t elements) {
  return parameter_bytes(elements) / sizeof(float);
}

// Names of the state vectors, each with as many elements as the values.
std::vector<std::string> kinds_of(const OptimizerConfig& config) {
  if (config.kind != OptimizerConfig::Kind::kSgd) return {"exp_avg", "exp_avg_sq"};
  if (config.momentum != 0) return {"momentum"};
  return {};
}

// The type of their elements.
DType state_type(const OptimizerConfig& config) {
  return config.kind == OptimizerConfig::Kind::kSgd ? DType::kF32 : config.moments;
}

// The random stream that rounds a parameter's moments.
std::uint64_t moments_site(const Parameter& parameter) {
  return hash_name(parameter.name + ".moments");
}

// Bytes of one vector of state of so many elements: of a slice.
std::size_t state_bytes(const OptimizerConfig& config, std::size_t elements) {
  return round_up(elements * size_of(state_type(config)), kBufferAlignment);
}

// Whether `next` follows `last` in memory and is updated alike.
bool joins(const UpdateRun& last, const UpdateRun& next, std::size_t state) {
  const auto bytes = static_cast<std::size_t>(last.count) * state;
  const auto follows = [&](const void* before, const void* after) {
    return before == nullptr ? after == nullptr
                             : static_cast<const std::byte*>(before) + bytes == after;
  };
  const bool copy_follows = last.bf16_copy == nullptr || next.bf16_copy == nullptr
                                ? last.bf16_copy == next.bf16_copy
                                : last.bf16_copy + last.count == next.bf16_copy;
  return last.decay == next.decay && last.site == next.site && copy_follows &&
         last.value + last.count == next.value && last.grad + last.count == next.grad &&
         follows(last.first, next.first) && follows(last.second, next.second);
}

// Where the first element of a part lies in the whole.
std::uint64_t place_in_whole(const Parameter& parameter, const PlacedPart& part) {
  std::int64_t place = 0;
  for_part_runs(parameter.whole_shape(), std::span(&part, 1), part.first, 1,
                [&](std::int64_t, std::int64_t in_whole, std::int64_t) { place = in_whole; });
  return static_cast<std::uint64_t>(place);
}

// Elements of a slice that are updated together, counted from its first one.
struct SliceRun {
  std::int64_t first = 0, count = 0;
  std::uint64_t element = 0;  // UpdateRun::element
};

// All of the slice, with the padding behind its parameter; where state is rounded at random, what
// it has of each part.
std::vector<SliceRun> runs_of(const ParameterSlice& slice, bool rounded) {
  const auto& [parameter, first, count] = slice;
  const std::int64_t elements = parameter->shape.elements();
  const bool padded =
      first + count == elements && padded_floats(first) == static_cast<std::size_t>(first);
  const auto floats = padded ? static_cast<std::int64_t>(padded_floats(count)) : count;
  if (!rounded) return {{0, floats, 0}};
  std::vector<SliceRun> runs;
  for (const PlacedPart& part : placed_parts(parameter->slice, parameter->parts, elements)) {
    const std::int64_t from = std::max(first, part.first);
    const std::int64_t to = std::min(first + count, part.end());
    if (from >= to) continue;
    const std::uint64_t place = place_in_whole(*parameter, part);
    runs.push_back(
        {from - first, to - from, place + static_cast<std::uint64_t>(from - part.first)});
  }
  runs.back().count = floats - runs.back().first;
  return runs;
}

// Adjacent runs in memory with equal decay are one, unless their state is rounded at random. The
// padding between parameters is zero in value, gradient and state, and all updates keep it zero.
// `state`: where the vector of each kind begins, one slice after the other.
std::vector<UpdateRun> make_runs(std::span<const ParameterSlice> slices,
                                 const OptimizerConfig& config, std::span<std::byte* const> state) {
  const bool is_sgd = config.kind == OptimizerConfig::Kind::kSgd;
  const bool rounded = state_type(config) != DType::kF32;
  const std::size_t size = size_of(state_type(config));
  std::vector<UpdateRun> runs;
  std::size_t offset = 0;
  for (const ParameterSlice& slice : slices) {
    const Parameter* const parameter = slice.parameter;
    if (slice.count == 0) continue;
    if (parameter->value.data == nullptr || parameter->grad.data == nullptr) {
      throw_error(ErrorCode::kInternal,
                  "parameter {} reaches the optimizer before it "
                  "has memory",
                  parameter->name);
    }
    Bf16* const copy = is_sgd ? nullptr : parameter->bf16_copy.as<Bf16>();
    for (const SliceRun& run : runs_of(slice, rounded)) {
      const std::int64_t first = slice.first + run.first;
      const auto state_of = [&](std::size_t kind) -> void* {
        if (kind >= state.size()) return nullptr;
        return state[kind] + offset + static_cast<std::size_t>(run.first) * size;
      };
      const UpdateRun next{.value = parameter->value.as<float>() + first,
                           .grad = parameter->grad.as<float>() + first,
                           .first = state_of(0),
                           .second = state_of(1),
                           .count = run.count,
                           .decay = parameter->decay,
                           .site = rounded ? moments_site(*parameter) : 0,
                           .element = run.element,
                           .bf16_copy = copy == nullptr ? nullptr : copy + first};
      if (!rounded && !runs.empty() && joins(runs.back(), next, size)) {
        runs.back().count += next.count;
      } else {
        runs.push_back(next);
      }
    }
    offset += state_bytes(config, padded_floats(slice.count));
  }
  return runs;
}

// AdamW, Adam, or SGD with momentum.
class RunOptimizer final : public Optimizer {
 public:
  RunOptimizer(const OptimizerConfig& config, std::span<const ParameterSlice> slices,
               const DeviceMemory& memory, std::uint64_t seed, StatePieces* pieces)
      : config_(config), seed_(seed), slices_(slices.begin(), slices.end()), pieces_(pieces) {
    for (const ParameterSlice& each : slices)
      bytes_ += state_bytes(config, padded_floats(each.count));
    if (pieces != nullptr) {
      first_ = pieces->take(bytes_);
      for (std::size_t i = 0; i < kinds_of(config).size(); ++i)
        state_.push_back(pieces->address(i, first_));
    } else {
      allocate(memory);
    }
    runs_ = make_runs(slices, config, state_);
    if (pieces != nullptr) part_.reserve(runs_.size());
  }

  void update(ComputeContext& ctx, std::uint64_t step, float learning_rate,
              float grad_scale) override {
    if (config_.kind == OptimizerConfig::Kind::kSgd) {
      const SgdStep sgd_step{.learning_rate = learning_rate,
                             .momentum = config_.momentum,
                             .weight_decay = config_.weight_decay,
                             .grad_scale = grad_scale,
                             .nesterov = config_.nesterov};
      return with_state([&](std::span<const UpdateRun> runs) { sgd(ctx, sgd_step, runs); });
    }
    const auto correction = [step](float beta) {
      return static_cast<float>(1.0 -
                                std::pow(static_cast<double>(beta), static_cast<double>(step)));
    };
    const AdamWStep adamw_step{.learning_rate = learning_rate,
                               .beta1 = config_.beta1,
                               .beta2 = config_.beta2,
                               .epsilon = config_.epsilon,
                               .weight_decay = config_.weight_decay,
                               .correction1 = correction(config_.beta1),
                               .correction2 = correction(config_.beta2),
                               .grad_scale = grad_scale,
                               .coupled = config_.kind == OptimizerConfig::Kind::kAdam,
                               .moments = config_.moments,
                               .seed = seed_,
                               .step = step};
    with_state([&](std::span<const UpdateRun> runs) { adamw(ctx, adamw_step, runs); });
    for (const ParameterSlice& slice : slices_) {
      if (slice.whole()) slice.parameter->bf16_copy_is_current = true;
    }
  }
  std::vector<OptimizerState> state() override {
    const std::vector<std::string> kinds = kinds_of(config_);
    std::vector<OptimizerState> result;
    std::size_t offset = 0;
    for (const ParameterSlice& slice : slices_) {
      const Parameter& parameter = *slice.parameter;
      const TensorSpec spec{state_type(config_),
                            slice.whole() ? parameter.value.shape() : Shape{slice.count}};
      for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
        result.push_back({parameter.name, kinds[kind], {state_[kind] + offset, spec}, slice.first});
      }
      offset += state_bytes(config_, padded_floats(slice.count));
    }
    return result;
  }

 private:
  void allocate(const DeviceMemory& memory) {
    const Stream stream(memory.device());
    for (std::size_t i = 0; i < kinds_of(config_).size(); ++i) {
      memory_.push_back(memory.allocate(bytes_));
      state_.push_back(memory_.back().data());
      fill_zero_async(state_.back(), bytes_, stream.view());
    }
    stream.view().synchronize();
  }

  // Calls update(runs) for all runs whose state is in memory, until all have been.
  template <typename Update>
  void with_state(const Update& update) {
    if (pieces_ == nullptr || state_.empty()) return update(runs_);
    pieces_->visit(first_, first_ + bytes_,
                   [&](std::size_t begin, std::size_t end, std::span<std::byte* const> memory) {
                     cut_runs(begin - first_, end - first_, memory);
                     update(part_);
                   });
  }

  // Makes part_ of what `memory` has of the state: bytes `begin` to `end` of this one's vectors.
  void cut_runs(std::size_t begin, std::size_t end, std::span<std::byte* const> memory) {
    const std::size_t size = size_of(state_type(config_));
    const auto offset = [&](const UpdateRun& run) {
      return static_cast<std::size_t>(static_cast<std::byte*>(run.first) - state_.front());
    };
    part_.clear();
    auto run = std::ranges::upper_bound(runs_, begin, {}, [&](const UpdateRun& each) {
      return offset(each) + static_cast<std::size_t>(each.count) * size;
    });
    for (; run != runs_.end() && offset(*run) < end; ++run) {
      const std::size_t from = std::max(begin, offset(*run));
      const std::size_t to =
          std::min(end, offset(*run) + static_cast<std::size_t>(run->count) * size);
      const auto before = static_cast<std::int64_t>((from - offset(*run)) / size);
      UpdateRun& part = part_.emplace_back(*run);
      part.value += before;
      part.grad += before;
      part.first = memory[0] + (from - begin);
      if (part.second != nullptr) part.second = memory[1] + (from - begin);
      part.count = static_cast<std::int64_t>((to - from) / size);
      part.element += static_cast<std::uint64_t>(before);
      if (part.bf16_copy != nullptr) part.bf16_copy += before;
    }
  }

  OptimizerConfig config_;
  std::uint64_t seed_;
  std::vector<ParameterSlice> slices_;
  std::vector<UpdateRun> runs_;    // by their places in the state
  std::size_t bytes_ = 0;          // of each vector
  std::vector<std::byte*> state_;  // [kind] a vector, zeroed at first, with a part per slice
  std::vector<Buffer> memory_;     // that has it
  StatePieces* pieces_;            // or else this does, from first_ on
  std::size_t first_ = 0;
  std::vector<UpdateRun> part_;  // cut_runs()
};

void require_numbers(const OptimizerConfig& config) {
  const auto require = [](const char* name, float value, bool fits, const char* legal) {
    if (std::isfinite(value) && fits) return;
    throw_usage("an optimizer's {} is {}; legal are {}", name, value, legal);
  };
  constexpr const char* kBelowOne = "numbers from 0 to below 1";
  constexpr const char* kFromZero = "numbers from 0";
  require("beta1", config.beta1, config.beta1 >= 0 && config.beta1 < 1, kBelowOne);
  require("beta2", config.beta2, config.beta2 >= 0 && config.beta2 < 1, kBelowOne);
  // An element whose gradients are all 0 would be divided by 0.
  require("epsilon", config.epsilon, config.epsilon > 0, "numbers above 0");
  require("momentum", config.momentum, config.momentum >= 0, kFromZero);
  require("weight decay", config.weight_decay, config.weight_decay >= 0, kFromZero);
}

}  // namespace

void require_sensible(const OptimizerConfig& config) {
  require_numbers(config);
  if (config.nesterov && !(config.kind == OptimizerConfig::Kind::kSgd && config.momentum > 0)) {
    throw Error(ErrorCode::kUsage, "nesterov is for SGD with a momentum above 0");
  }
  if (config.moments != DType::kF32 && config.moments != DType::kBf16) {
    throw_usage("an optimizer's moments in {}; legal: f32, bf16", name_of(config.moments));
  }
  if (config.moments != DType::kF32 && config.kind == OptimizerConfig::Kind::kSgd) {
    throw Error(ErrorCode::kUsage, "moments in bf16 are for AdamW and Adam; SGD's momentum is f32");
  }
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::span<const ParameterSlice> slices,
                                          const DeviceMemory& memory, std::uint64_t seed,
                                          StatePieces* pieces) {
  require_sensible(config);
  return std::make_unique<RunOptimizer>(config, slices, memory, seed, pieces);
}

std::vector<ParameterSlice> whole_slices(std::span<Parameter* const> parameters) {
  std::vector<ParameterSlice> slices;
  for (Parameter* parameter : parameters) {
    slices.push_back({parameter, 0, parameter->shape.elements()});
  }
  return slices;
}

std::size_t state_kinds(const OptimizerConfig& config) { return kinds_of(config).size(); }

std::size_t state_bytes_per_element(const OptimizerConfig& config) {
  return state_kinds(config) * size_of(state_type(config));
}

std::size_t optimizer_bytes(const OptimizerConfig& config, std::int64_t elements) {
  return multiply_bytes(state_bytes(config, padded_floats(elements)), kinds_of(config).size());
}

double clip_factor(double norm, double clip) { return clip > 0 && norm > clip ? clip / norm : 1.0; }

}  // namespace sluice
