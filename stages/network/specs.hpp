// What Sluice's layers have in common, what they say about tensors that do not fit, and whose error
// that is. Internal to stages/.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <limits>
#include <string>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice::nn {

// The answers of a layer that are the same for all its objects.
struct LayerTraits {
  Edges edges = Edges::kStream;
  bool runs_on_gpu = true;
  LayerPromises promises = {.recomputes = true, .capturable = true};
};
inline constexpr LayerTraits kOnGpus{};
inline constexpr LayerTraits kOnCpus{Edges::kWidened, false, {.recomputes = true}};

// A layer of Sluice. Its gradients, if it has any, are overwritten. Ranks that share a stage each
// compute all of it, unless it says otherwise.
template <LayerTraits kTraits>
class OwnLayer : public Layer {
 public:
  Edges set_precision(const Precision& /*precision*/) override { return kTraits.edges; }
  bool set_shards(const Shards& /*shards*/) override { return true; }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return kTraits.runs_on_gpu; }
  [[nodiscard]] LayerPromises promises() const override { return kTraits.promises; }
};

// The types that layers compute with.
inline bool has_numbers(const TensorSpec& spec) {
  return spec.dtype == DType::kF32 || spec.dtype == DType::kBf16;
}

// Numbers with a first dimension, for the samples.
inline void require_numbers(const TensorSpec& input) {
  if (has_numbers(input) && input.shape.rank() > 0) return;
  throw_usage("the input is {}; legal: f32 or bf16 [samples, ...]", to_string(input));
}

// With `width` numbers in the last dimension.
inline void require_width(const TensorSpec& input, std::int64_t width, DType type) {
  const int rank = input.shape.rank();
  if (input.dtype == type && rank >= 2 && input.shape[rank - 1] == width) return;
  throw_usage("the input is {}; legal: {} [samples, ..., {}]", to_string(input), name_of(type),
              width);
}

// The residual stream, which ranks that share a stage may deal (parts.hpp). context: the most
// positions, 0: any.
inline void require_stream(const TensorSpec& input, DType type, std::int64_t width,
                           std::int64_t context = 0, const Shards& shards = {}) {
  const Shape& shape = input.shape;
  const bool dealt = shape.rank() == 4 && shards.local < shards.count && shape[1] == shards.local;
  const std::int64_t positions = dealt ? shape[2] * shards.count : shape.rank() == 3 ? shape[1] : 0;
  const bool right = input.dtype == type && (dealt || shape.rank() == 3) &&
                     shape[shape.rank() - 1] == width &&
                     (context == 0 || (shape[0] >= 1 && positions >= 1 && positions <= context));
  if (right) return;
  const std::string legal = fmt::format("{} [samples, sequence, {}]", name_of(type), width);
  if (context == 0) throw_usage("the input is {}; legal: {}", to_string(input), legal);
  throw_usage("the input is {}; legal: {} with at least 1 sample and 1 to {} positions",
              to_string(input), legal, context);
}

inline void require_positive(std::int64_t value, const char* what) {
  if (value < 1) throw_usage("{} is {}; legal: at least 1", what, value);
}

// What is added to a variance: as a float it is neither 0, which makes a constant row NaN, nor
// infinite.
inline void require_epsilon(double value) {
  using Range = std::numeric_limits<float>;
  if (value >= double{Range::min()} && value <= double{Range::max()}) return;
  throw_usage("epsilon is {}; legal: from {} to {}", value, Range::min(), Range::max());
}

// `input` with another last dimension.
[[nodiscard]] inline TensorSpec with_width(const TensorSpec& input, std::int64_t width) {
  std::int64_t dims[Shape::kMaxDims] = {};
  const int rank = input.shape.rank();
  for (int d = 0; d < rank; ++d) dims[d] = d + 1 == rank ? width : input.shape[d];
  return {input.dtype, Shape(std::span<const std::int64_t>(dims, static_cast<std::size_t>(rank)))};
}

// Rows before the last dimension.
[[nodiscard]] inline std::int64_t rows_of(const TensorSpec& spec) {
  const std::int64_t width = spec.shape[spec.shape.rank() - 1];
  return width == 0 ? 0 : spec.shape.elements() / width;
}

// Runs `body`; what it throws names `who`: a text, or what has a full_name(), asked for then
// alone.
template <typename Who, typename Body>
decltype(auto) naming(const Who& who, const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    std::string name;
    if constexpr (requires { who.full_name(); }) {
      name = who.full_name();
    } else {
      name = who;
    }
    throw Error(error.code(), name + ": " + error.what(), error.rank(), error.location());
  }
}

}  // namespace sluice::nn
