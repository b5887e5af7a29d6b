#include "stages/cuda/attention_cudnn.hpp"

#include <cmath>
#include <limits>

#include <sluice/error.hpp>

#include "stages/cuda_context/context.hpp"

namespace sluice::cuda {

namespace {

constexpr int kAmpere = 80;

// Strides of the operands: [samples, heads, sequence, head_dim] over the packed rows.
struct Layouts {
  explicit Layouts(const AttentionShape& shape)
      : samples(shape.samples),
        sequence(shape.sequence),
        heads(shape.heads),
        kv_heads(shape.kv_heads),
        head_dim(shape.head_dim),
        query(rows(heads, shape.packed_width())),
        key(rows(kv_heads, shape.packed_width())),
        out(rows(heads, heads * head_dim)),
        scores(CudnnLayout::dense(samples, heads, sequence, sequence)),
        row_values(CudnnLayout::dense(samples, heads, sequence, 1)) {}

  [[nodiscard]] CudnnLayout rows(std::int64_t count, std::int64_t width) const {
    return {{samples, count, sequence, head_dim}, {sequence * width, head_dim, width, 1}};
  }
  // What is read column by column: the transpose of dense scores, as a matmul's operand.
  [[nodiscard]] CudnnLayout scores_by_column() const {
    CudnnLayout layout = scores;
    layout.strides[2] = 1;
    layout.strides[3] = sequence;
    return layout;
  }

  std::int64_t samples, sequence, heads, kv_heads, head_dim;
  CudnnLayout query, key, out;  // values as keys
  CudnnLayout scores, row_values;
};

float scale_of(const AttentionShape& shape) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
}

// scale * (query keyᵀ), not masked.
CudnnTensor scaled_scores(CudnnGraph& graph, const Layouts& at, CudnnTensor query,
                          CudnnTensor key_transposed, CudnnTensor scale) {
  const CudnnTensor scores = graph.intermediate(at.scores);
  graph.matmul(query, key_transposed, scores);
  const CudnnTensor scaled = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_MUL, scores, scale, scaled);
  return scaled;
}

// Minus infinity where the key's position is past the query's.
CudnnTensor masked(CudnnGraph& graph, const Layouts& at, CudnnTensor scores) {
  constexpr std::int64_t kRows = 2, kColumns = 3;
  const CudnnTensor row = graph.intermediate(at.scores, CUDNN_DATA_INT32);
  graph.index(scores, kRows, row);
  const CudnnTensor column = graph.intermediate(at.scores, CUDNN_DATA_INT32);
  graph.index(scores, kColumns, column);
  const CudnnTensor seen = graph.intermediate(at.scores, CUDNN_DATA_BOOLEAN);
  graph.pointwise(CUDNN_POINTWISE_CMP_GE, row, column, seen, CUDNN_DATA_BOOLEAN);
  const CudnnTensor result = graph.intermediate(at.scores);
  graph.select(scores, graph.scalar(-std::numeric_limits<float>::infinity()), seen, result);
  return result;
}

// A row's softmax, stored as bf16 for the matmul that follows; log_sum = max + log(sum).
CudnnTensor softmax(CudnnGraph& graph, const Layouts& at, CudnnTensor scores, CudnnTensor log_sum) {
  const CudnnTensor largest = graph.intermediate(at.row_values);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest);
  const CudnnTensor below = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_SUB, scores, largest, below);
  const CudnnTensor exponential = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_EXP, below, std::nullopt, exponential);
  const CudnnTensor sum = graph.intermediate(at.row_values);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, exponential, sum);
  const CudnnTensor logarithm = graph.intermediate(at.row_values);
  graph.pointwise(CUDNN_POINTWISE_LOG, sum, std::nullopt, logarithm);
  graph.pointwise(CUDNN_POINTWISE_ADD, largest, logarithm, log_sum);
  const CudnnTensor probabilities = graph.intermediate(at.scores, CUDNN_DATA_BFLOAT16);
  graph.pointwise(CUDNN_POINTWISE_DIV, exponential, sum, probabilities);
  return probabilities;
}

}  // namespace

