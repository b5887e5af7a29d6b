// What torch_stage() is made of. <sluice/torch.hpp> includes this header at its end; programs
// include that one.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/script.h>
#include <torch/torch.h>

// Defined by the target Sluice::torch: whether LibTorch has CUDA.
#ifndef SLUICE_TORCH_CUDA
#define SLUICE_TORCH_CUDA 0
#endif
#if SLUICE_TORCH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/stage.hpp>

#pragma GCC visibility push(default)
namespace sluice {
namespace torch_detail {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

// A module whose type is forgotten. Tensors are handles of the module's own.
struct TorchModule {
  NamedTensors parameters = {}, buffers = {};
  std::function<TorchTensors(const TorchTensors& inputs)> forward = {};
  // Gives all submodules the mode that they came with (true), or evaluation mode.
  std::function<void(bool training)> set_training = {};
};

[[noreturn]] inline void refuse(const std::string& message) {
  throw Error(ErrorCode::kUsage, message);
}

struct TypePair {
  DType own;
  torch::ScalarType torch;
};
inline constexpr TypePair kTypes[] = {
    {DType::kF32, torch::kFloat32}, {DType::kBf16, torch::kBFloat16},
    {DType::kI32, torch::kInt32},   {DType::kU8, torch::kUInt8},
    {DType::kF64, torch::kFloat64}, {DType::kF16, torch::kFloat16},
    {DType::kI64, torch::kInt64}};

inline torch::ScalarType torch_type(DType dtype) {
  for (const TypePair& type : kTypes) {
    if (type.own == dtype) return type.torch;
  }
  refuse("it has no tensors of type number " + std::to_string(static_cast<int>(dtype)));
}

// Null for a type that Sluice's tensors do not have.
inline std::optional<DType> sluice_type(torch::ScalarType torch) {
  for (const TypePair& type : kTypes) {
    if (type.torch == torch) return type.own;
  }
  return std::nullopt;
}

// "f32, bf16, ..."
inline std::string legal_types() {
  std::string text;
  for (const TypePair& type : kTypes) {
    text.append(text.empty() ? "" : ", ").append(name_of(type.own));
  }
  return text;
}

inline std::vector<std::int64_t> sizes_of(const Shape& shape) {
  std::vector<std::int64_t> sizes;
  for (int d = 0; d < shape.rank(); ++d) sizes.push_back(shape[d]);
  return sizes;
}

inline torch::Device torch_device(Device device) {
  if (device.kind == DeviceKind::kCpu) return {torch::kCPU};
  return {torch::kCUDA, static_cast<torch::DeviceIndex>(device.index)};
}

// A view; `owner`, if any, keeps the memory.
inline torch::Tensor view_of(const Tensor& tensor, Device device,
                             const std::shared_ptr<const void>& owner = nullptr) {
  const auto options =
      torch::TensorOptions().dtype(torch_type(tensor.spec.dtype)).device(torch_device(device));
  const std::vector<std::int64_t> sizes = sizes_of(tensor.shape());
  if (owner == nullptr) return torch::from_blob(tensor.data, sizes, options);
  return torch::from_blob(
      tensor.data, sizes, [owner](void*) {}, options);
}

inline TorchTensors views_of(std::span<const Tensor> tensors, Device device) {
  TorchTensors views;
  for (const Tensor& tensor : tensors) views.push_back(view_of(tensor, device));
  return views;
}

// "f32 [4, 16], i32 [4]"
inline std::string list_of(std::span<const TensorSpec> specs) {
  std::string text;
  for (const TensorSpec& spec : specs) {
    text.append(text.empty() ? "" : ", ").append(to_string(spec));
  }
  return text.empty() ? "nothing" : text;
}

// LibTorch's message as one line, without its stack.
inline std::string line_of(const c10::Error& error) {
  std::string text = error.what_without_backtrace();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// --- forward() of any type ---
template <typename Result>
void flatten(const Result& result, TorchTensors& into) {
  if constexpr (std::convertible_to<const Result&, torch::Tensor>) {
    into.push_back(result);
  } else if constexpr (requires { std::tuple_size<Result>::value; }) {
    std::apply([&](const auto&... parts) { (flatten(parts, into), ...); }, result);
  } else {
    for (const auto& part : result) flatten(part, into);
  }
}

inline void flatten(const c10::IValue& result, TorchTensors& into) {
  if (result.isTensor()) {
    into.push_back(result.toTensor());
  } else if (result.isTuple()) {
    for (const c10::IValue& part : result.toTupleRef().elements()) flatten(part, into);
  } else if (result.isList()) {
    for (const c10::IValue& part : result.toListRef()) flatten(part, into);
  } else {
    refuse("forward() returns a value of type " + result.tagKind() +
           "; legal are tensors, tuples and lists of them");
  }
}

// Whether forward() takes that many tensors one by one; then `outputs` has its result.
template <typename Module, std::size_t... I>
bool call_with(Module& module, const TorchTensors& inputs, TorchTensors& outputs,
               std::index_sequence<I...>) {
  if constexpr (requires { module.forward(torch::Tensor(inputs[I])...); }) {
    if (inputs.size() != sizeof...(I)) return false;
    flatten(module.forward(torch::Tensor(inputs[I])...), outputs);
    return true;
  } else {
    return false;
  }
}

template <typename Module>
TorchTensors call_forward(Module& module, const TorchTensors& inputs) {
  TorchTensors outputs;
  const bool called = [&]<std::size_t... N>(std::index_sequence<N...>) {
    return (call_with(module, inputs, outputs, std::make_index_sequence<N + 1>()) || ...);
  }
  (std::make_index_sequence<8>());
  if (called) return outputs;
  if constexpr (requires { module.forward(inputs); }) {
    flatten(module.forward(inputs), outputs);
    return outputs;
  }
  refuse("forward() takes another number of tensors than " + std::to_string(inputs.size()));
}

// --- modules of any type ---
inline TorchModule describe_module(const std::shared_ptr<torch::nn::Module>& module) {
  TorchModule result;
  for (const auto& item : module->named_parameters()) {
    result.parameters.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module->named_buffers()) {
    result.buffers.emplace_back(item.key(), item.value());
  }
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;  // parents first
  for (const auto& part : module->modules()) modes.emplace_back(part, part->is_training());
  result.set_training = [modes = std::move(modes)](bool training) {
    for (const auto& [part, mode] : modes) part->train(training && mode);
  };
  return result;
}

template <typename Module>
requires std::derived_from<Module, torch::nn::Module> TorchModule
as_module(std::shared_ptr<Module> module) {
  if (module == nullptr) refuse("it has no module");
  TorchModule result = describe_module(module);
  result.forward = [module = std::move(module)](const TorchTensors& inputs) {
    return call_forward(*module, inputs);
  };
  return result;
}

template <typename Holder>
requires std::derived_from<Holder, torch::nn::ModuleHolder<typename Holder::ContainedType>>
    TorchModule as_module(Holder holder) {
  if (holder.is_empty()) refuse("it has no module");
  return as_module(holder.ptr());
}

inline TorchModule as_module(torch::nn::AnyModule module) {
  if (module.is_empty()) refuse("it has no module");
  TorchModule result = describe_module(module.ptr());
  auto shared = std::make_shared<torch::nn::AnyModule>(std::move(module));
  result.forward = [shared](const TorchTensors& inputs) { return call_forward(*shared, inputs); };
  return result;
}

inline TorchModule as_module(torch::jit::Module module) {
  TorchModule result;
  for (const auto& item : module.named_parameters()) {
    result.parameters.emplace_back(item.name, item.value);
  }
  for (const auto& item : module.named_buffers()) {
    result.buffers.emplace_back(item.name, item.value);
  }
  std::vector<std::pair<torch::jit::Module, bool>> modes;
  for (const torch::jit::Module& part : module.modules()) {
    modes.emplace_back(part, part.is_training());
  }
  result.set_training = [modes = std::move(modes)](bool training) mutable {
    for (auto& [part, mode] : modes) {
      if (part.hasattr("training")) part.train(training && mode);
    }
  };
  result.forward = [module = std::move(module)](const TorchTensors& inputs) mutable {
    // Optimized graphs are made after some runs, and have other bits.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    TorchTensors outputs;
    flatten(module.forward({inputs.begin(), inputs.end()}), outputs);
    return outputs;
  };
  return result;
}

template <typename Module>
requires std::derived_from<Module, torch::nn::Module> TorchModule as_module(Module module) {
  return as_module(std::make_shared<Module>(std::move(module)));
}

// --- what holds during one call ---
// Gives LibTorch's generator of a device this seed; at the end its former state.
class RandomScope {
 public:
  RandomScope(torch::Device device, std::uint64_t seed)
      : generator_(at::globalContext().defaultGenerator(device)) {
    const std::scoped_lock lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~RandomScope() {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(before_);
  }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  at::Generator generator_;
  torch::Tensor before_;
};

// LibTorch's threads, random numbers, and stream, of the context.
class TorchScope {
 public:
  TorchScope(const ComputeContext& compute, std::uint64_t seed) : random_(torch::kCPU, seed) {
    if (at::get_num_threads() != compute.threads()) at::set_num_threads(compute.threads());
    if (compute.device().kind == DeviceKind::kCpu) return;
#if SLUICE_TORCH_CUDA
    const torch::Device device = torch_device(compute.device());
    device_random_.emplace(device, seed);
    stream_.emplace(c10::cuda::getStreamFromExternal(
                        static_cast<cudaStream_t>(compute.stream().native()), device.index())
                        .unwrap());
#else
    refuse("this LibTorch has no CUDA; choose the device cpu for the stage's rank");
#endif
  }

 private:
  RandomScope random_;
#if SLUICE_TORCH_CUDA
  std::optional<RandomScope> device_random_;
  std::optional<c10::StreamGuard> stream_;
#endif
};

// Restores buffers at its end.
class BufferKeeper {
 public:
  explicit BufferKeeper(const NamedTensors& buffers) : buffers_(buffers) {
    for (const auto& [name, buffer] : buffers_) kept_.push_back(buffer.detach().clone());
  }
  ~BufferKeeper() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < kept_.size(); ++i) buffers_[i].second.copy_(kept_[i]);
  }
  BufferKeeper(const BufferKeeper&) = delete;
  BufferKeeper& operator=(const BufferKeeper&) = delete;

 private:
  NamedTensors buffers_;
  TorchTensors kept_;
};

// Counts the bytes that LibTorch allocates on this thread while a c10::DebugInfoGuard installs it.
class AllocationCount : public c10::MemoryReportingInfoBase {
 public:
#if TORCH_VERSION_MAJOR >= 2
  using Total = std::size_t;
#else
  using Total = std::int64_t;
#endif
  void reportMemoryUsage(void* /*place*/, std::int64_t bytes, Total /*allocated*/,
                         Total /*reserved*/, c10::Device /*device*/) override {
    live += bytes;
    peak = std::max(peak, live);
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

  std::int64_t live = 0, peak = 0;
};

// Runs `body` for the stage of that prefix. LibTorch's errors become Sluice's.
template <typename Body>
auto in_torch(const std::string& prefix, const char* where, const Body& body) {
  const auto message = [&](const std::string& text) {
    return std::string("torch stage '").append(prefix).append("', ").append(where).append(text);
  };
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUsage) throw;
    throw Error(error.code(), message(": ").append(error.what()));
  } catch (const c10::IndexError& error) {
    throw Error(ErrorCode::kData, message(": ").append(line_of(error)));
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(message(": ").append(line_of(error)));
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::kUser, message(": ").append(line_of(error)));
  }
}

