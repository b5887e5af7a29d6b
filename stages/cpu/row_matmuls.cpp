#include "stages/cpu/row_matmuls.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/base/joined.hpp"
#include "stages/compute/thread_team.hpp"

namespace sluice {

namespace {

// In the order of trial; sizes that pass with oneDNN 2.6 on AVX2, and what suits AVX-512's vectors.
// The library shares rows out among threads, and each share has its own last rows: so with n
// threads steps are n times as large. Of other numbers of threads no sizes are known.
std::vector<RowBlocks> candidates(int threads) {
  if (threads != 1 && threads != 2 && threads != 4) return {};
  std::vector<RowBlocks> table = {{240, 12 * std::int64_t{threads}},
                                  {192, 12 * std::int64_t{threads}}};
  if (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) >=
      static_cast<unsigned>(dnnl::cpu_isa::avx512_core)) {
    table.insert(table.begin(), {256, 16 * std::int64_t{threads}});
  }
  return table;
}

// Rows of random numbers through one matmul of every size that the check tries.
class RowCheck {
 public:
  RowCheck(DType operands, const RowBlocks& blocks) : operands_(operands), blocks_(blocks) {}

  // Whether each row of a matmul [in, out] is the same in blocks of all sizes, at two places; of
  // large matmuls, of some sizes. `transposed`: as in the forward matmul, else as in the input
  // gradient.
  bool passes(std::int64_t in, std::int64_t out, bool transposed) {
    a_ = numbers(blocks_.most * in);
    b_ = numbers(in * out);
    const std::vector<float> whole = matmul(0, blocks_.most, in, out, transposed);
    const std::int64_t stride = blocks_.step * (in * out < 50'000 ? 1 : 7);
    for (std::int64_t rows = blocks_.step; rows < blocks_.most; rows += stride) {
      for (const std::int64_t first : {std::int64_t{0}, blocks_.most - rows}) {
        const std::vector<float> part = matmul(first, rows, in, out, transposed);
        if (std::memcmp(part.data(), whole.data() + first * out, part.size() * 4) != 0)
          return false;
      }
    }
    return true;
  }

 private:
  // Of the type of the operands; a simple generator, since any numbers do.
  [[nodiscard]] std::vector<std::byte> numbers(std::int64_t count) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(operands_));
    for (std::int64_t i = 0; i < count; ++i) {
      state_ = state_ * 6364136223846793005U + 1442695040888963407U;
      const float value = static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31F;
      if (operands_ == DType::kF32) {
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      } else {
        const Bf16 rounded = to_bf16(value);
        std::memcpy(bytes.data() + 2 * i, &rounded, 2);
      }
    }
    return bytes;
  }
  std::vector<float> matmul(std::int64_t first, std::int64_t rows, std::int64_t in,
                            std::int64_t out, bool transposed) {
    LinearShape shape{.rows = rows, .in = in, .out = out, .operands = operands_};
    if (!transposed) std::swap(shape.in, shape.out);
    MatmulSpec spec = transposed ? linear_matmul(shape) : linear_input_matmul(shape);
    spec.result = DType::kF32;
    std::vector<float> result(static_cast<std::size_t>(rows * out));
    matmuls_.run(spec, a_.data() + first * in * static_cast<std::int64_t>(size_of(operands_)),
                 b_.data(), nullptr, result.data());
    return result;
  }

  DType operands_;
  RowBlocks blocks_;
  MatmulCache matmuls_{Device{}};
  std::vector<std::byte> a_, b_;
  std::uint64_t state_ = 1;
};

RowBlocks find_row_blocks(DType operands, int threads) {
  // Narrow, wide and odd ones; those that take the library's other kernels at more rows.
  constexpr std::array<std::pair<std::int64_t, std::int64_t>, 6> kShapes = {
      {{64, 16}, {64, 64}, {256, 64}, {100, 10}, {96, 384}, {320, 1280}}};
  for (const RowBlocks& blocks : candidates(threads)) {
    RowCheck check(operands, blocks);
    if (std::ranges::all_of(kShapes, [&](const auto& shape) {
          return check.passes(shape.first, shape.second, true) &&
                 check.passes(shape.first, shape.second, false);
        })) {
      return blocks;
    }
  }
  return {256, 1, false};
}

// The rows of a matrix whose rows are adjacent.
std::size_t bytes_of_rows(std::int64_t rows, std::int64_t width, DType type) {
  return static_cast<std::size_t>(rows * width) * size_of(type);
}

}  // namespace

std::int64_t RowBlocks::block(std::int64_t rows) const {
  const std::int64_t blocks = std::max<std::int64_t>(1, (rows + most - 1) / most);
  return std::max(step, (rows + blocks * step - 1) / (blocks * step) * step);
}

RowBlocks row_blocks(const ComputeContext& ctx, DType operands) {
  const int threads = ctx.threads();
  // A fact of the library and the processor, so one for the process.
  static std::mutex mutex;
  static std::map<std::pair<DType, int>, RowBlocks> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find({operands, threads});
  if (found != known.end()) return found->second;
  const ThreadTeam team(ctx);
  return known.emplace(std::pair(operands, threads), find_row_blocks(operands, threads))
      .first->second;
}

const RowBlocks& RowMatmuls::blocks(const ComputeContext& ctx, DType operands) {
  const auto found = known_.find(operands);
  if (found != known_.end()) return found->second;
  return known_.emplace(operands, row_blocks(ctx, operands)).first->second;
}

std::string RowMatmuls::describe() const {
  std::vector<std::string> texts;
  for (const auto& [type, blocks] : known_) {
    texts.push_back(
        blocks.invariant
            ? fmt::format("{} rows in blocks of {} by {}", name_of(type), blocks.most, blocks.step)
            : fmt::format("{} rows whose bits depend on their place", name_of(type)));
  }
  return joined(texts, ", ");
}

void RowMatmuls::run(MatmulSpec spec, const void* a, const void* b, const void* bias, void* c) {
  const std::int64_t rows = spec.m, step = known_.at(spec.operands).step;
  spec.m = (rows + step - 1) / step * step;
  if (spec.m == rows || spec.k == 0) {
    spec.m = rows;
    return matmuls_.run(spec, a, b, bias, c);
  }
  const std::size_t a_bytes = bytes_of_rows(spec.m, spec.k, spec.operands);
  const std::size_t a_given = bytes_of_rows(rows, spec.k, spec.operands);
  const std::size_t c_place = round_up(a_bytes, kBufferAlignment);
  const std::size_t needed = c_place + bytes_of_rows(spec.m, spec.n, spec.result);
  if (padded_.size() < needed) padded_ = Buffer(Device{}, needed);
  std::memcpy(padded_.data(), a, a_given);
  std::memset(padded_.data() + a_given, 0, a_bytes - a_given);
  matmuls_.run(spec, padded_.data(), b, bias, padded_.data() + c_place);
  std::memcpy(c, padded_.data() + c_place, bytes_of_rows(rows, spec.n, spec.result));
}

}  // namespace sluice
