// The transformers of <sluice/transformer.hpp> written plainly in double precision, forward only:
// the specification that losses and, through finite differences, gradients are held against.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

namespace sluice::testing {

// By global name; a tied embedding appears once.
using ReferenceParameters = std::map<std::string, std::vector<double>>;

// Sum of -log softmax over the targets that are not negative. tokens and targets: [samples,
// sequence]. Without dropout.
[[nodiscard]] double reference_loss(const TransformerConfig& config,
                                    const ReferenceParameters& parameters,
                                    const std::vector<std::int32_t>& tokens,
                                    const std::vector<std::int32_t>& targets, int samples,
                                    int sequence);

}  // namespace sluice::testing