class TorchStage : public Stage, public SplitBackward {
 public:
  // `remake` is null, or makes the module again.
  TorchStage(std::string prefix, TorchModule module, std::function<TorchModule()> remake)
      : prefix_(std::move(prefix)), module_(std::move(module)), remake_(std::move(remake)) {
    for (const auto& [name, tensor] : module_.parameters) {
      if (!contains(parameters_of_module_, tensor)) add_parameter(name, tensor);
    }
    for (const auto& [name, tensor] : module_.buffers) {
      if (!contains(buffers_of_module_, tensor)) add_buffer(name, tensor);
    }
  }

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override {
    return in_torch(prefix_, "describe", [&] {
      const TorchScope scope(compute, 0);
      const torch::AutoGradMode with_graph(true);
      return describe_on_zeros(inputs);
    });
  }

  void prepare(const StageSetup& setup) override {
    in_torch(prefix_, "prepare", [&] {
      device_ = setup.compute->device();
      slots_.resize(static_cast<std::size_t>(setup.slots));
      parameters_.require_memory();
      const TorchScope scope(*setup.compute, seed_of(setup.seed, 0, kInitial, 0));
      take_values(remake_ == nullptr ? module_ : remake_());
    });
    for (const auto& inputs : setup.input_sizes) prepare_size(*setup.compute, inputs);
  }

