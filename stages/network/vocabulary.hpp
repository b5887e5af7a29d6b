// How the shards of a model divide the classes of its vocabulary. Internal to stages/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice::nn {

// In units of kUnit classes, of which the last one may be short. Each shard has one at least.
class DividedClasses {
 public:
  static constexpr std::int64_t kUnit = 16;
  // Throws Error(kUsage) for more shards than units.
  explicit DividedClasses(std::int64_t classes, const Shards& shards = {}) : shards_(shards) {
    const std::int64_t units = (classes + kUnit - 1) / kUnit;
    if (shards.count > 1 && units < shards.count) {
      throw_usage("a vocabulary of {} is divided by {} shards in units of {}; legal: at most {}",
                  classes, shards.count, kUnit, std::max<std::int64_t>(units, 1));
    }
    for (int shard = 0; shard <= shards.count; ++shard) {
      starts_.push_back(std::min(classes, kUnit * shards.begin(shard, units)));
    }
  }

  [[nodiscard]] bool divided() const { return shards_.count > 1; }
  [[nodiscard]] const Shards& shards() const { return shards_; }
  [[nodiscard]] int ranks() const { return shards_.count / shards_.local; }
  [[nodiscard]] int rank() const { return shards_.first / shards_.local; }
  // Shard i of all has classes [starts()[i], starts()[i + 1]).
  [[nodiscard]] std::span<const std::int64_t> starts() const { return starts_; }
  // This rank's, which follow each other.
  [[nodiscard]] std::int64_t first() const { return start(shards_.first); }
  [[nodiscard]] std::int64_t count() const {
    return start(shards_.first + shards_.local) - first();
  }
  // Of the rank that has the most.
  [[nodiscard]] std::int64_t most() const {
    std::int64_t most = 0;
    for (int shard = 0; shard < shards_.count; shard += shards_.local) {
      most = std::max(most, start(shard + shards_.local) - start(shard));
    }
    return most;
  }
  // For ParameterSet::add_parts() of rows for classes.
  [[nodiscard]] std::vector<SlicePart> parts() const {
    std::vector<SlicePart> parts;
    for (int shard = shards_.first; shard < shards_.first + shards_.local; ++shard) {
      const std::int64_t begin = start(shard), end = start(shard + 1);
      parts.push_back({Slice{0, begin, end - begin, starts_.back()}, shard});
    }
    return parts;
  }

 private:
  [[nodiscard]] std::int64_t start(int shard) const {
    return starts_[static_cast<std::size_t>(shard)];
  }

  Shards shards_;
  std::vector<std::int64_t> starts_;
};

}  // namespace sluice::nn
