#include "stages/layers/ends.hpp"

#include <algorithm>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/compute/internal_operators.hpp"

namespace sluice::nn {
namespace {

Linear::Options projection_of(const HeadOptions& options, const DividedClasses& classes) {
  Linear::Options projection{.in = options.width,
                             .out = options.vocabulary,
                             .tied = options.tied,
                             .precision = options.precision};
  if (!classes.divided()) return projection;
  projection.split = Linear::Split::kColumns;
  projection.shards = classes.shards();
  for (const SlicePart& part : classes.parts()) {  // as of the embedding's table
    projection.ranges.push_back({{part.slice.begin, part.slice.length}});
  }
  return projection;
}

std::string name_of_projection(const HeadOptions& options) {
  return options.tied ? "token_embedding." : "head.";
}

}  // namespace

DividedClasses classes_of(const HeadOptions& options, const Shards& shards) {
  if (shards.count > 1 && options.chunks > 1) {
    throw_usage("{} chunks of logits (TransformerConfig::logit_chunks); legal with {} shards: 1",
                options.chunks, shards.count);
  }
  return DividedClasses(options.vocabulary, shards);
}

TensorSpec HeadLayer::output(const TensorSpec& input) const {
  require_stream(input, options_.stream, options_.width, options_.context, classes_.shards());
  const StreamShape shape = stream_shape(input, classes_.shards(), DeviceKind::kCpu);
  return {options_.precision, Shape{shape.whole.samples, shape.whole.sequence,
                                    in_chunks() ? options_.width : classes_.count()}};
}

void HeadLayer::add_parameters(ParameterSet& set, const std::string& name) {
  norm_.emplace(options_.norm, name + "final_norm.", options_.width, options_.norm_epsilon, set,
                classes_.shards());
  if (in_chunks()) return;
  projection_.emplace((options_.tied ? "" : name) + name_of_projection(options_),
                      projection_of(options_, classes_), set);
}

HeadLayer::Kept HeadLayer::allocate(const TensorSpec& input, DeviceKind device,
                                    LayerAllocators& memory) const {
  Kept kept;
  kept.shape = stream_shape(input, classes_.shards(), device, options_.by_sample_from);
  const std::int64_t all = kept.shape.whole.rows(), rows = kept.shape.mine.rows();
  const DType precision = options_.precision;
  if (!in_chunks()) {
    kept.normed = memory.until_weight.tensor(precision, all, options_.width);
    kept.dnormed = memory.gradients.tensor(precision, rows, options_.width);
    kept.sum = projection_->shard_sum(memory.scratch, kept.shape, precision);
    if (kept.shape.dealt) kept.mine = memory.scratch.tensor(precision, rows, options_.width);
  }
  kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_->stats_per_row());
  return kept;
}

HeadLayer::Kept HeadLayer::kept_of(const LayerCall& call) const {
  LayerAllocators memory(call);
  Kept kept = allocate(call.x.spec, call.compute().device().kind, memory);
  kept.x = as_rows(call.x);
  return kept;
}

LayerNeeds HeadLayer::needs(const TensorSpec& input, ComputeContext& compute) const {
  LayerAllocators memory;
  const StreamShape shape = allocate(input, compute.device().kind, memory).shape;
  const std::int64_t rows = shape.whole.rows();
  LayerNeeds needs{.memory = memory.used(), .operator_bytes = norm_->workspace(compute, rows)};
  if (!projection_) return needs;
  needs.operator_bytes =
      std::max(needs.operator_bytes, projection_->workspace(compute, rows, options_.precision));
  needs.again = gathers(shape, options_.precision, options_.width);
  needs.collectives = {.forward = *needs.again,
                       .backward_input = projection_->sums_over_ranks(shape)};
  return needs;
}

double HeadLayer::cost(const TensorSpec& input) const {
  return static_cast<double>(input.shape.elements() * options_.vocabulary);
}

void HeadLayer::keep_again(LayerCall& call, const Tensor& y) {
  const Kept kept = kept_of(call);
  if (!kept.shape.dealt) {
    const Tensor normed = in_chunks() ? as_rows(y) : kept.normed;
    return norm_->forward(call.compute(), kept.x, normed, kept.stats);
  }
  norm_->forward(call.compute(), kept.x, kept.mine, kept.stats);
  gather_rows(call.stage, kept.shape, kept.mine, kept.normed);
}

void HeadLayer::forward(LayerCall& call, const Tensor& y) {
  keep_again(call, y);
  if (!in_chunks()) projection_->forward(call.compute(), kept_of(call).normed, as_rows(y));
}

void HeadLayer::backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) {
    projection_->backward_input(call.stage, kept.shape, as_rows(dy), kept.dnormed, kept.sum);
  }
  norm_->backward_input(call.compute(), normed_gradient(kept, dy), kept.x, kept.stats, {},
                        {as_rows(dx), as_rows(call.rounded_dx)});
}

void HeadLayer::backward_weight(LayerCall& call, const Tensor& dy) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) {
    projection_->backward_weight(call.compute(), kept.shape.whole, kept.normed, as_rows(dy));
  }
  norm_->backward_weight(call.compute(), kept.shape, normed_gradient(kept, dy), kept.x, kept.stats);
}