  void prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) override {
    if (device_.kind == DeviceKind::kCpu) return;
    in_torch(prefix_, "prepare", [&] {
      const TorchScope scope(compute, 0);
      warm_up(inputs);
      compute.wait();
    });
  }

  void begin_step(ComputeContext& compute) override {
    in_torch(prefix_, "begin_step", [&] {
      require_own_memory(parameters_.all(), parameters_of_module_);
      module_.set_training(training_);  // the program may have changed it
      const TorchScope scope(compute, 0);
      const torch::NoGradGuard no_grad;
      // What a loaded save or the first replica says.
      for (Counter& counter : counters_) counter.own.copy_(counter.saved);
    });
  }

  ParameterSet* parameters() override {
    return parameters_.size() + parameters_.buffers().size() == 0 ? nullptr : &parameters_;
  }

  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    in_torch(prefix_, "forward", [&] {
      const bool train = ctx.phase == Phase::kTrain;
      const TorchScope scope(ctx.compute, seed_of(ctx, kForward));
      const torch::AutoGradMode with_graph(train);
      if (training_ != train) module_.set_training(train);
      training_ = train;
      Slot slot{.inputs = views_of(inputs, device_), .outputs = {}};
      for (torch::Tensor& input : slot.inputs) {
        input.requires_grad_(train && ctx.stage > 0 && input.is_floating_point());
      }
      slot.outputs = module_.forward(slot.inputs);
      for (std::size_t i = 0; i < slot.inputs.size(); ++i) {
        if (slot.inputs[i]._version() == 0) continue;
        refuse("it changes its input " + std::to_string(i) + " in place; let it change a copy");
      }
      write_outputs(slot.outputs, outputs);
      if (!train) return;
      const torch::NoGradGuard no_grad;
      for (Counter& counter : counters_) counter.saved.copy_(counter.own);
      slots_[static_cast<std::size_t>(ctx.slot)] = std::move(slot);
    });
  }

  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    differentiate(ctx, grad_outputs, grad_inputs, Part::kBoth);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override {
    differentiate(ctx, grad_outputs, grad_inputs, Part::kInput);
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override {
    differentiate(ctx, grad_outputs, {}, Part::kWeight);
  }

 protected:
  enum Purpose : std::uint64_t { kInitial, kForward, kLoss };

  // Of LibTorch's generator.
  [[nodiscard]] std::uint64_t seed_of(const StageContext& ctx, Purpose purpose) const {
    return seed_of(ctx.seed, ctx.step, purpose, static_cast<std::uint64_t>(ctx.first_sample));
  }
  [[nodiscard]] std::uint64_t seed_of(std::uint64_t seed, std::uint64_t step, Purpose purpose,
                                      std::uint64_t first_sample) const {
    const auto words =
        philox({.seed = seed, .site = hash_name(prefix_), .step = step}, purpose, first_sample);
    return std::uint64_t{words[0]} << 32 | words[1];
  }
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] const std::string& prefix() const { return prefix_; }

 private:
  enum class Part { kInput, kWeight, kBoth };
  struct Slot {
    TorchTensors inputs = {}, outputs = {};  // leaves and roots of the graph
  };

  // A whole number of the module that Sluice has as f32.
  struct Counter {
    torch::Tensor own, saved;
  };

  static bool contains(const NamedTensors& tensors, const torch::Tensor& tensor) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto& other) { return other.second.is_same(tensor); });
  }

  [[nodiscard]] std::string full_name(const std::string& name) const {
    return prefix_.empty() ? name : std::string(prefix_).append(".").append(name);
  }

  void require_own_memory(const std::vector<Parameter*>& of_stage,
                          const NamedTensors& of_module) const {
    for (std::size_t i = 0; i < of_stage.size(); ++i) {
      if (of_stage[i]->shape.elements() == 0) continue;
      if (of_module[i].second.data_ptr() == of_stage[i]->value.data) continue;
      refuse("parameter " + of_stage[i]->name +
             " has other memory than prepare() gave it; give each stage a module of its own");
    }
  }

  void add_buffer(const std::string& name, const torch::Tensor& tensor) {
    const bool counts = torch::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
                        tensor.numel() == 1 && tensor.abs().item<double>() <= 0x1.0p24;
    const bool is_float =
        tensor.scalar_type() == torch::kFloat32 && tensor.dim() <= Shape::kMaxDims;
    if (!counts && !is_float) return constants_.push_back({name, tensor});
    parameters_.add_buffer(full_name(name), shape_of(tensor), Init::constant(0),
                           counts ? ReplicaRule::kFirst : ReplicaRule::kMean);
    buffers_of_module_.emplace_back(name, tensor);
  }

  void add_parameter(const std::string& name, const torch::Tensor& tensor) {
    const std::string full = full_name(name);
    if (tensor.scalar_type() != torch::kFloat32 || tensor.dim() > Shape::kMaxDims) {
      refuse("parameter " + full + " is of type " + torch::toString(tensor.scalar_type()) +
             " with " + std::to_string(tensor.dim()) +
             " dimensions; parameters are f32 with at most " +
             std::to_string(int{Shape::kMaxDims}));
    }
    parameters_.add(full, shape_of(tensor), Init::constant(0),
                    tensor.requires_grad() && tensor.dim() > 1);
    parameters_of_module_.emplace_back(name, tensor);
  }

  [[nodiscard]] StageDescription describe_on_zeros(std::span<const TensorSpec> inputs) const {
    StageDescription description;
    description.own_memory = true;
    const TorchTensors zeros = zeros_of(inputs);
    for (const torch::Tensor& zero : zeros) {
      description.input_gradients.push_back(zero.is_floating_point());
    }
    const auto count = std::make_shared<AllocationCount>();
    TorchTensors outputs;
    const BufferKeeper keeper(module_.buffers);
    module_.set_training(false);
    try {
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, count);
      outputs = module_.forward(zeros);
    } catch (const c10::Error& error) {
      module_.set_training(training_);
      refuse("its module does not take " + list_of(inputs) + ": " + line_of(error));
    }
    module_.set_training(training_);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      description.outputs.push_back(spec_of(outputs[i], i));
    }
    const Measured measured = measure(inputs, *count);
    description.state_bytes_until_weight = measured.state;
    description.workspace_bytes = measured.workspace;
    return description;
  }

  struct Measured {
    std::size_t inputs = 0, state = 0, workspace = 0;  // bytes
  };

  // What forward() took. A smaller micro-batch must not need more than the largest one, which comes
  // first; LibTorch may compute it in another way that does.
  Measured measure(std::span<const TensorSpec> inputs, const AllocationCount& count) const {
    Measured measured;
    for (const TensorSpec& spec : inputs) measured.inputs += spec.bytes();
    measured.state = static_cast<std::size_t>(std::max<std::int64_t>(count.live, 0));
    measured.workspace = static_cast<std::size_t>(count.peak) - measured.state;
    if (measured.inputs > largest_.inputs) {
      largest_ = measured;
    } else {
      measured.state = std::min(measured.state, largest_.state);
      measured.workspace = std::min(measured.workspace, largest_.workspace);
    }
    return measured;
  }

  // On the device of the module, with gradients where Sluice wants them.
  [[nodiscard]] TorchTensors zeros_of(std::span<const TensorSpec> inputs) const {
    torch::Device device = torch::kCPU;
    if (!module_.buffers.empty()) device = module_.buffers.front().second.device();
    if (!parameters_of_module_.empty()) device = parameters_of_module_.front().second.device();
    TorchTensors zeros;
    for (const TensorSpec& spec : inputs) {
      const auto options = torch::TensorOptions().dtype(torch_type(spec.dtype)).device(device);
      zeros.push_back(torch::zeros(sizes_of(spec.shape), options));
      zeros.back().requires_grad_(zeros.back().is_floating_point());
    }
    return zeros;
  }

  // Moves parameters and buffers into Sluice's memory, with the values of `from`.
  void take_values(const TorchModule& from) {
    const torch::NoGradGuard no_grad;
    const std::vector<Parameter*> parameters = parameters_.all(), buffers = parameters_.buffers();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto& [name, tensor] = parameters_of_module_[i];
      tensor.set_data(taken(*parameters[i], like(name, tensor, from.parameters)));
      if (parameters[i]->grad.data == nullptr) continue;  // no training
      grads_.push_back(view_of(parameters[i]->grad, device_, parameters[i]->memory));
      tensor.mutable_grad() = grads_.back();
    }
    const torch::Device device = torch_device(device_);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      auto& [name, tensor] = buffers_of_module_[i];
      const torch::Tensor value = like(name, tensor, from.buffers);
      const torch::Tensor saved = taken(*buffers[i], value);
      const bool counts = tensor.scalar_type() != torch::kFloat32;
      tensor.set_data(counts ? value.to(device) : saved);
      if (counts) counters_.push_back({tensor, saved});
    }
    for (auto& [name, tensor] : constants_) {
      tensor.set_data(like(name, tensor, from.buffers).to(device));
    }
    parameters_.mark_values_changed();
  }

  // Sluice's memory with that value.
  [[nodiscard]] torch::Tensor taken(const Parameter& parameter, const torch::Tensor& value) const {
    torch::Tensor view = view_of(parameter.value, device_, parameter.memory);
    return view.copy_(value);
  }

  static const torch::Tensor* find(const std::string& name, const NamedTensors& tensors) {
    for (const auto& [other, tensor] : tensors) {
      if (other == name) return &tensor;
    }
    return nullptr;
  }
  static torch::Tensor like(const std::string& name, const torch::Tensor& tensor,
                            const NamedTensors& tensors) {
    const torch::Tensor* const found = find(name, tensors);
    if (found == nullptr || found->sizes() != tensor.sizes()) {
      refuse("its function makes modules with and without " + name + " of that shape");
    }
    return found->detach();
  }

  // CUDA loads a kernel at its first launch.
  void warm_up(std::span<const TensorSpec> inputs) const {
    const BufferKeeper keeper(module_.buffers);
    const torch::AutoGradMode with_graph(true);
    const TorchTensors zeros = zeros_of(inputs);
    TorchTensors roots, of;
    for (const torch::Tensor& output : module_.forward(zeros)) {
      if (output.requires_grad()) roots.push_back(output.sum());
    }
    for (const torch::Tensor& zero : zeros) {
      if (zero.requires_grad()) of.push_back(zero);
    }
    for (const auto& [name, tensor] : parameters_of_module_) {
      if (tensor.requires_grad()) of.push_back(tensor);
    }
    if (roots.empty() || of.empty()) return;
    (void)torch::autograd::grad(roots, of, {}, false, false, /*allow_unused=*/true);
  }

  [[nodiscard]] static Shape shape_of(const torch::Tensor& tensor) {
    return Shape(std::span<const std::int64_t>(tensor.sizes().data(), tensor.sizes().size()));
  }

  [[nodiscard]] static TensorSpec spec_of(const torch::Tensor& tensor, std::size_t index) {
    const std::optional<DType> dtype = sluice_type(tensor.scalar_type());
    if (!dtype || tensor.dim() > Shape::kMaxDims) {
      refuse("output " + std::to_string(index) + " is of type " +
             torch::toString(tensor.scalar_type()) + " with " + std::to_string(tensor.dim()) +
             " dimensions; legal are " + legal_types() + " with at most " +
             std::to_string(int{Shape::kMaxDims}));
    }
    return {*dtype, shape_of(tensor)};
  }

  void write_outputs(const TorchTensors& from, std::span<const Tensor> to) const {
    const torch::NoGradGuard no_grad;
    std::vector<TensorSpec> given, wanted;
    for (std::size_t i = 0; i < from.size(); ++i) given.push_back(spec_of(from[i], i));
    for (const Tensor& tensor : to) wanted.push_back(tensor.spec);
    if (given != wanted) {
      refuse("it returns " + list_of(given) + ", but for zeros of the same shapes " +
             list_of(wanted) + "; output shapes may depend on input shapes alone");
    }
    for (std::size_t i = 0; i < from.size(); ++i) view_of(to[i], device_).copy_(from[i]);
  }

  void differentiate(StageContext& ctx, std::span<const Tensor> grad_outputs,
                     std::span<const Tensor> grad_inputs, Part part) {
    in_torch(prefix_, "backward", [&] {
      const TorchScope scope(ctx.compute, seed_of(ctx, kForward));
      const torch::NoGradGuard no_grad;
      Slot& slot = slots_[static_cast<std::size_t>(ctx.slot)];
      TorchTensors of;
      for (std::size_t i = 0; i < grad_inputs.size(); ++i) {
        if (grad_inputs[i].data != nullptr) of.push_back(slot.inputs[i]);
      }
      if (part != Part::kInput) {
        for (const auto& [name, tensor] : parameters_of_module_) {
          if (tensor.requires_grad()) of.push_back(tensor);
        }
      }
      const TorchTensors grads = gradients(slot, grad_outputs, of, part == Part::kInput);
      auto grad = grads.begin();
      for (const Tensor& to : grad_inputs) {
        if (to.data == nullptr) continue;
        torch::Tensor view = view_of(to, device_);
        grad->defined() ? view.copy_(*grad) : view.zero_();
        ++grad;
      }
      if (part == Part::kInput) return;
      for (std::size_t i = 0; i < grads_.size(); ++i) {
        if (!parameters_of_module_[i].second.requires_grad()) continue;
        if (grad->defined()) grads_[i].add_(*grad);
        ++grad;
      }
      slot = {};
    });
  }

  // Of the roots with those gradients, with respect to `of`; undefined where a root does not depend
  // on it.
  [[nodiscard]] TorchTensors gradients(const Slot& slot, std::span<const Tensor> grad_outputs,
                                       const TorchTensors& of, bool keep_graph) const {
    TorchTensors roots, of_roots;
    for (std::size_t i = 0; i < slot.outputs.size(); ++i) {
      if (!slot.outputs[i].requires_grad() || grad_outputs[i].data == nullptr) continue;
      roots.push_back(slot.outputs[i]);
      of_roots.push_back(view_of(grad_outputs[i], device_));
    }
    if (roots.empty() || of.empty()) return TorchTensors(of.size());
    return torch::autograd::grad(roots, of, of_roots, keep_graph, /*create_graph=*/false,
                                 /*allow_unused=*/true);
  }

  std::string prefix_;
  TorchModule module_;
  std::function<TorchModule()> remake_;
  ParameterSet parameters_;
  // The module's, in order of parameters_, named without the prefix.
  NamedTensors parameters_of_module_, buffers_of_module_;
  NamedTensors constants_;  // the module's other buffers
  std::vector<Counter> counters_;
  TorchTensors grads_;  // views of parameters_' gradients
  std::vector<Slot> slots_;
  Device device_ = {};
  bool training_ = true;           // the mode that module_ has now
  mutable Measured largest_ = {};  // what describe() has said of the largest inputs so far
};

