// Finds numbers of a tensor in host memory that nobody wrote. Internal to Sluice.
//
// mark_unwritten() fills the tensor with a quiet NaN whose payload no arithmetic makes of other
// numbers. A number that still has these bits afterwards was never written, or was only added to.
// Integers have no such value, and empty tensors no numbers: both count as written. Unchanged finds
// the opposite, numbers that were only to be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sluice/tensor.hpp>

namespace sluice {

// A tensor with null data is left alone.
void mark_unwritten(const Tensor& tensor);

struct Unwritten {
  std::int64_t count = 0;
  std::int64_t first = -1;  // element, row-major; -1: none
};
[[nodiscard]] Unwritten find_unwritten(const Tensor& tensor);

// Throws Error(kUsage): "leaves 3 of the 12 numbers of y, f32 [3, 4], unwritten, the first at [1,
// 2]"; `what` is "y".
void require_written(const Tensor& tensor, const std::string& what);

// Tensors in host memory, with a copy of what they held.
class Unchanged {
 public:
  // The memory of `tensors` outlives it; those with null data are left out.
  explicit Unchanged(std::span<const Tensor> tensors);
  // Throws Error(kUsage) where one holds something else now: "changes input 0, f32 [3, 4]; legal:
  // to read it alone"; `what` is "input".
  void require(const char* what) const;

 private:
  std::vector<Tensor> tensors_;
  std::vector<std::vector<std::byte>> had_;  // [tensor]
};

// "[1, 2]": where element `index` of a row-major tensor lies.
[[nodiscard]] std::string place_of(const Shape& shape, std::int64_t index);

}  // namespace sluice
