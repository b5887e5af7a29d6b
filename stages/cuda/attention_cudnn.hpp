// Causal self-attention through cuDNN's fused graphs, bf16 with f32 sums, on the packed queries,
// keys and values in place. No dropout: cuDNN's random numbers are not Sluice's.
//
// The algorithm is the tiled softmax of Dao et al. 2022 (FlashAttention): forward keeps the
// logarithm of each row's sum, backward computes the probabilities again. Backward writes the
// query gradient without atomic additions, which takes the library samples * heads * sequence^2
// elements of scratch.
//
// Which plan is taken is a function of the shape, the device model and the library's version.
// Internal to stages/cuda; only with cuDNN.
#pragma once

#include <cstddef>
#include <list>
#include <optional>
#include <string>

#include <sluice/compute.hpp>

#include "stages/cuda/cudnn_graph.hpp"

namespace sluice::cuda {

class Context;

// The tensors in memory of the two graphs.
struct AttentionForwardTensors {
  CudnnTensor query, key, value, out, log_sum;
};
struct AttentionBackwardTensors {
  CudnnTensor query, key, value, out, log_sum, dout, delta, dquery, dkey, dvalue;
};
// Describe attention of a shape in an empty graph.
AttentionForwardTensors describe_attention_forward(const AttentionShape& shape, CudnnGraph& graph);
AttentionBackwardTensors describe_attention_backward(const AttentionShape& shape,
                                                     CudnnGraph& graph);

class CudnnAttention {
 public:
  // The context outlives this.
  explicit CudnnAttention(Context& context) : context_(context) {}

  // Makes the plans of the shape on first use, which may take the library seconds. Empty where it
  // can run; else why not, in words for a report.
  [[nodiscard]] const std::string& refusal(const AttentionShape& shape);

  // What the two take of ctx.workspace(), for shapes without a refusal.
  [[nodiscard]] std::size_t forward_workspace(const AttentionShape& shape);
  [[nodiscard]] std::size_t backward_workspace(const AttentionShape& shape);
  // As attention_forward and attention_backward, for shapes without a refusal; the state is the
  // logarithm of each row's sum of exponentials, f32 [samples, heads, sequence].
  void forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
               const Tensor& out, std::byte* state);
  void backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                const Tensor& out, const Tensor& dout, const std::byte* state, const Tensor& dqkv);

 private:
  struct Entry {
    AttentionShape shape;
    std::string refusal;
    std::optional<CudnnPlan> forward = std::nullopt,
                             backward = std::nullopt;  // set without a refusal
    AttentionForwardTensors in_forward = {};
    AttentionBackwardTensors in_backward = {};
  };
  void make_plans(Entry& entry);
  Entry& find(const AttentionShape& shape);

  Context& context_;
  std::list<Entry> entries_;  // few: one per shape of micro-batch
};

}  // namespace sluice::cuda
