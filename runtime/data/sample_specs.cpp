#include "runtime/data/sample_specs.hpp"

#include "comm/base/throw_error.hpp"

namespace sluice {

std::int64_t positions_of(const DataSource& source) {
  const int dimension = source.position_dimension();
  if (dimension == 0) return 0;
  std::vector<TensorSpec> all = source.input_specs(1);
  for (const TensorSpec& target : source.target_specs(1)) all.push_back(target);
  for (const TensorSpec& spec : all) {
    const int most = spec.shape.rank() - 1;
    if (dimension < 1 || dimension > most || spec.shape[dimension] < 1) {
      throw_usage(
          "dimension {} of the data counts positions, but a tensor of one sample is {}; legal: 0, "
          "for none, or 1 to {}, with at least one position",
          dimension, to_string(spec), most);
    }
    if (spec.shape[dimension] == all[0].shape[dimension]) continue;
    throw_usage("dimension {} of the data counts positions, and is {} in {}, but {} in {}",
                dimension, all[0].shape[dimension], to_string(all[0]), spec.shape[dimension],
                to_string(spec));
  }
  return all.empty() ? 0 : all[0].shape[dimension];
}

}  // namespace sluice