AttentionForwardTensors describe_attention_forward(const AttentionShape& shape, CudnnGraph& graph) {
  const Layouts at(shape);
  const CudnnTensor query = graph.memory(at.query, CUDNN_DATA_BFLOAT16);
  const CudnnTensor key = graph.memory(at.key.transposed(), CUDNN_DATA_BFLOAT16);
  const CudnnTensor value = graph.memory(at.key, CUDNN_DATA_BFLOAT16);
  const CudnnTensor out = graph.memory(at.out, CUDNN_DATA_BFLOAT16);
  const CudnnTensor log_sum = graph.memory(at.row_values, CUDNN_DATA_FLOAT);
  const CudnnTensor scores = scaled_scores(graph, at, query, key, graph.scalar(scale_of(shape)));
  const CudnnTensor probabilities = softmax(graph, at, masked(graph, at, scores), log_sum);
  graph.matmul(probabilities, value, out);
  return {query, key, value, out, log_sum};
}

namespace {

// result [.., key position, head_dim] = factorᵀ other, summed over the query heads that share a
// key head; `factor` are scores.
void key_gradient(CudnnGraph& graph, const Layouts& at, CudnnTensor factor, CudnnTensor other,
                  CudnnTensor result) {
  const CudnnTensor by_column = graph.intermediate(at.scores_by_column(), CUDNN_DATA_BFLOAT16);
  graph.reshape(factor, by_column);
  if (at.heads == at.kv_heads) {
    graph.matmul(by_column, other, result);
    return;
  }
  const CudnnTensor each = graph.intermediate(
      CudnnLayout::dense(at.samples, at.heads, at.sequence, at.head_dim), CUDNN_DATA_BFLOAT16);
  graph.matmul(by_column, other, each);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, each, result);
}

}  // namespace

AttentionBackwardTensors describe_attention_backward(const AttentionShape& shape,
                                                     CudnnGraph& graph) {
  const Layouts at(shape);
  const auto bf16 = [&graph](const CudnnLayout& layout) {
    return graph.memory(layout, CUDNN_DATA_BFLOAT16);
  };
  const CudnnTensor query = bf16(at.query), key = bf16(at.key.transposed()),
                    value = bf16(at.key.transposed()), out = bf16(at.out), dout = bf16(at.out);
  const CudnnTensor dquery = bf16(at.query), dkey = bf16(at.key), dvalue = bf16(at.key);
  const CudnnTensor log_sum = graph.memory(at.row_values, CUDNN_DATA_FLOAT);
  const CudnnTensor delta = graph.memory(at.row_values, CUDNN_DATA_FLOAT);
  const CudnnTensor scale = graph.scalar(scale_of(shape));

  // delta = dot(dout, out) of each row. The library's pattern has a factor there, for dropout.
  const CudnnTensor products =
      graph.intermediate(CudnnLayout::dense(at.samples, at.heads, at.sequence, at.head_dim));
  graph.pointwise(CUDNN_POINTWISE_MUL, dout, out, products);
  const CudnnTensor dots = graph.intermediate(at.row_values);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, dots);
  graph.pointwise(CUDNN_POINTWISE_MUL, dots, graph.scalar(1), delta);

  // The probabilities again, and the value gradient.
  const CudnnTensor scores = scaled_scores(graph, at, query, key, scale);
  const CudnnTensor logarithms = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_SUB, scores, log_sum, logarithms);
  const CudnnTensor probabilities = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_EXP, masked(graph, at, logarithms), std::nullopt, probabilities);
  key_gradient(graph, at, probabilities, dout, dvalue);

  // dscores = probabilities * (dout valueᵀ - delta) * scale
  const CudnnTensor dprobabilities = graph.intermediate(at.scores);
  graph.matmul(dout, value, dprobabilities);
  const CudnnTensor centred = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_SUB, dprobabilities, delta, centred);
  const CudnnTensor weighted = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_MUL, centred, probabilities, weighted);
  const CudnnTensor dscores = graph.intermediate(at.scores);
  graph.pointwise(CUDNN_POINTWISE_MUL, weighted, scale, dscores);
  key_gradient(graph, at, dscores, query, dkey);

  const CudnnTensor key_by_row = graph.intermediate(at.key);
  graph.reshape(key, key_by_row);
  graph.matmul(dscores, key_by_row, dquery);

  return {query, key, value, out, log_sum, dout, delta, dquery, dkey, dvalue};
}

