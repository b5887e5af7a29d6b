// Embedding of tokens and positions.
#include <algorithm>
#include <cstring>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

// Columns [begin, end) of all rows.
void zero_columns(const Tensor& table, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = table.shape()[1];
  for (std::int64_t row = 0; row < table.shape()[0]; ++row) {
    std::fill_n(table.as<float>() + row * width + begin, end - begin, 0.0F);
  }
}

// Of a token, in a table with rows from `first` on; null where it is not there.
float* table_row(const Tensor& table, const Tensor& tokens, std::int64_t row, std::int64_t first) {
  const std::int64_t place = tokens.as<std::int32_t>()[row] - first;
  if (place < 0 || place >= table.shape()[0]) return nullptr;
  return table.as<float>() + place * table.shape()[1];
}

}  // namespace

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  const std::int64_t sequence = tokens.shape()[1], width = table.shape()[1];
  constexpr std::int64_t kAtOnce = 1024;  // columns, a multiple of every vector
  const bool rounds = out.spec.dtype == DType::kBf16;
  const Kernels& kernels = kernels_of(ctx);
  const auto* token = tokens.as<std::int32_t>();
  parallel_range(ctx, tokens.elements(), 1, [&](std::int64_t begin, std::int64_t end) {
    float sums[kAtOnce];
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t place = row % sequence;
      for (std::int64_t first = 0; first < width; first += kAtOnce) {
        const std::int64_t count = std::min(kAtOnce, width - first);
        float* to = rounds ? sums : out.as<float>() + row * width + first;
        std::memcpy(to, table.as<float>() + token[row] * width + first,
                    static_cast<std::size_t>(count) * sizeof(float));
        if (positions.data != nullptr) {
          kernels.f32.add(positions.as<float>() + place * width + first, to, count);
        }
        if (rounds) kernels.bf16.from_float(sums, element(out, row * width + first), count);
      }
    }
  });
}

std::size_t embedding_backward_weight_workspace(ComputeContext& /*ctx*/, std::int64_t /*rows*/,
                                                std::int64_t /*vocabulary*/,
                                                std::int64_t /*width*/) {
  return 0;
}

// Threads share columns, not rows: each element of a gradient is summed in the order of rows.
void embedding_part_backward_weight(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                                    const Tensor& dout, const Tensor& dtable,
                                    const Tensor& dpositions, Write write) {
  const std::int64_t sequence = tokens.shape()[1], width = dtable.shape()[1];
  const auto add = kernels_for(ctx, dout.spec.dtype).add;
  parallel_range(ctx, width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    if (write == Write::kOverwrite) {
      zero_columns(dtable, begin, end);
      if (dpositions.data != nullptr) zero_columns(dpositions, begin, end);
    }
    for (std::int64_t row = 0; row < tokens.elements(); ++row) {
      const void* from = element(dout, row * width + begin);
      if (float* const to = table_row(dtable, tokens, row, first); to != nullptr) {
        add(from, to + begin, end - begin);
      }
      if (dpositions.data != nullptr) {
        add(from, dpositions.as<float>() + row % sequence * width + begin, end - begin);
      }
    }
  });
}

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions, Write write) {
  cpu::embedding_part_backward_weight(ctx, tokens, 0, dout, dtable, dpositions, write);
}

void embedding_part_forward(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                            const Tensor& table, const Tensor& values) {
  const std::int64_t width = table.shape()[1];
  parallel_range(ctx, tokens.elements(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float* const to = values.as<float>() + row * width;
      const float* const from = table_row(table, tokens, row, first);
      if (from == nullptr) {
        std::fill_n(to, width, 0.0F);
      } else {
        std::transform(from, from + width, to, [](float value) { return value + 0.0F; });
      }
    }
  });
}

}  // namespace sluice::cpu