class TorchLossStage : public TorchStage, public LossStage {
 public:
  TorchLossStage(std::string prefix, TorchModule module, std::function<TorchModule()> remake,
                 TorchLoss loss)
      : TorchStage(std::move(prefix), std::move(module), std::move(remake)),
        loss_(std::move(loss)) {}

  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override {
    in_torch(prefix(), "loss", [&] {
      const bool train = ctx.phase == Phase::kTrain;
      const TorchScope scope(ctx.compute, seed_of(ctx, kLoss));
      const torch::AutoGradMode with_graph(train);
      const TorchTensors leaves = views_of(outputs, device());
      TorchTensors of;
      for (const torch::Tensor& leaf : leaves) {
        if (!train || !leaf.is_floating_point()) continue;
        leaf.requires_grad_();
        of.push_back(leaf);
      }
      const torch::Tensor total = loss_.sum(leaves, views_of(targets, device()));
      if (total.numel() != 1) {
        refuse("it returns " + std::to_string(total.numel()) + " elements; return the sum");
      }
      if (train) write_gradients(total * static_cast<double>(ctx.loss_scale), of, outputs);
      const torch::NoGradGuard no_grad;
      torch::from_blob(sum, {}, torch::kFloat64).copy_(total.reshape({}), /*non_blocking=*/true);
    });
  }

  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override {
    return in_torch(prefix(), "target_weight", [&] {
      if (loss_.weight != nullptr) return loss_.weight(views_of(targets, {}));
      if (targets.empty()) refuse("there are no targets; give the loss a weight");
      return static_cast<double>(targets.front().elements());
    });
  }