namespace {

// Bytes of the row dots that backward keeps before the library's own scratch.
std::size_t delta_bytes(const AttentionShape& shape) {
  return round_up(static_cast<std::size_t>(shape.rows() * shape.heads) * sizeof(float),
                  kBufferAlignment);
}

// Queries, keys and values of a packed tensor.
struct Packed {
  Packed(const AttentionShape& shape, const Tensor& packed)
      : query(static_cast<std::byte*>(packed.data)),
        key(query + std::ptrdiff_t{shape.heads} * shape.head_dim * 2),
        value(key + std::ptrdiff_t{shape.kv_heads} * shape.head_dim * 2) {}
  std::byte *query, *key, *value;
};

// What the library accepts and does not compute rightly, by the checks of its own C++ front end
// (sdpa_backward, version 1.32). Empty where nothing is known.
std::string known_fault(const AttentionShape& shape) {
  const std::size_t version = cudnnGetVersion();
  if (shape.head_dim % 8 != 0) return "the width of a head is not a multiple of 8";
  if (shape.sequence < 2) return "a sequence of one";
  if (version == 91000 || version == 91001) return "faults of 9.10.0 and 9.10.1";
  if (shape.sequence % 128 != 0 && version <= 91500) {
    return "a sequence that is not a multiple of 128 needs 9.15.1";
  }
  return {};
}

}  // namespace

void CudnnAttention::make_plans(Entry& entry) {
  entry.refusal = known_fault(entry.shape);
  if (context_.compute_capability() < kAmpere) entry.refusal = "bf16 needs compute capability 8.0";
  if (!entry.refusal.empty()) return;
  try {
    const CudnnTarget target = {.handle = context_.cudnn()};
    CudnnGraph forward, backward;
    entry.in_forward = describe_attention_forward(entry.shape, forward);
    entry.in_backward = describe_attention_backward(entry.shape, backward);
    entry.forward = std::move(forward).plan(target, &entry.refusal);
    if (entry.forward) entry.backward = std::move(backward).plan(target, &entry.refusal);
    if (entry.backward) entry.refusal.clear();
  } catch (const Error& error) {
    entry.refusal = error.what();
  }
}

CudnnAttention::Entry& CudnnAttention::find(const AttentionShape& shape) {
  for (Entry& entry : entries_) {
    if (entry.shape == shape) return entry;
  }
  Entry& made = entries_.emplace_back(Entry{.shape = shape, .refusal = {}});
  make_plans(made);
  return made;
}

const std::string& CudnnAttention::refusal(const AttentionShape& shape) {
  return find(shape).refusal;
}

std::size_t CudnnAttention::forward_workspace(const AttentionShape& shape) {
  return find(shape).forward->workspace_bytes();
}

std::size_t CudnnAttention::backward_workspace(const AttentionShape& shape) {
  return delta_bytes(shape) + find(shape).backward->workspace_bytes();
}

void CudnnAttention::forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                             const Tensor& out, std::byte* state) {
  const Entry& entry = find(shape);
  const AttentionForwardTensors& forward = entry.in_forward;
  const Packed at(shape, qkv);
  const std::array<CudnnPlan::Operand, 5> operands = {{{forward.query, at.query},
                                                       {forward.key, at.key},
                                                       {forward.value, at.value},
                                                       {forward.out, out.data},
                                                       {forward.log_sum, state}}};
  entry.forward->run(context_.cudnn(), operands, ctx.workspace(forward_workspace(shape)));
}

void CudnnAttention::backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                              const Tensor& out, const Tensor& dout, const std::byte* state,
                              const Tensor& dqkv) {
  const Entry& entry = find(shape);
  const AttentionBackwardTensors& backward = entry.in_backward;
  const Packed at(shape, qkv), gradient(shape, dqkv);
  std::byte* delta = ctx.workspace(backward_workspace(shape));
  const std::array<CudnnPlan::Operand, 10> operands = {{{backward.query, at.query},
                                                        {backward.key, at.key},
                                                        {backward.value, at.value},
                                                        {backward.out, out.data},
                                                        {backward.log_sum, state},
                                                        {backward.dout, dout.data},
                                                        {backward.delta, delta},
                                                        {backward.dquery, gradient.query},
                                                        {backward.dkey, gradient.key},
                                                        {backward.dvalue, gradient.value}}};
  entry.backward->run(context_.cudnn(), operands, delta + delta_bytes(shape));
}

}  // namespace sluice::cuda
