// What a transformer stage is made of. Internal to stages/.
//
// A layer keeps no state between calls except for its parameters. What it keeps of a micro-batch is
// in memory that the stage passes with each call. The layer finds it again by allocating the same
// tensors in the same order from the same address (BumpAllocator). The border between two layers is
// the residual stream, f32 or bf16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>
#include <sluice/stage.hpp>

#include "stages/compute/product.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {

// A micro-batch, and what it is computed on: all that a layer's memory depends on.
struct BlockShape {
  std::int64_t samples = 0, sequence = 0;
  DeviceKind device = DeviceKind::kCpu;
  bool by_sample = false;  // sums over rows start anew at each sample
  [[nodiscard]] std::int64_t rows() const { return samples * sequence; }
  friend bool operator==(const BlockShape&, const BlockShape&) = default;
};

// As for_summed_rows() of its samples.
template <typename Work>
void for_summed_rows(const BlockShape& shape, const Work& work) {
  for_summed_rows(shape.samples, shape.sequence, shape.by_sample, work);
}

// What a layer's operators take of the compute context, which all layers of a rank share.
struct OperatorMemory {
  std::size_t workspace = 0;  // the most that one of them takes
  std::size_t tables = 0;     // constants
};
[[nodiscard]] constexpr OperatorMemory largest(const OperatorMemory& a, const OperatorMemory& b) {
  return {std::max(a.workspace, b.workspace), std::max(a.tables, b.tables)};
}

// Where a layer allocates what it keeps, by lifetime as in LayerMemory.
struct LayerAllocators {
  BumpAllocator until_input, until_weight, gradients, scratch;
  [[nodiscard]] LayerMemory used() const {
    return {until_input.used(), until_weight.used(), gradients.used(), scratch.used()};
  }
};

// One call of a layer, with as much memory as LayerMemory says.
struct StreamCall {
  StageContext& stage;
  BlockShape shape;
  std::byte* until_input = nullptr;
  std::byte* until_weight = nullptr;
  std::byte* gradients = nullptr;
  std::byte* scratch = nullptr;

  [[nodiscard]] ComputeContext& compute() const { return stage.compute; }
  [[nodiscard]] LayerAllocators allocators() const {
    return {BumpAllocator(until_input), BumpAllocator(until_weight), BumpAllocator(gradients),
            BumpAllocator(scratch)};
  }
};

// The gradient of a point of the residual stream, [rows, width] of the stream's type. `rounded` has
// data where a layer reads a copy of it in bf16 (reads_rounded()): who writes one writes both.
struct StreamGradient {
  Tensor value;
  Tensor rounded = {};
};

class StreamLayer {
 public:
  virtual ~StreamLayer() = default;

  [[nodiscard]] virtual LayerMemory memory(const BlockShape& shape) const = 0;
  // The most in any phase.
  [[nodiscard]] virtual OperatorMemory operators(ComputeContext& compute,
                                                 const BlockShape& shape) const = 0;
  // StageDescription::note.
  [[nodiscard]] virtual std::string note(ComputeContext& /*compute*/,
                                         const BlockShape& /*shape*/) const {
    return {};
  }
  // Overwrites `out`, which is not `in`.
  virtual void forward(StreamCall& call, const Tensor& in, const Tensor& out) = 0;
  // Writes again what forward kept, to the bit. A layer that keeps nothing does nothing.
  virtual void recompute(StreamCall& /*call*/, const Tensor& /*in*/) {}
  // Whether backward reads StreamGradient::rounded of its dout.
  [[nodiscard]] virtual bool reads_rounded() const { return false; }
  // `in` is forward's input, `dout` the gradient of its output. Overwrites `din` (null data: not
  // needed). din is not dout.
  virtual void backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                              const StreamGradient& din) = 0;
  // Adds to the parameters' gradients; operands as in the backward_input before it.
  virtual void backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) = 0;
  // Both, with the same bits. din may be dout if both are gradients of the residual stream. A layer
  // whose backward_weight reads what backward_input would then overwrite has its own.
  virtual void backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                        const StreamGradient& din) {
    backward_input(call, in, dout, din);
    backward_weight(call, in, dout);
  }
};

}  // namespace sluice
