#include "stages/layers/ends.hpp"

namespace sluice {

namespace {

constexpr const char* kTokenEmbedding = "token_embedding";

}  // namespace

EmbeddingLayer::EmbeddingLayer(const Options& options, ParameterSet& parameters)
    : tokens_(&parameters.add(std::string(kTokenEmbedding) + ".weight",
                              Shape{options.vocabulary, options.width}, Init::normal(0.02), true,
                              options.tied)),
      width_(options.width),
      dropout_(options.dropout),
      stream_(options.stream) {
  if (options.positions > 0) {
    positions_ = &parameters.add("position_embedding.weight",
                                 Shape{options.positions, options.width}, Init::normal(0.02));
  }
}

LayerMemory EmbeddingLayer::memory(const BlockShape& shape) const {
  BumpAllocator gradients;
  if (dropout_.probability > 0) {
    (void)gradients.tensor(stream_, shape.rows(), width_);
  }
  return {.gradients = gradients.used()};
}

OperatorMemory EmbeddingLayer::operators(ComputeContext& compute, const BlockShape& shape) const {
  return {.workspace = embedding_backward_weight_workspace(compute, shape.rows(), tokens_->shape[0],
                                                           width_)};
}

Tensor EmbeddingLayer::dropped(const StreamCall& call) const {
  return BumpAllocator(call.gradients).tensor(stream_, call.shape.rows(), width_);
}

void EmbeddingLayer::forward(StreamCall& call, const Tensor& in, const Tensor& out) {
  ComputeContext& compute = call.compute();
  embedding_forward(compute, in, tokens_->value,
                    positions_ != nullptr ? positions_->value : Tensor{}, out);
  if (dropout_.active(call)) {
    dropout(compute, out, dropout_.at(call, call.shape.sequence * width_), out);
  }
}

void EmbeddingLayer::backward_input(StreamCall& call, const Tensor& /*in*/,
                                    const StreamGradient& dout, const StreamGradient& /*din*/) {
  if (dropout_.active(call)) {
    dropout(call.compute(), dout.value, dropout_.at(call, call.shape.sequence * width_),
            dropped(call));
  }
}

void EmbeddingLayer::backward_weight(StreamCall& call, const Tensor& in,
                                     const StreamGradient& dout) {
  embedding_backward_weight(call.compute(), in, dropout_.active(call) ? dropped(call) : dout.value,
                            tokens_->grad, positions_ != nullptr ? positions_->grad : Tensor{},
                            next_write({tokens_, positions_}, call.compute().stream()));
}

HeadLayer::HeadLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies)
    : norm_(options.norm, "final_norm", options.width, options.norm_epsilon, parameters),
      projection_(options.tied ? kTokenEmbedding : "head",
                  {.in = options.width, .out = options.vocabulary, .tied = options.tied},
                  parameters, copies),
      width_(options.width),
      precision_(options.precision),
      chunks_(options.chunks) {}

std::int64_t HeadLayer::chunk_rows(const BlockShape& shape) const {
  if (!in_chunks()) return shape.rows();
  const std::int64_t rows = shape.by_sample ? shape.sequence : shape.rows();  // in chunks
  const auto share = static_cast<std::size_t>((rows + chunks_ - 1) / chunks_);
  return std::min(rows, static_cast<std::int64_t>(round_up(share, kChunkRows)));
}

HeadLayer::Kept HeadLayer::allocate(const BlockShape& shape, LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  Kept kept;
  if (in_chunks()) {
    kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_.stats_per_row());
    kept.logits = memory.scratch.tensor(precision_, chunk_rows(shape), projection_.out());
    kept.losses = memory.scratch.take<double>(rows);
    return kept;
  }
  kept.normed = memory.until_weight.tensor(precision_, rows, width_);
  kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_.stats_per_row());
  kept.dnormed = memory.gradients.tensor(precision_, rows, width_);
  return kept;
}

HeadLayer::Kept HeadLayer::kept_of(const StreamCall& call) const {
  LayerAllocators memory = call.allocators();
  return allocate(call.shape, memory);
}

LayerMemory HeadLayer::memory(const BlockShape& shape) const {
  LayerAllocators memory;
  (void)allocate(shape, memory);
  return memory.used();
}

OperatorMemory HeadLayer::operators(ComputeContext& compute, const BlockShape& shape) const {
  return {.workspace = std::max(norm_.workspace(compute, shape.rows()),
                                projection_.workspace(compute, chunk_rows(shape), precision_))};
}

void HeadLayer::forward(StreamCall& call, const Tensor& in, const Tensor& out) {
  const Kept kept = kept_of(call);
  norm_.forward(call.compute(), in, in_chunks() ? out : kept.normed, kept.stats);
  if (!in_chunks()) projection_.forward(call.compute(), kept.normed, out);
}

void HeadLayer::loss(ComputeContext& compute, const BlockShape& shape, std::byte* scratch,
                     const Loss& loss) const {
  LayerAllocators memory;
  memory.scratch = BumpAllocator(scratch);
  const Kept kept = allocate(shape, memory);
  for_summed_rows(shape, [&](std::int64_t begin, std::int64_t rows) {
    for (std::int64_t first = begin; first < begin + rows; first += chunk_rows(shape)) {
      const std::int64_t count = std::min(chunk_rows(shape), begin + rows - first);
      const Tensor x = rows_from(loss.normed, first, count);
      const Tensor logits = rows_from(kept.logits, 0, count);
      const Tensor targets{loss.targets.as<std::int32_t>() + first, {DType::kI32, Shape{count}}};
      projection_.forward(compute, x, logits);
      row_cross_entropy(compute, logits, targets, loss.scale, loss.gradient, kept.losses + first);
      if (!loss.gradient) continue;
      projection_.backward_weight(compute, {.samples = 1, .sequence = count}, x, logits);
      projection_.backward_input(compute, logits, x);
    }
  });
  sum_of_losses(compute, kept.losses, shape.rows(), loss.sum);
}

void HeadLayer::recompute(StreamCall& call, const Tensor& in) {
  if (in_chunks()) return;  // the statistics are kept
  const Kept kept = kept_of(call);
  norm_.forward(call.compute(), in, kept.normed, kept.stats);
}

void HeadLayer::backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                               const StreamGradient& din) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) projection_.backward_input(call.compute(), dout.value, kept.dnormed);
  norm_.backward_input(call.compute(), normed_gradient(kept, dout), in, kept.stats, {}, din);
}

void HeadLayer::backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) {
    projection_.backward_weight(call.compute(), call.shape, kept.normed, dout.value);
  }
  norm_.backward_weight(call.compute(), call.shape, normed_gradient(kept, dout), in, kept.stats);
}

void HeadLayer::backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                         const StreamGradient& din) {
  const Kept kept = kept_of(call);
  if (!in_chunks()) {
    projection_.backward_input(call.compute(), dout.value, kept.dnormed);
    projection_.backward_weight(call.compute(), call.shape, kept.normed, dout.value);
  }
  norm_.backward(call.compute(), call.shape, normed_gradient(kept, dout), in, kept.stats, {}, din);
}

}  // namespace sluice