 private:
  // Of `scaled` with respect to `of`, the float ones of `outputs`, into their memory.
  void write_gradients(const torch::Tensor& scaled, const TorchTensors& of,
                       std::span<const Tensor> outputs) const {
    TorchTensors grads(of.size());
    if (scaled.requires_grad()) {
      grads = torch::autograd::grad({scaled}, of, {}, /*retain_graph=*/false,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    }
    auto grad = grads.begin();
    for (const Tensor& output : outputs) {
      torch::Tensor view = view_of(output, device());
      if (!view.is_floating_point()) continue;
      grad->defined() ? view.copy_(*grad) : view.zero_();
      ++grad;
    }
  }

  TorchLoss loss_;
};

// --- losses ---
template <typename Function>
TorchLoss::Weight weight_from(Function function) {
  constexpr bool takes_one = std::is_invocable_r_v<double, Function&, const torch::Tensor&>;
  static_assert(takes_one || std::constructible_from<TorchLoss::Weight, Function>,
                "the weight of a TorchLoss takes (const torch::Tensor& target) or (const "
                "TorchTensors& targets), and returns a double");
  if constexpr (takes_one) {
    return [function = std::move(function)](const TorchTensors& targets) mutable {
      if (targets.size() == 1) return static_cast<double>(function(targets[0]));
      refuse("the weight of its loss is a function of one target, but there are " +
             std::to_string(targets.size()) + "; take (const TorchTensors&)");
    };
  } else if constexpr (std::constructible_from<TorchLoss::Weight, Function>) {
    return TorchLoss::Weight(std::move(function));
  }
}

}  // namespace torch_detail

