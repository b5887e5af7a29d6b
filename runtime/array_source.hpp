// A data set in memory, for programs whose samples are rows of numbers.
#pragma once

#include <memory>
#include <vector>

#include "runtime/data.hpp"

namespace sluice {

// Rows of f32: sample i has inputs[i * input_width ...) and targets likewise. Step t (from 1) takes
// the batch_size samples after those of step t - 1, in order, starting over at the end; evaluation
// takes them from the front. Throws Error(kUsage) where the sizes do not fit.
[[nodiscard]] std::unique_ptr<DataSource> make_array_source(std::vector<float> inputs,
                                                            std::int64_t input_width,
                                                            std::vector<float> targets,
                                                            std::int64_t target_width,
                                                            std::int64_t batch_size);

}  // namespace sluice