void HeadLayer::backward(LayerCall& call, const Tensor& dy, const Tensor& dx) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) {
    projection_->backward_input(call.stage, kept.shape, as_rows(dy), kept.dnormed, kept.sum);
    projection_->backward_weight(call.compute(), kept.shape.whole, kept.normed, as_rows(dy));
  }
  norm_->backward(call.compute(), kept.shape, normed_gradient(kept, dy), kept.x, kept.stats, {},
                  {as_rows(dx), as_rows(call.rounded_dx)});
}

TensorSpec TokenLoss::targets(const TensorSpec& outputs) const {
  const std::int64_t width = options_.chunks > 1 ? options_.width : classes_.count();
  if (outputs.dtype != options_.precision || outputs.shape.rank() != 3 ||
      outputs.shape[2] != width) {
    throw_usage("the outputs are {}; legal: {} [samples, sequence, {}]", to_string(outputs),
                name_of(options_.precision), width);
  }
  return {DType::kI32, Shape{outputs.shape[0], outputs.shape[1]}};
}

void TokenLoss::add_parameters(ParameterSet& set) {
  if (options_.chunks == 1) return;
  projection_.emplace(name_of_projection(options_), projection_of(options_, classes_), set);
}

std::int64_t TokenLoss::chunk_rows(const BlockShape& shape) const {
  const std::int64_t rows = shape.by_sample ? shape.sequence : shape.rows();  // in chunks
  const auto share = static_cast<std::size_t>((rows + options_.chunks - 1) / options_.chunks);
  return std::min(rows, static_cast<std::int64_t>(round_up(share, kChunkRows)));
}

TokenLoss::Scratch TokenLoss::allocate(const BlockShape& shape, BumpAllocator& memory) const {
  Scratch scratch;
  if (!projection_) return scratch;
  scratch.logits = memory.tensor(options_.precision, chunk_rows(shape), projection_->out());
  scratch.losses = memory.take<double>(shape.rows());
  return scratch;
}

LayerNeeds TokenLoss::needs(const TensorSpec& outputs, ComputeContext& compute) const {
  const BlockShape shape = block_shape(outputs, compute.device().kind, options_.by_sample_from);
  BumpAllocator memory;
  if (classes_.divided()) {
    const PanelScratch panels = allocate_panels(shape.rows(), memory);
    LayerNeeds needs{.memory = {.scratch = memory.used()}};
    const auto ranks = static_cast<std::size_t>(classes_.ranks());
    if (ranks == 1) return needs;
    for (const Tensor& all : {panels.maxima, panels.found}) {
      needs.collectives.forward.push_back(
          {.kind = CollectiveKind::kAllGather, .bytes = all.spec.bytes() / ranks});
    }
    needs.collectives.answer = {{.kind = CollectiveKind::kAllGather,
                                 .bytes = gathered_panels(outputs).bytes() / ranks,
                                 .type = outputs.dtype}};
    return needs;
  }
  if (!projection_) return {.operator_bytes = softmax_cross_entropy_workspace(shape.rows())};
  (void)allocate(shape, memory);
  return {.memory = {.scratch = memory.used()},
          .operator_bytes = projection_->workspace(compute, chunk_rows(shape), options_.precision)};
}

double TokenLoss::weight(const TensorSpec& /*outputs*/, const Tensor& targets) const {
  const std::span<const std::int32_t> values{targets.as<const std::int32_t>(),
                                             static_cast<std::size_t>(targets.elements())};
  std::int64_t counted = 0;
  std::int32_t most = -1;
  for (const std::int32_t target : values) {
    counted += target >= 0 ? 1 : 0;
    most = std::max(most, target);
  }
  if (most < options_.vocabulary) return static_cast<double>(counted);
  throw_error(ErrorCode::kData,
              "target {} is outside the vocabulary; legal: 0 to {}, or negative for none", most,
              options_.vocabulary - 1);
}

void TokenLoss::compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
                        double* sum) {
  softmax_cross_entropy(ctx.compute, as_rows(outputs),
                        {targets.data, {DType::kI32, Shape{targets.elements()}}}, ctx.loss_scale,
                        ctx.phase == Phase::kTrain, sum);
}

