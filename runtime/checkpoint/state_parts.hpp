// The optimizer state of a rank as saves know it: elements of wholes, which no layout changes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

class Pipeline;

struct StatePart {
  std::string parameter, name;  // the latter of the whole in saves: "<kind>.<parameter>"
  Shape shape;                  // of the whole
  Slice slice;                  // that this rank has, one of its parts
  // Elements of the slice from `first` on; addresses of OffloadedState where that has them.
  Tensor tensor;
  std::int64_t first = 0;
  bool divided = false;  // among replicas: each saves its part

  [[nodiscard]] bool is_whole() const {
    return slice.all() && tensor.elements() == shape.elements();
  }
};

// Of all states of the rank's optimizers. Throws Error(kUsage) where a program's own optimizer has
// other elements than Optimizer::state() says, or what its state() throws. Not collective.
[[nodiscard]] std::vector<StatePart> state_parts(Pipeline& pipeline);

// Names of ranges in files: "exp_avg.w[0:16384]", "exp_avg.v[1][[0:16384]]", and of a slice along
// dimension 1 "exp_avg.w[:,8:16][0:16384]". No parameter of the model, no tensor of its files and
// no whole state has such a name, since they end with fewer brackets.
class RangeNames {
 public:
  RangeNames(std::span<const std::string> parameters, const FileLayout& layout);
  // Of `count` elements.
  [[nodiscard]] std::string of(const SavedRange& range, std::int64_t count) const;

 private:
  std::size_t brackets_ = 1;
};

}  // namespace sluice
