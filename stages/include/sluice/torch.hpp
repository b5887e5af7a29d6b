// LibTorch modules as stages: torch_stage() makes a Stage of a torch::nn::Module or of a
// TorchScript module. Include this header alone; link Sluice::torch. No other header of Sluice
// includes it.
//
// forward() takes one to eight tensors, or one std::vector of them: the stage's inputs in order. It
// returns a tensor, or a tuple, pair, vector or array of tensors, nested or not: the outputs in
// order. Output shapes depend on input shapes alone. forward() must not change its inputs in place.
//
// Parameters. Each becomes one of Sluice: "<prefix>.<name>", or "<name>" for an empty prefix; with
// weight decay if it has two dimensions or more. It must be f32.
// From prepare() on it is a view of Sluice's memory, and its grad() a view of Sluice's gradient. So
// optimizers, clipping, replicas and saves work on it. The memory lives as long as the module: a
// module may outlive its pipeline. A tensor with several names is one parameter of its first name.
// One that requires no gradient stays as it is: its gradient is zero, and it has no weight decay.
//
// Initial values are the module's own. LibTorch draws them from one generator per process, so they
// depend on what the process drew before. Two ways give the same values in every layout:
//   - Pass a function that makes the module. It runs twice: in torch_stage(), for shapes, and in
//     prepare(), for values. In prepare() LibTorch's generator has a seed that is a function of
//     (setup.seed, prefix). No layout changes the values if each layer is a stage with its prefix.
//   - Make the whole model from one seed on every rank, and hand over the stage's part of it.
//
// A module serves one stage at a time. begin_step() is Error(kUsage) if another stage, or the
// program, has given its parameters other memory.
//
// Buffers. Those of f32, such as running statistics, become buffers of Sluice, as views: saved, and
// the mean over replicas at the end of a step. So do whole numbers of one element up to 2^24, such
// as num_batches_tracked; replicas take the first one's. Other buffers are constants: they move to
// the stage's device, and no save has them. Only forward() in training changes buffers, once per
// micro-batch.
//
// Training and evaluation. A submodule that is in evaluation mode when torch_stage() gets it stays
// there in training steps too. A TorchScript file keeps the mode in which it was saved: call
// train() on the loaded module first.
//
// Random numbers. In each call LibTorch's generator has a seed that is a function of (seed, prefix,
// step, first sample of the micro-batch). After the call it has its former state. So dropout
// repeats. It does not depend on the split if each layer is a stage with its prefix. Stages of
// equal prefix draw equal numbers.
//
// Graphs. Each slot keeps the autograd graph of its micro-batch from forward to W. I and W are two
// calls of torch::autograd::grad: I asks for inputs, W for parameters. W walks the graph again, so
// I and W take longer than B.
//
// describe() runs forward() on zeros, in evaluation mode, and counts what LibTorch allocates.
//
// LibTorch uses ComputeContext::threads() threads. On a GPU it uses the context's stream, if it has
// CUDA (SLUICE_TORCH_CUDA). LibTorch's kernels do not load before their first launch; prepare()
// runs those of forward and backward, but not those of the loss. A job with NCCL therefore sets
// CUDA_MODULE_LOADING=EAGER.
//
// Errors name the prefix. Error(kUsage): shapes or types that do not fit, inputs changed in place.
// Error(kData): an index out of range, such as a token beyond an embedding. OutOfMemory. Every
// other c10::Error is Error(kUser) with LibTorch's text.
#pragma once

#include <torch/torch.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/stage.hpp>

#pragma GCC visibility push(default)
namespace sluice {

using TorchTensors = std::vector<torch::Tensor>;

// The loss of the last stage; default-made: none. A function becomes one implicitly. It returns the
// sum of the loss over the targets that count, as a tensor of one element, and takes
//   (torch::Tensor output, torch::Tensor target) where there is one of each, or
//   (TorchTensors outputs, TorchTensors targets).
// All lie on the stage's device. `weight` says how many targets of a micro-batch count, from
// targets in host memory. It returns a number, and takes (torch::Tensor target) where there is one,
// or (TorchTensors targets). Null: as many as the first target has elements.
class TorchLoss {
 public:
  using Sum =
      std::function<torch::Tensor(const TorchTensors& outputs, const TorchTensors& targets)>;
  using Weight = std::function<double(const TorchTensors& targets)>;

  TorchLoss() = default;
  template <typename Function, typename WeightFunction = Weight>
  requires(!std::same_as<Function, TorchLoss>)
      TorchLoss(Function function, WeightFunction weight_of = {});  // NOLINT: a function is one

  Sum sum = {};
  Weight weight = {};
};

// A stage of `module`: a module holder such as torch::nn::Linear, a std::shared_ptr to a class
// derived from torch::nn::Module, such an object itself, a torch::nn::AnyModule (its forward()
// returns one tensor), a torch::jit::Module; or a function without parameters that returns one of
// them. `prefix` names the stage, its parameters and its random numbers. The last stage of a
// pipeline needs a loss; other stages ignore it. A stage splits its backward pass. Throws
// Error(kUsage) for parameters that cannot train.
template <typename Module>
[[nodiscard]] std::unique_ptr<Stage> torch_stage(std::string prefix, Module module,
                                                 TorchLoss loss = {});

}  // namespace sluice
#pragma GCC visibility pop

#include <sluice/detail/torch_stage.hpp>
