// A residual branch as a layer: y = x + dropout(branch(norm(x))).
//
// The branch's last matmul adds to x. Where something is dropped before the sum, the matmul is of
// the matmuls' precision, and dropout adds what stays of it to x, in one pass.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "stages/layers/branches.hpp"
#include "stages/network/specs.hpp"

namespace sluice::nn {

struct ResidualOptions {
  std::int64_t width = 0;
  Norm::Kind norm = Norm::Kind::kLayer;
  std::string norm_name;  // "norm1.": of its parameters
  float norm_epsilon = 1e-5F;
  DropoutSite output;
  DType precision = DType::kF32;                     // of the branch's matmuls
  DType stream = DType::kF32;                        // of x and y: f32, or the precision
  std::int64_t by_sample_from = kRowsToSumBySample;  // as of block_shape()
  std::int64_t context = 0;                          // the most positions; 0: any
  Shards shards = {};
  // Multiply-adds of one sample of so many positions.
  std::function<double(std::int64_t sequence)> cost = {};

  // Of the last matmul in training: before dropout, or, where nothing is dropped, with the sum.
  [[nodiscard]] BranchResult result() const {
    return {output.probability > 0 ? precision : stream, stream};
  }
};

// Declares the branch's parameters, whose names begin with `name`. `outer`: of the layer around it.
using MakeBranch = std::function<std::unique_ptr<Branch>(
    const ResidualOptions& outer, const std::string& name, ParameterSet& parameters)>;

class ResidualLayer final : public OwnLayer<kOnGpus> {
 public:
  ResidualLayer(const ResidualOptions& options, MakeBranch make)
      : options_(options), make_(std::move(make)) {}

  Edges set_precision(const Precision& precision) override {
    options_.precision = precision.operands;
    options_.stream = precision.stream;
    return Edges::kStream;
  }
  bool set_shards(const Shards& shards) override {
    options_.shards = shards;
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override;
  void add_parameters(ParameterSet& set, const std::string& name) override;
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override;
  [[nodiscard]] LayerPromises promises() const override;
  [[nodiscard]] double cost(const TensorSpec& input) const override;
  void forward(LayerCall& call, const Tensor& y) override;
  void keep_again(LayerCall& call, const Tensor& y) override;
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override;
  void backward_weight(LayerCall& call, const Tensor& dy) override;
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override;

 private:
  struct Kept {
    Tensor normed, stats;     // until the weight gradient
    Tensor dbranch, dnormed;  // gradients; dbranch: where something is dropped, or ranks gather it
    Tensor branch;            // scratch, forward: before dropout; no data: in the memory of y
    Tensor mine;              // scratch, where ranks gather: normed and dbranch before
  };
  // A call of the branch, with what lies before its memory.
  struct Made {
    BranchCall call;
    Kept kept;
    Tensor x;
  };
  [[nodiscard]] bool drops() const { return options_.output.probability > 0; }
  [[nodiscard]] StreamShape shape_of(const TensorSpec& input, ComputeContext& compute) const;
  Kept allocate(const StreamShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Made made_of(LayerCall& call) const;
  // work(dropout, first row, rows)
  template <typename Work>
  void for_dropped(const Made& made, const Work& work) const;
  // What the branch's matmuls read: of the matmuls' precision.
  [[nodiscard]] Tensor branch_gradient(const Made& made, const Tensor& dy) const;
  // backward_input except for the norm.
  void backward_branch(const Made& made, const Tensor& dy);

  ResidualOptions options_;
  MakeBranch make_;
  std::optional<Norm> norm_;  // once there are parameters
  std::unique_ptr<Branch> branch_;
};

}  // namespace sluice::nn
