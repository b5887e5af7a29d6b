#include "stages/layers/attention.hpp"

namespace sluice {
namespace {

SelfAttention::Options branch_of(const ResidualOptions& options, SelfAttention::Options attention) {
  attention.name = options.name + ".attention";
  attention.width = options.width;
  attention.output_deviation = options.output_deviation;
  attention.precision = options.precision;
  attention.result = options.result();
  attention.sum = options.stream;
  return attention;
}

}  // namespace

AttentionLayer::AttentionLayer(const ResidualOptions& options, SelfAttention::Options attention,
                               ParameterSet& parameters, WeightCopies& copies)
    : ResidualLayer(options, ".norm1", parameters),
      branch_(branch_of(options, std::move(attention)), parameters, copies) {}

}  // namespace sluice
