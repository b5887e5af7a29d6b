// Losses and sums of squares. Partial sums are kept per row or block and added in order, so that
// the result does not depend on the number of threads.
#include <algorithm>
#include <numeric>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

double sum_in_order(const double* values, std::int64_t count) {
  return std::accumulate(values, values + count, 0.0);
}

// sums[block] = body(first, count) of each block of kSumBlock elements.
template <typename Body>
void write_block_sums(double* sums, ComputeContext& ctx, std::int64_t elements, const Body& body) {
  parallel_range(ctx, sum_blocks(elements), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSumBlock;
      sums[block] = body(first, std::min(kSumBlock, elements - first));
    }
  });
}

// work(panel, its first class, its first logit of row `begin`, its classes) for each.
template <typename Work>
void for_panels(const LogitPanels& panels, std::int64_t rows, std::int64_t begin,
                const Work& work) {
  std::int64_t before = 0;  // classes in the panels before
  for (int panel = 0; panel < panels.local; ++panel) {
    const std::int64_t first = panels.starts[at(panels.first + panel)];
    const std::int64_t width = panels.starts[at(panels.first + panel + 1)] - first;
    work(panel, first, element(panels.logits, before * rows + begin * width), width);
    before += width;
  }
}

// The sum of rows [begin, end) over `leaves` vectors, each `stride` after the one before, in the
// first one's place.
void add_tree(float* values, int leaves, std::int64_t stride, std::int64_t begin,
              std::int64_t end) {
  add_leaves(at(leaves), [&](std::size_t into, std::size_t from) {
    float* const to = values + static_cast<std::int64_t>(into) * stride;
    const float* const added = values + static_cast<std::int64_t>(from) * stride;
    for (std::int64_t row = begin; row < end; ++row) to[row] += added[row];
  });
}

}  // namespace

void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses) {
  const std::int64_t rows = targets.elements(), width = logits.elements() / rows;
  const TypedKernels& kernels = kernels_for(ctx, logits.spec.dtype);
  parallel_range(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    kernels.cross_entropy(element(logits, begin * width), targets.as<std::int32_t>() + begin,
                          static_cast<float>(scale), gradient, losses + begin, end - begin, width);
  });
}

void panel_maxima(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  float* maxima) {
  const std::int64_t rows = targets.elements();
  const auto* const target = targets.as<std::int32_t>();
  const TypedKernels& kernels = kernels_for(ctx, panels.logits.spec.dtype);
  parallel_range(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    std::fill(maxima + begin, maxima + end, -3.4e38F);  // as cross_entropy() has it
    for_panels(panels, rows, begin, [&](int, std::int64_t, const void* logits, std::int64_t width) {
      kernels.panel_maxima(logits, target + begin, maxima + begin, end - begin, width);
    });
  });
}

void panel_sums(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                bool gradient, float* maxima, float* sums, float* found) {
  const std::int64_t rows = targets.elements();
  const auto* const target = targets.as<std::int32_t>();
  const TypedKernels& kernels = kernels_for(ctx, panels.logits.spec.dtype);
  parallel_range(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (int rank = 1; rank < panels.ranks(); ++rank) {
        maxima[row] = std::max(maxima[row], maxima[rank * rows + row]);
      }
      maxima[row] += 0.0F;  // which zero it is depends on the order
      found[rows + row] = 0;
    }
    for_panels(
        panels, rows, begin, [&](int panel, std::int64_t first, void* logits, std::int64_t width) {
          kernels.panel_sums(logits, target + begin, first, maxima + begin, gradient,
                             sums + panel * rows + begin, found + rows + begin, end - begin, width);
        });
    add_tree(sums, panels.local, rows, begin, end);
    std::copy(sums + begin, sums + end, found + begin);
  });
}

void panel_losses(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  StepValue<double> scale, bool gradient, const float* shifts, float* found,
                  double* losses) {
  const std::int64_t rows = targets.elements();
  const auto* const target = targets.as<std::int32_t>();
  const TypedKernels& kernels = kernels_for(ctx, panels.logits.spec.dtype);
  float* const wanted = found + rows;
  parallel_range(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    add_tree(found, panels.ranks(), 2 * rows, begin, end);
    for (std::int64_t row = begin; row < end; ++row) {
      const auto past = std::upper_bound(panels.starts.begin(), panels.starts.end(), target[row]);
      const std::int64_t shard = past - panels.starts.begin() - 1;
      if (target[row] >= 0) wanted[row] = wanted[shard / panels.local * 2 * rows + row];
    }
    kernels_of(ctx).row_losses(target + begin, shifts + begin, found + begin, wanted + begin,
                               losses + begin, end - begin);
    if (!gradient) return;
    for_panels(panels, rows, begin, [&](int, std::int64_t first, void* logits, std::int64_t width) {
      kernels.panel_gradient(logits, target + begin, first, shifts + begin,
                             static_cast<float>(scale), found + begin, end - begin, width);
    });
  });
}

void sum_of_losses(ComputeContext& /*ctx*/, const double* losses, std::int64_t rows, double* sum) {
  *sum = sum_in_order(losses, rows);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  const auto factor = static_cast<float>(2 * scale);
  const std::int64_t elements = outputs.elements();
  auto* const sums = reinterpret_cast<double*>(ctx.workspace(block_sum_bytes(elements)));
  write_block_sums(sums, ctx, elements, [&](std::int64_t first, std::int64_t count) {
    return kernels_of(ctx).squared_error(outputs.as<float>() + first, targets.as<float>() + first,
                                         factor, gradient, count);
  });
  *sum = sum_in_order(sums, sum_blocks(elements));
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (const std::span<const float> values : vectors) {
    write_block_sums(sums, ctx, std::ssize(values), [&](std::int64_t first, std::int64_t count) {
      return kernels_of(ctx).sum_of_squares(values.data() + first, count);
    });
    sums += sum_blocks(std::ssize(values));
  }
}

}  // namespace sluice::cpu
