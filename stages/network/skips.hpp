// Connections past layers: what a stage of layers has to do with them, and the arithmetic of a
// join. Internal to stages/.
//
// The output of layer `from` is a source. Where it is the last output of a stage, the next stage
// has it as its input. Where it is made earlier, it is a tensor of its own on every edge up to the
// last layer that takes it. The gradient of a source is a sum that begins with the last layer that
// takes it and ends with the layer after it. Partial sums travel over the edges, so the order does
// not depend on where stages end.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/layers.hpp>
#include <sluice/tensor.hpp>

namespace sluice::nn {

// Throws Error(kUsage) for a connection that a model of `layers` layers cannot have.
void require_skips(std::span<const Skip> skips, int layers);

// Input and skipped tensor become one. Throws Error(kUsage) that names the connection.
[[nodiscard]] TensorSpec joined(const Skip& skip, const TensorSpec& input,
                                const TensorSpec& skipped);
// Writes y.
void join_forward(ComputeContext& compute, const Skip& skip, const Tensor& input,
                  const Tensor& skipped, const Tensor& y);
// Overwrites dinput. Overwrites dskipped, or adds to it. Either may have null data.
void join_backward(ComputeContext& compute, const Skip& skip, const Tensor& dy,
                   const Tensor& dinput, const Tensor& dskipped, bool adds);

class StageSkips {
 public:
  struct Source {
    int from = 0;  // layer; -1: the model's input, which needs no gradient
    // Which tensor of the stage's edges it is; -1: made in this stage, or not used after it.
    int input = -1, output = -1;
  };

  StageSkips() = default;
  // Of a stage with layers [begin, end); the last one has the joins after the model's last layer.
  // Requires: require_skips() found nothing.
  StageSkips(std::span<const Skip> skips, int begin, int end, bool last);

  // Joins before a layer of this stage, or after the model's last one, ascending.
  [[nodiscard]] const std::vector<Skip>& joins() const { return joins_; }
  // What this stage takes, makes or hands on, ascending.
  [[nodiscard]] const std::vector<Source>& sources() const { return sources_; }
  [[nodiscard]] std::size_t source_of(int from) const;
  // Tensors of an edge, the main one included.
  [[nodiscard]] std::size_t inputs() const { return inputs_; }
  [[nodiscard]] std::size_t outputs() const { return outputs_; }

 private:
  std::vector<Skip> joins_;
  std::vector<Source> sources_;
  std::size_t inputs_ = 1, outputs_ = 1;
};

}  // namespace sluice::nn