void TokenLoss::compute_in(std::byte* memory, StageContext& ctx, const Tensor& outputs,
                           const Tensor& targets, double* sum) {
  if (classes_.divided()) return compute_panels(memory, ctx, outputs, targets, sum);
  if (!projection_) return compute(ctx, outputs, targets, sum);
  const BlockShape shape =
      block_shape(outputs.spec, ctx.compute.device().kind, options_.by_sample_from);
  BumpAllocator allocator(memory);
  const Scratch scratch = allocate(shape, allocator);
  const Tensor normed = as_rows(outputs);
  const bool trains = ctx.phase == Phase::kTrain;
  for_summed_rows(shape, [&](std::int64_t begin, std::int64_t rows) {
    for (std::int64_t first = begin; first < begin + rows; first += chunk_rows(shape)) {
      const std::int64_t count = std::min(chunk_rows(shape), begin + rows - first);
      const Tensor x = rows_from(normed, first, count);
      const Tensor logits = rows_from(scratch.logits, 0, count);
      const Tensor wanted{targets.as<std::int32_t>() + first, {DType::kI32, Shape{count}}};
      projection_->forward(ctx.compute, x, logits);
      row_cross_entropy(ctx.compute, logits, wanted, ctx.loss_scale, trains,
                        scratch.losses + first);
      if (!trains) continue;
      projection_->backward_weight(ctx.compute, {.samples = 1, .sequence = count}, x, logits);
      projection_->backward_input(ctx.compute, logits, x);
    }
  });
  sum_of_losses(ctx.compute, scratch.losses, shape.rows(), sum);
}

TokenLoss::PanelScratch TokenLoss::allocate_panels(std::int64_t rows, BumpAllocator& memory) const {
  PanelScratch scratch;
  scratch.maxima = memory.tensor(DType::kF32, classes_.ranks(), rows);
  scratch.found = memory.tensor(DType::kF32, classes_.ranks(), 2 * rows);
  scratch.sums = memory.tensor(DType::kF32, classes_.shards().local, rows);
  scratch.losses = memory.take<double>(rows);
  return scratch;
}

void TokenLoss::compute_panels(std::byte* memory, StageContext& ctx, const Tensor& logits,
                               const Tensor& targets, double* sum) const {
  const std::int64_t rows = targets.elements();
  BumpAllocator allocator(memory);
  const PanelScratch scratch = allocate_panels(rows, allocator);
  const Shards& shards = classes_.shards();
  const LogitPanels panels{as_rows(logits), classes_.starts(), shards.first, shards.local};
  const bool trains = ctx.phase == Phase::kTrain;
  const auto mine = [&](const Tensor& all) { return rows_from(all, classes_.rank(), 1); };
  const auto gather = [&](const Tensor& all) {
    if (classes_.ranks() > 1) ctx.tensor->all_gather(mine(all), all, &ctx.compute);
  };
  panel_maxima(ctx.compute, panels, targets, mine(scratch.maxima).as<float>());
  gather(scratch.maxima);
  panel_sums(ctx.compute, panels, targets, trains, scratch.maxima.as<float>(),
             scratch.sums.as<float>(), mine(scratch.found).as<float>());
  gather(scratch.found);
  panel_losses(ctx.compute, panels, targets, ctx.loss_scale, trains, scratch.maxima.as<float>(),
               scratch.found.as<float>(), scratch.losses);
  sum_of_losses(ctx.compute, scratch.losses, rows, sum);
}

std::string TokenLoss::why_no_answers() const {
  if (options_.chunks == 1) return {};
  return fmt::format(
      "a transformer with {} chunks of logits (TransformerConfig::logit_chunks) gives none to "
      "infer(); legal there is 1",
      options_.chunks);
}

TensorSpec TokenLoss::gathered_panels(const TensorSpec& outputs) const {
  const std::int64_t rows = outputs.shape[0] * outputs.shape[1];
  return {outputs.dtype, {classes_.ranks(), rows * classes_.most()}};
}

std::optional<TensorSpec> TokenLoss::answer_spec(const TensorSpec& outputs) const {
  if (!classes_.divided()) return {};
  return TensorSpec{outputs.dtype, {outputs.shape[0], outputs.shape[1], options_.vocabulary}};
}

void TokenLoss::answer(StageContext& ctx, const Tensor& outputs, const Tensor& answer) {
  const TensorSpec spec = gathered_panels(outputs.spec);
  const std::int64_t rows = outputs.spec.shape[0] * outputs.spec.shape[1];
  Tensor all = outputs;
  Buffer memory;
  if (classes_.ranks() > 1) {
    memory = ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
    all = {memory.data(), spec};
    const Tensor mine = rows_from(all, classes_.rank(), 1);
    copy_async(mine.data, outputs.data, outputs.spec.bytes(), ctx.compute.stream());
    ctx.tensor->all_gather(mine, all, &ctx.compute);
  }
  const auto start_of = [&](int shard) { return classes_.starts()[sluice::at(shard)]; };
  const auto bytes_of = [&](std::int64_t logits) {
    return static_cast<std::size_t>(logits) * size_of(spec.dtype);
  };
  const int local = classes_.shards().local;
  for (int shard = 0; shard < classes_.shards().count; ++shard) {
    const std::int64_t start = start_of(shard), classes = start_of(shard + 1) - start;
    const int rank = shard / local;
    const std::int64_t before = rank * classes_.most() + start - start_of(rank * local);
    const std::byte* const panel = all.as<const std::byte>() + bytes_of(rows * before);
    for (std::int64_t row = 0; row < rows; ++row) {
      copy_async(answer.as<std::byte>() + bytes_of(row * options_.vocabulary + start),
                 panel + bytes_of(row * classes), bytes_of(classes), ctx.compute.stream());
    }
  }
  ctx.compute.wait();  // before what was gathered is freed
}

}  // namespace sluice::nn