template <typename Function, typename WeightFunction>
requires(!std::same_as<Function, TorchLoss>) TorchLoss::TorchLoss(Function function,
                                                                  WeightFunction weight_of)
    : weight(torch_detail::weight_from(std::move(weight_of))) {
  static_assert(std::invocable<Function&, torch::Tensor, torch::Tensor> ||
                    std::invocable<Function&, const TorchTensors&, const TorchTensors&>,
                "a TorchLoss takes (torch::Tensor output, torch::Tensor target) or (const "
                "TorchTensors& outputs, const TorchTensors& targets), and returns a torch::Tensor");
  if constexpr (std::invocable<Function&, torch::Tensor, torch::Tensor>) {
    sum = [function = std::move(function)](const TorchTensors& outputs,
                                           const TorchTensors& targets) mutable {
      if (outputs.size() != 1 || targets.size() != 1) {
        torch_detail::refuse("its loss is a function of one output and one target, but there are " +
                             std::to_string(outputs.size()) + " and " +
                             std::to_string(targets.size()) +
                             "; take (const TorchTensors&, const TorchTensors&)");
      }
      return torch::Tensor(function(outputs[0], targets[0]));
    };
  } else if constexpr (std::invocable<Function&, const TorchTensors&, const TorchTensors&>) {
    sum = std::move(function);
  }
}

template <typename Module>
std::unique_ptr<Stage> torch_stage(std::string prefix, Module module, TorchLoss loss) {
  using torch_detail::as_module;
  return torch_detail::in_torch(prefix, "torch_stage", [&]() -> std::unique_ptr<Stage> {
    torch_detail::TorchModule made;
    std::function<torch_detail::TorchModule()> remake;
    if constexpr (requires { as_module(module); }) {
      made = as_module(std::move(module));
    } else {
      remake = [module] { return as_module(module()); };
      const torch_detail::RandomScope random(torch::kCPU, 0);
      made = remake();
    }
    if (loss.sum == nullptr) {
      return std::make_unique<torch_detail::TorchStage>(prefix, std::move(made), std::move(remake));
    }
    return std::make_unique<torch_detail::TorchLossStage>(prefix, std::move(made),
                                                          std::move(remake), std::move(loss));
  });
}

}  // namespace sluice
#pragma GCC visibility pop
