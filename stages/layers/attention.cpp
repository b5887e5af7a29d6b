#include "stages/layers/attention.hpp"

namespace sluice {
namespace {

SelfAttention::Options branch_of(const AttentionLayer::Options& options) {
  return {.name = options.name + ".attention",
          .width = options.width,
          .heads = options.heads,
          .kv_heads = options.kv_heads,
          .rotary_base = options.rotary_base,
          .probabilities = options.probabilities,
          .recompute = options.recompute,
          .output_deviation = options.output_deviation,
          .bias = options.bias,
          .precision = options.precision};
}

}  // namespace

AttentionLayer::AttentionLayer(const Options& options, ParameterSet& parameters,
                               WeightCopies& copies)
    : ResidualLayer(options, ".norm1", parameters),
      branch_(branch_of(options), parameters, copies) {}

}  // namespace sluice
