// Operators that Sluice's own stages and optimizers call, with the contracts of
// <sluice/operators.hpp>. Internal to stages/ and runtime/.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/compute.hpp>
#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// --- many conversions ---
struct Conversion {
  Tensor from, to;
};
// As convert(), from f32 to bf16: in one launch for a thousand of them.
void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions);

// --- sums over shards ---
// y [rows, width] = residual + (the sum of shards' products + bias), in f32, rounded once to y's
// type, f32 or the operands'. Shard i has a dense x [rows, sizes[i]] and weight [width, sizes[i]],
// and x weightᵀ; with `backward` weight [sizes[i], width], and x weight. The shards' matrices lie
// one after the other at x and at weight, of one type. Each product is rounded to f32, and the tree
// of comm/base/sum_tree.hpp joins them; one of size 0 is zeros. bias f32 [width] and residual, of
// y's type and not its memory, may have null data: none is added. Bits of a row do not depend on
// the rows beside it.
void sum_of_shards(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                   std::span<const std::int64_t> sizes, bool backward, const Tensor& bias,
                   const Tensor& residual, const Tensor& y);
// `operands`, `result`: the types of x and y.
[[nodiscard]] std::size_t sum_of_shards_workspace(ComputeContext& ctx, std::int64_t rows,
                                                  std::int64_t width, std::size_t shards,
                                                  DType operands, DType result);
// The end of it, where the sum is there, f32; it is lost. A y of f32 is its memory.
void finish_sum(ComputeContext& ctx, const Tensor& sum, const Tensor& bias, const Tensor& residual,
                const Tensor& y);

// --- the loss by rows ---
// The two halves of softmax_cross_entropy(), for logits that are never there at once: *losses and
// the losses after it = those of the rows, in memory of the device; *sum = all of them, in the
// order that one call would have.
void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses);
void sum_of_losses(ComputeContext& ctx, const double* losses, std::int64_t rows, double* sum);

// --- the ends of a transformer whose vocabulary shards divide ---
// As embedding_forward() and embedding_backward_weight() on the ranks of a table: this one has rows
// from `first` on. values: f32 [rows, width], the token's row of the table, with +0 for -0, or
// zeros where another rank has it. To its gradient such a token adds nothing.
void embedding_part_forward(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                            const Tensor& table, const Tensor& values);
void embedding_part_backward_weight(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                                    const Tensor& dout, const Tensor& dtable,
                                    const Tensor& dpositions, Write write);

// Logits of the shards from `first` on, `local` of them: of each a panel [rows, its classes], one
// after the other. Shard i of all has classes [starts[i], starts[i + 1]).
struct LogitPanels {
  Tensor logits;  // [rows, classes of all panels]
  std::span<const std::int64_t> starts;
  int first = 0, local = 1;

  [[nodiscard]] int ranks() const { return (static_cast<int>(starts.size()) - 1) / local; }
  [[nodiscard]] std::int64_t classes() const {
    return starts[static_cast<std::size_t>(first) + static_cast<std::size_t>(local)] -
           starts[static_cast<std::size_t>(first)];
  }
};
// What row_cross_entropy() does, in three steps; ranks gather what they have between them. The
// sum of a row's exponentials is the tree of comm/base/sum_tree.hpp over the shards, in f32.
// maxima [rows]: of this rank's logits.
void panel_maxima(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  float* maxima);
// maxima [ranks, rows] of all ranks: the first ones become the shifts, the largest of a row.
// found [2, rows] = this rank's sums, and the targets' logits that it has. sums: scratch [local,
// rows]. With `gradient` the logits are for panel_losses() alone then.
void panel_sums(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                bool gradient, float* maxima, float* sums, float* found);
// found [ranks, 2, rows] of all ranks; overwritten.
void panel_losses(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  StepValue<double> scale, bool gradient, const float* shifts, float* found,
                  double* losses);

// --- optimizer kernels, over flat f32 vectors ---
// Slices of parameters that are adjacent in memory and have equal settings. `first` and `second`:
// the optimizer's state, f32 or of AdamWStep::moments. How parameters are cut into runs changes no
// bit.
struct UpdateRun {
  float* value = nullptr;
  const float* grad = nullptr;
  void* first = nullptr;
  void* second = nullptr;
  std::int64_t count = 0;
  bool decay = true;  // the step's weight_decay applies
  // Used where moments are bf16: the run lies in one parameter, from element `element` of the whole
  // parameter on.
  std::uint64_t site = 0;  // RandomKey::site of that parameter
  std::uint64_t element = 0;
  Bf16* bf16_copy = nullptr;  // adamw() alone: gets the new values, rounded to nearest; may be null
};

struct AdamWStep {
  float learning_rate = 0, beta1 = 0.9F, beta2 = 0.95F, epsilon = 1e-8F, weight_decay = 0;
  float correction1 = 1, correction2 = 1;  // 1 - beta^t
  float grad_scale = 1;                    // clipping
  bool coupled = false;                    // weight decay goes into the gradient, as Adam has it
  DType moments = DType::kF32;             // of the state: f32 or bf16
  std::uint64_t seed = 0, step = 0;        // of the random rounding to bf16
};

struct SgdStep {
  float learning_rate = 0, momentum = 0, weight_decay = 0, grad_scale = 1;
  bool nesterov = false;
};

// The step is computed in f32 from the moments as they are before they are stored. A moment in bf16
// is stored as one of its two neighbours, the one farther from zero with the probability that makes
// the mean exact: 16 random bits are added below bf16's last, and what is below it is cut off. They
// belong to element e of the run's parameter: word e % 4 of philox({seed, site, step}, 0, e / 4),
// its low half for the first moment, its high half for the second. So they do not depend on how
// parameters fall into runs, threads or devices.
// Where a run has a copy of its values in bf16, it gets them as convert_all() would round them.
void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs);
// first: the velocity; may be null when momentum is 0.
void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs);
// The sum in double of each block of kSumBlock elements (stages/compute/call_arguments.hpp), the
// blocks of each vector behind those of the vector before: sum_blocks() of all vectors. `sums` is
// memory that host and device can write.
void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums);

}  // namespace sluice
