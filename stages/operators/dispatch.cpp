// Every operator checks its operands once, then calls the backend of the context's device.
//
// A check returns, or throws Error(kUsage) whose one line names the operator, the operand that does
// not fit, those that it has to fit, with type and shape, and what would be legal. An operand of
// rows is compared as [rows, width]: rows is the product of all its dimensions but the last.
// Weights, tables and vectors have exactly the dimensions of operators.hpp. An operand with
// elements has data. Contents, alignment, overlap and the size of memory behind a pointer are not
// checked. A check that returns allocates nothing and formats nothing.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/backend.hpp"
#include "stages/compute/operator_profile.hpp"
#include "stages/compute/operator_table.hpp"
#include "stages/compute/partial_sums.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/operators/context.hpp"

namespace sluice {

namespace {

constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max() / 8;  // as Shape

// An operand by its name: a tensor, or the shape that an attention is called with.
struct Operand {
  Operand(const char* called, const Tensor& is) : name(called), tensor(&is) {}
  Operand(const char* called, const AttentionShape& is) : name(called), shape(&is) {}
  const char* name;
  const Tensor* tensor = nullptr;
  const AttentionShape* shape = nullptr;
};
using Others = std::initializer_list<Operand>;

// Sets of types, one bit each.
using Types = unsigned;
constexpr Types only(DType dtype) {
  const auto number = static_cast<unsigned>(dtype);
  return number < 8 ? 1U << number : 0;  // a number that is no type fits nothing
}
constexpr Types kF32 = only(DType::kF32), kI32 = only(DType::kI32);
constexpr Types kFloats = kF32 | only(DType::kBf16);
bool in(Types types, DType dtype) { return (types & only(dtype)) != 0; }

constexpr std::int64_t kAny = -1;

// What an operand may be: its types, and a size or kAny per dimension.
struct Legal {
  enum class Form {
    kRows,    // [rows, width], where rows may be several dimensions
    kVector,  // [width]
    kMatrix,  // [rows, width]
    kTable,   // [at least rows, width]
    kCount,   // `rows` elements in any shape
  };
  Types types;
  std::int64_t rows, width;
  Form form = Form::kRows;
};
Legal in_rows(Types types, std::int64_t rows, std::int64_t width) { return {types, rows, width}; }
Legal matrix(Types types, std::int64_t rows, std::int64_t width) {
  return {types, rows, width, Legal::Form::kMatrix};
}
Legal vector(Types types, std::int64_t width) { return {types, 1, width, Legal::Form::kVector}; }

std::int64_t width_of(const Tensor& tensor) {
  const Shape& shape = tensor.shape();
  return shape.rank() == 0 ? 1 : shape[shape.rank() - 1];
}

// Does not overflow: a Shape's leading dimensions are counted before the last.
std::int64_t rows_of(const Tensor& tensor) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < tensor.shape().rank(); ++i) rows *= tensor.shape()[i];
  return rows;
}

bool is(std::int64_t size, std::int64_t wanted) { return wanted == kAny || size == wanted; }

[[gnu::always_inline]] inline bool has_shape(const Tensor& tensor, const Legal& legal) {
  const Shape& shape = tensor.shape();
  switch (legal.form) {
    case Legal::Form::kRows:
      return is(rows_of(tensor), legal.rows) && is(width_of(tensor), legal.width);
    case Legal::Form::kVector:
      return shape.rank() == 1 && is(shape[0], legal.width);
    case Legal::Form::kMatrix:
      return shape.rank() == 2 && is(shape[0], legal.rows) && is(shape[1], legal.width);
    case Legal::Form::kTable:
      return shape.rank() == 2 && shape[0] >= legal.rows && is(shape[1], legal.width);
    case Legal::Form::kCount:
      return tensor.elements() == legal.rows;
  }
  return false;
}

std::string to_text(const Operand& operand) {
  if (operand.tensor != nullptr) {
    return fmt::format("{} {}", operand.name, to_string(operand.tensor->spec));
  }
  const AttentionShape& shape = *operand.shape;
  return fmt::format("{} of {} samples, {} positions, {} heads over {} of {} each{}", operand.name,
                     shape.samples, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim,
                     shape.window == 0 ? "" : fmt::format(", a window of {}", shape.window));
}

std::string to_text(const Legal& legal) {
  std::string types;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kI32}) {
    if (in(legal.types, dtype))
      types += (types.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  const auto size = [](std::int64_t dim) { return dim == kAny ? "any" : std::to_string(dim); };
  switch (legal.form) {
    case Legal::Form::kVector:
      return fmt::format("{} [{}]", types, size(legal.width));
    case Legal::Form::kTable:
      return fmt::format("{} [at least {}, {}]", types, legal.rows, size(legal.width));
    case Legal::Form::kCount:
      return fmt::format("{} of any shape with {} elements", types, legal.rows);
    default:
      return fmt::format("{} [{}, {}]", types, size(legal.rows), size(legal.width));
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const std::string& what) {
  throw Error(ErrorCode::kUsage, fmt::format("{}: {}", name, what));
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const Operand& operand,
                                                   const Legal& legal, Others others) {
  std::string with;
  for (const Operand& other : others) with += (with.empty() ? "" : " and ") + to_text(other);
  const bool no_data = operand.tensor->data == nullptr;
  refuse(name, fmt::format("{} is {}{}; legal with {}: {}{}", operand.name,
                           to_string(operand.tensor->spec), no_data ? " without data" : "", with,
                           to_text(legal), no_data ? " with data" : ""));
}

// `others`: the operands that `legal` follows from. Inlined, so that they are put together, and
// `legal` with them, only where the operand is refused.
[[gnu::always_inline]] inline void fits(const char* name, const Operand& operand,
                                        const Legal& legal, Others others) {
  const Tensor& tensor = *operand.tensor;
  const bool right = in(legal.types, tensor.spec.dtype) && has_shape(tensor, legal) &&
                     (tensor.data != nullptr || tensor.elements() == 0);
  if (!right) [[unlikely]] {
    refuse(name, operand, legal, others);
  }
}

[[gnu::always_inline]] inline void fits_if_given(const char* name, const Operand& operand,
                                                 const Legal& legal, Others others) {
  if (operand.tensor->data != nullptr) fits(name, operand, legal, others);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_pointer(const char* name, const char* pointer,
                                                           const char* legal) {
  refuse(name, fmt::format("{} is null; legal: {}", pointer, legal));
}

bool countable(std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product > kMostElements) return false;
  }
  return true;
}

Legal packed(Types types, const AttentionShape& shape) {
  return in_rows(types, shape.rows(), shape.packed_width());
}
Legal mixed(Types types, const AttentionShape& shape) {
  return in_rows(types, shape.rows(), std::int64_t{shape.heads} * shape.head_dim);
}

void state_given(const char* name, const AttentionShape& shape, const std::byte* state) {
  if (state == nullptr && shape.rows() > 0) {
    refuse_pointer(name, "state", "memory of attention_state_bytes()");
  }
}

// x weightᵀ + bias. `types`: of the result. A GPU takes a rounded bias too.
void product(ComputeContext& ctx, const char* name, const Tensor& x, const Tensor& weight,
             const Tensor& bias, const Operand& result, Types types) {
  fits(name, {"x", x}, in_rows(kFloats, kAny, kAny), {{"weight", weight}});
  fits(name, {"weight", weight}, matrix(only(x.spec.dtype), kAny, width_of(x)), {{"x", x}});
  const bool on_cpu = ctx.device().kind == DeviceKind::kCpu;
  const Types biases = on_cpu ? kF32 : kF32 | only(result.tensor->spec.dtype);
  fits_if_given(name, {"bias", bias}, vector(biases, weight.shape()[0]), {{"weight", weight}});
  fits(name, result, in_rows(types, rows_of(x), weight.shape()[0]), {{"x", x}, {"weight", weight}});
}

void rows_with_targets(const char* name, const Tensor& logits, const Tensor& targets) {
  fits(name, {"logits", logits}, in_rows(kFloats, kAny, kAny), {{"targets", targets}});
  fits(name, {"targets", targets}, {kI32, rows_of(logits), 1, Legal::Form::kCount},
       {{"logits", logits}});
}

// What is legal of tables whose rows `tokens` names, and of what has a row per token.
void embedding(const char* name, const Operand& tokens, const Operand& table,
               const Operand& positions, const Operand& rows) {
  fits(name, tokens, matrix(kI32, kAny, kAny), {table});
  fits(name, table, matrix(kF32, kAny, kAny), {tokens});
  const std::int64_t width = table.tensor->shape()[1];
  fits_if_given(name, positions, {kF32, tokens.tensor->shape()[1], width, Legal::Form::kTable},
                {tokens, table});
  fits(name, rows, in_rows(kFloats, tokens.tensor->elements(), width), {tokens, table});
}

// first, second: whether the update needs that state.
void update_runs(const char* name, std::span<const UpdateRun> runs, bool first, bool second) {
  for (const UpdateRun& run : runs) {
    const bool counts = run.count >= 0 && run.count <= kMostElements;
    const bool given =
        run.count == 0 || (run.value != nullptr && run.grad != nullptr &&
                           (!first || run.first != nullptr) && (!second || run.second != nullptr));
    if (counts && given) [[likely]] {
      continue;
    }
    const auto text = [](const void* pointer) { return pointer == nullptr ? "null" : "given"; };
    refuse(name, fmt::format("run {} has count {}, value {}, grad {}, first {}, second {}; legal: "
                             "a count of 0 to 2^60, and all of value, grad{}{} given",
                             &run - runs.data(), run.count, text(run.value), text(run.grad),
                             text(run.first), text(run.second), first ? ", first" : "",
                             second ? ", second" : ""));
  }
}

// x's type, or one that it can be rounded to.
Types results_of(const Tensor& x) { return in(kF32, x.spec.dtype) ? kFloats : only(x.spec.dtype); }

// Of either norm. beta: null for RMSNorm, which has none and keeps one number per row.
void check_norm_forward(const char* name, const Tensor& x, const Tensor& gamma, const Tensor* beta,
                        const Tensor& y, const Tensor& stats) {
  const std::int64_t rows = rows_of(x), width = width_of(x);
  fits(name, {"x", x}, in_rows(kFloats, kAny, kAny), {{"gamma", gamma}});
  fits(name, {"gamma", gamma}, vector(kF32, width), {{"x", x}});
  if (beta != nullptr) fits(name, {"beta", *beta}, vector(kF32, width), {{"x", x}});
  fits(name, {"y", y}, in_rows(results_of(x), rows, width), {{"x", x}});
  fits(name, {"stats", stats}, in_rows(kF32, rows, beta != nullptr ? 2 : 1), {{"x", x}});
}

// Of either norm; `terms`: 2 for LayerNorm, 1 for RMSNorm, of statistics and weights.
void check_norm_backward(const char* name, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                         const Tensor& stats, int terms, const NormGradients& gradients) {
  const auto& [dx, residual, rounded, dgamma, dbeta, write] = gradients;
  const std::int64_t rows = rows_of(x), width = width_of(x);
  fits(name, {"x", x}, in_rows(kFloats, kAny, kAny), {{"gamma", gamma}});
  fits(name, {"dy", dy}, in_rows(results_of(x), rows, width), {{"x", x}});
  fits(name, {"gamma", gamma}, vector(kF32, width), {{"x", x}});
  fits(name, {"stats", stats}, in_rows(kF32, rows, terms), {{"x", x}});
  const Legal stream = in_rows(only(x.spec.dtype), rows, width);
  fits_if_given(name, {"dx", dx}, stream, {{"x", x}});
  fits_if_given(name, {"residual", residual}, stream, {{"x", x}});
  if (rounded.data != nullptr) {
    fits(name, {"dx", dx}, in_rows(kF32, rows, width), {{"rounded", rounded}});
    fits(name, {"rounded", rounded}, in_rows(only(DType::kBf16), rows, width), {{"x", x}});
  }
  fits_if_given(name, {"dgamma", dgamma}, vector(kF32, width), {{"x", x}});
  if (dbeta.data != nullptr && terms == 1) {
    refuse(name, to_text({"dbeta", dbeta}) + "; legal: no data, for RMSNorm has no beta");
  }
  if (terms == 2 && (dgamma.data != nullptr || dbeta.data != nullptr)) {
    fits(name, {"dgamma", dgamma}, vector(kF32, width), {{"x", x}});
    fits(name, {"dbeta", dbeta}, vector(kF32, width), {{"x", x}});
  }
}

// Checks only the shape: heads share keys evenly, and products of sizes do not overflow.
void check_attention_shape(const char* name, const AttentionShape& shape) {
  const bool positive = shape.samples >= 0 && shape.sequence >= 0 && shape.heads >= 1 &&
                        shape.kv_heads >= 1 && shape.head_dim >= 1 &&
                        shape.heads % shape.kv_heads == 0 && shape.window >= 0;
  const std::int64_t columns = std::int64_t{shape.heads} + std::int64_t{2} * shape.kv_heads;
  const std::int64_t samples = std::max<std::int64_t>(shape.samples, 1);
  const std::int64_t sequence = std::max<std::int64_t>(shape.sequence, 1);
  constexpr std::int64_t kPadding = 16;  // attention_state_bytes() counts by up to 16 and 8 bytes
  if (positive && columns <= std::numeric_limits<int>::max() &&
      countable({samples, sequence, columns, shape.head_dim}) &&
      countable({samples, shape.heads, sequence, sequence, kPadding})) [[likely]] {
    return;
  }
  refuse(name, to_text({"shape", shape}) +
                   "; legal: heads that are a multiple of those they are over, at least 1 each, "
                   "sizes whose products stay under 2^60, and a window of 0 (none) or more");
}

// `packed_rows`: queries, keys and values, or their gradients.
void check_query_key_norm(const char* name, const AttentionShape& shape, const Operand& packed_rows,
                          const Tensor& query_gain, const Tensor& key_gain, const Tensor& raw,
                          const Tensor& stats) {
  check_attention_shape(name, shape);
  fits(name, packed_rows, packed(kFloats, shape), {{"shape", shape}});
  fits(name, {"query_gain", query_gain}, vector(kF32, shape.head_dim), {{"shape", shape}});
  fits(name, {"key_gain", key_gain}, vector(kF32, shape.head_dim), {{"shape", shape}});
  const std::int64_t heads = std::int64_t{shape.heads} + shape.kv_heads;
  fits(name, {"raw", raw},
       in_rows(only(packed_rows.tensor->spec.dtype), shape.rows(), heads * shape.head_dim),
       {packed_rows, {"shape", shape}});
  fits(name, {"stats", stats}, in_rows(kF32, shape.rows(), heads), {{"shape", shape}});
}

// For an operator that reads and writes element by element: y in x's memory is of x's type.
void in_place_of_equal_type(const char* name, const Operand& x, const Operand& y) {
  const Tensor &from = *x.tensor, &to = *y.tensor;
  if (from.data != to.data || from.spec.dtype == to.spec.dtype || to.elements() == 0) return;
  refuse(name, to_text(x) + " and " + to_text(y) +
                   " share memory; legal: equal types, or y in memory of its own");
}

// y of x's type and shape: activations.
void check_pointwise(const char* name, Pointwise function) {
  const int number = static_cast<int>(function), count = static_cast<int>(Pointwise::kCount);
  if (number >= 0 && number < count) return;
  throw_usage("{}: function {}; legal: those of Pointwise, 0 to {}", name, number, count - 1);
}

void check_elementwise(const char* name, const Tensor& x, const Tensor& y) {
  fits(name, {"x", x}, in_rows(kFloats, kAny, kAny), {{"y", y}});
  fits(name, {"y", y}, in_rows(only(x.spec.dtype), rows_of(x), width_of(x)), {{"x", x}});
}

// Gradients of these: dy and dx of x's type and shape.
void check_elementwise_backward(const char* name, const Tensor& x, const Tensor& dy,
                                const Tensor& dx) {
  fits(name, {"x", x}, in_rows(kFloats, kAny, kAny), {{"dy", dy}});
  const Legal legal = in_rows(only(x.spec.dtype), rows_of(x), width_of(x));
  fits(name, {"dy", dy}, legal, {{"x", x}});
  fits(name, {"dx", dx}, legal, {{"x", x}});
}

const OperatorTable& operators_of(const ComputeContext& ctx) {
  ctx.progress();
  return ctx.backend().operators();
}

// What a profile calls an operator, the floating-point operations of a call, and the bytes that it
// cannot do without: those of each tensor once, and what is said here.
struct Work {
  const char* name;
  double flops = 0;
  const Tensor* updated = nullptr;  // an operand that is read and written: counts twice
  double bytes = 0;                 // besides; below 0 for parts of a tensor that are not touched
};

const Tensor* updated_if(bool updates, const Tensor& operand) {
  return updates ? &operand : nullptr;
}

// Of a table whose rows tokens name, instead of all its rows: those that can differ, `times` each.
double named_rows(const Tensor& tokens, const Tensor& table, int times) {
  const std::int64_t rows = table.shape()[0], named = std::min(tokens.elements(), rows);
  if (rows == 0) return 0;
  return operand_bytes(table) *
         (static_cast<double>(times * named) / static_cast<double>(rows) - 1);
}

// Of queries and keys, which are read and written in place, instead of all of `packed_rows` once.
double queries_and_keys(const AttentionShape& shape, const Tensor& packed_rows) {
  const double heads = shape.heads, kv_heads = shape.kv_heads;
  return operand_bytes(packed_rows) * (2 * (heads + kv_heads) / (heads + 2 * kv_heads) - 1);
}

// Of x [rows, k] with a weight [n, k] or [k, n].
double product_flops(const Tensor& x, const Tensor& weight) {
  return 2.0 * static_cast<double>(rows_of(x)) * static_cast<double>(weight.elements());
}

// Of so many products over the pairs of a query and a key that it sees.
double attention_flops(const AttentionShape& shape, int products) {
  const auto seen = static_cast<double>(shape.seen()), rows = static_cast<double>(shape.rows());
  const double pairs = rows * (seen - seen * seen / (2 * static_cast<double>(shape.sequence)));
  return 2.0 * products * pairs * shape.heads * shape.head_dim;
}

template <typename Part, typename Function, typename... Operands>
void run(const Work& work, Function Part::*entry, ComputeContext& ctx,
         const Operands&... operands) {
  const ThreadTeam team(ctx);
  const Function call = operators_of(ctx).*entry;
  OperatorProfile* const profile = ctx.profile();
  if (profile == nullptr) return call(ctx, operands...);
  profile->begin();
  call(ctx, operands...);
  const double more = work.bytes + (work.updated != nullptr ? operand_bytes(*work.updated) : 0);
  profile->end(work.name, (more + ... + operand_bytes(operands)), work.flops);
}

}  // namespace

void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y) {
  product(ctx, __func__, x, weight, bias, {"y", y}, only(x.spec.dtype) | kF32);
  run({__func__, product_flops(x, weight)}, &OperatorTable::linear_forward, ctx, x, weight, bias,
      y);
}

void linear_residual_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& residual, const Tensor& y) {
  product(ctx, __func__, x, weight, bias, {"y", y}, only(x.spec.dtype) | kF32);
  fits(__func__, {"residual", residual}, in_rows(only(y.spec.dtype), rows_of(y), width_of(y)),
       {{"y", y}});
  if (y.data == residual.data && y.elements() > 0) {
    refuse(__func__, "y and residual share memory; legal: y in memory of its own");
  }
  run({__func__, product_flops(x, weight)}, &OperatorTable::linear_residual_forward, ctx, x, weight,
      bias, residual, y);
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  const Types type = only(dy.spec.dtype);
  fits(__func__, {"dy", dy}, in_rows(kFloats, kAny, kAny), {{"weight", weight}});
  fits(__func__, {"weight", weight}, matrix(type, width_of(dy), kAny), {{"dy", dy}});
  fits(__func__, {"dx", dx}, in_rows(type, rows_of(dy), weight.shape()[1]),
       {{"dy", dy}, {"weight", weight}});
  run({__func__, product_flops(dy, weight)}, &OperatorTable::linear_backward_input, ctx, dy, weight,
      dx);
}

void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias, Write write) {
  fits(__func__, {"x", x}, in_rows(kFloats, kAny, kAny), {{"dy", dy}});
  fits(__func__, {"dy", dy}, in_rows(only(x.spec.dtype), rows_of(x), kAny), {{"x", x}});
  fits(__func__, {"dweight", dweight}, matrix(kF32, width_of(dy), width_of(x)),
       {{"x", x}, {"dy", dy}});
  fits_if_given(__func__, {"dbias", dbias}, vector(kF32, width_of(dy)), {{"dy", dy}});
  run({__func__, product_flops(x, dweight), updated_if(write == Write::kAdd, dweight)},
      &OperatorTable::linear_backward_weight, ctx, x, dy, dweight, dbias, write);
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  const Types type = only(x.spec.dtype);
  product(ctx, __func__, x, weight, bias, {"raised", raised}, type);
  const std::int64_t parts = activation == Activation::kSwiglu ? 2 : 1;
  fits(__func__, {"y", y}, in_rows(type, rows_of(x), kAny), {{"x", x}, {"raised", raised}});
  fits(__func__, {"raised", raised}, in_rows(type, rows_of(x), parts * width_of(y)),
       {{"x", x}, {"y", y}});
  run({__func__, product_flops(x, weight)}, &OperatorTable::linear_activation_forward, ctx,
      activation, x, weight, bias, raised, y);
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  const Types type = only(dy.spec.dtype);
  const std::int64_t parts = activation == Activation::kSwiglu ? 2 : 1;
  fits(__func__, {"dy", dy}, in_rows(kFloats, kAny, kAny), {{"weight", weight}});
  fits(__func__, {"weight", weight}, matrix(type, width_of(dy), kAny), {{"dy", dy}});
  const Legal legal = in_rows(type, rows_of(dy), parts * weight.shape()[1]);
  fits(__func__, {"raised", raised}, legal, {{"dy", dy}, {"weight", weight}});
  fits(__func__, {"draised", draised}, legal, {{"dy", dy}, {"weight", weight}});
  run({__func__, product_flops(dy, weight)}, &OperatorTable::linear_activation_backward_input, ctx,
      activation, dy, weight, raised, draised);
}

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  embedding(__func__, {"tokens", tokens}, {"table", table}, {"positions", positions}, {"out", out});
  const double bytes = ctx.profile() == nullptr ? 0 : named_rows(tokens, table, 1);
  run({__func__, 0, nullptr, bytes}, &OperatorTable::embedding_forward, ctx, tokens, table,
      positions, out);
}

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions, Write write) {
  embedding(__func__, {"tokens", tokens}, {"dtable", dtable}, {"dpositions", dpositions},
            {"dout", dout});
  // What is overwritten is so in all rows.
  const bool some = ctx.profile() != nullptr && write == Write::kAdd;
  run({__func__, 0, nullptr, some ? named_rows(tokens, dtable, 2) : 0},
      &OperatorTable::embedding_backward_weight, ctx, tokens, dout, dtable, dpositions, write);
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  check_norm_forward(__func__, x, gamma, &beta, y, stats);
  run({__func__}, &OperatorTable::layer_norm_forward, ctx, x, gamma, beta, epsilon, y, stats);
}

void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  check_norm_backward(__func__, dy, x, gamma, stats, 2, gradients);
  run({__func__}, &OperatorTable::layer_norm_backward, ctx, dy, x, gamma, stats, gradients);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats) {
  check_norm_forward(__func__, x, gamma, nullptr, y, stats);
  run({__func__}, &OperatorTable::rms_norm_forward, ctx, x, gamma, epsilon, y, stats);
}

void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients) {
  check_norm_backward(__func__, dy, x, gamma, stats, 1, gradients);
  run({__func__}, &OperatorTable::rms_norm_backward, ctx, dy, x, gamma, stats, gradients);
}

std::size_t attention_state_bytes(DeviceKind device, const AttentionShape& shape, DType dtype) {
  check_attention_shape(__func__, shape);
  return operators_for(device).attention_state_bytes(shape, dtype);
}

std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape, DType dtype,
                             bool drops) {
  check_attention_shape(__func__, shape);
  return operators_of(ctx).attention_engine(ctx, shape, dtype, drops);
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  check_attention_shape(__func__, shape);
  fits(__func__, {"qkv", qkv}, packed(kFloats, shape), {{"shape", shape}});
  fits(__func__, {"out", out}, mixed(only(qkv.spec.dtype), shape),
       {{"qkv", qkv}, {"shape", shape}});
  state_given(__func__, shape, state);
  run({__func__, attention_flops(shape, 2)}, &OperatorTable::attention_forward, ctx, shape, qkv,
      dropout, out, state);
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  check_attention_shape(__func__, shape);
  fits(__func__, {"qkv", qkv}, packed(kFloats, shape), {{"shape", shape}});
  const Types type = only(qkv.spec.dtype);
  fits(__func__, {"out", out}, mixed(type, shape), {{"qkv", qkv}, {"shape", shape}});
  fits(__func__, {"dout", dout}, mixed(type, shape), {{"qkv", qkv}, {"shape", shape}});
  fits(__func__, {"dqkv", dqkv}, packed(type, shape), {{"qkv", qkv}, {"shape", shape}});
  state_given(__func__, shape, state);
  run({__func__, attention_flops(shape, 5)}, &OperatorTable::attention_backward, ctx, shape, qkv,
      out, dout, dropout, state, dqkv);
}

void rotary(ComputeContext& ctx, const AttentionShape& shape, const RotaryPositions& positions,
            const Tensor& qkv, bool backward) {
  check_attention_shape(__func__, shape);
  fits(__func__, {"qkv", qkv}, packed(kFloats, shape), {{"shape", shape}});
  run({__func__, 0, nullptr, queries_and_keys(shape, qkv)}, &OperatorTable::rotary, ctx, shape,
      positions, qkv, backward);
}

void query_key_norm_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Tensor& query_gain, const Tensor& key_gain, float epsilon,
                            const Tensor& raw, const Tensor& stats) {
  check_query_key_norm(__func__, shape, {"qkv", qkv}, query_gain, key_gain, raw, stats);
  run({__func__, 0, nullptr, queries_and_keys(shape, qkv)}, &OperatorTable::query_key_norm_forward,
      ctx, shape, qkv, query_gain, key_gain, epsilon, raw, stats);
}

void query_key_norm_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                             const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats,
                             const Tensor& dqkv, const Tensor& dgains) {
  check_query_key_norm(__func__, shape, {"dqkv", dqkv}, query_gain, key_gain, raw, stats);
  fits(__func__, {"dgains", dgains}, matrix(kF32, 2, shape.head_dim), {{"shape", shape}});
  run({__func__, 0, nullptr, queries_and_keys(shape, dqkv)},
      &OperatorTable::query_key_norm_backward, ctx, shape, raw, query_gain, key_gain, stats, dqkv,
      dgains);
}

void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y) {
  check_pointwise(__func__, function);
  check_elementwise(__func__, x, y);
  run({__func__}, &OperatorTable::pointwise_forward, ctx, function, x, y);
}

void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx) {
  check_pointwise(__func__, function);
  check_elementwise_backward(__func__, x, dy, dx);
  run({__func__}, &OperatorTable::pointwise_backward, ctx, function, x, dy, dx);
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  fits(__func__, {"y", y}, in_rows(kFloats, kAny, kAny), {{"gate_up", gate_up}});
  fits(__func__, {"gate_up", gate_up}, in_rows(only(y.spec.dtype), rows_of(y), 2 * width_of(y)),
       {{"y", y}});
  run({__func__}, &OperatorTable::swiglu_forward, ctx, gate_up, y);
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  fits(__func__, {"dy", dy}, in_rows(kFloats, kAny, kAny), {{"gate_up", gate_up}});
  const Legal legal = in_rows(only(dy.spec.dtype), rows_of(dy), 2 * width_of(dy));
  fits(__func__, {"gate_up", gate_up}, legal, {{"dy", dy}});
  fits(__func__, {"dgate_up", dgate_up}, legal, {{"dy", dy}});
  run({__func__}, &OperatorTable::swiglu_backward, ctx, gate_up, dy, dgate_up);
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  fits(__func__, {"x", x}, in_rows(kFloats, kAny, kAny), {{"y", y}});
  fits(__func__, {"y", y}, in_rows(results_of(x), rows_of(x), width_of(x)), {{"x", x}});
  in_place_of_equal_type(__func__, {"x", x}, {"y", y});
  run({__func__}, &OperatorTable::dropout, ctx, x, dropout, y);
}

void dropout_residual(ComputeContext& ctx, const Tensor& x, const Dropout& dropout,
                      const Tensor& residual, const Tensor& y) {
  fits(__func__, {"x", x}, in_rows(kFloats, kAny, kAny), {{"y", y}});
  fits(__func__, {"y", y}, in_rows(kF32 | only(x.spec.dtype), rows_of(x), width_of(x)), {{"x", x}});
  fits(__func__, {"residual", residual}, in_rows(only(y.spec.dtype), rows_of(x), width_of(x)),
       {{"x", x}, {"y", y}});
  in_place_of_equal_type(__func__, {"x", x}, {"y", y});
  run({__func__}, &OperatorTable::dropout_residual, ctx, x, dropout, residual, y);
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  fits(__func__, {"x", x}, in_rows(kFloats, kAny, kAny), {{"y", y}});
  fits(__func__, {"y", y}, in_rows(kF32 | only(x.spec.dtype), rows_of(x), width_of(x)), {{"x", x}});
  run({__func__, 0, &y}, &OperatorTable::add, ctx, x, y);
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  fits(__func__, {"from", from}, in_rows(kFloats, kAny, kAny), {{"to", to}});
  fits(__func__, {"to", to}, in_rows(kFloats, rows_of(from), width_of(from)), {{"from", from}});
  run({__func__}, &OperatorTable::convert, ctx, from, to);
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  for (const auto& [from, to] : conversions) {
    fits(__func__, {"from", from}, in_rows(kF32, kAny, kAny), {{"to", to}});
    fits(__func__, {"to", to}, in_rows(only(DType::kBf16), rows_of(from), width_of(from)),
         {{"from", from}});
  }
  run({__func__}, &OperatorTable::convert_all, ctx, conversions);
}

void softmax_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                           StepValue<double> scale, bool gradient, double* sum) {
  rows_with_targets(__func__, logits, targets);
  if (sum == nullptr) refuse_pointer(__func__, "sum", "where the sum goes");
  const std::int64_t rows = rows_of(logits);
  double* losses = nullptr;
  if (const std::size_t bytes = softmax_cross_entropy_workspace(rows); bytes > 0) {
    losses = reinterpret_cast<double*>(ctx.workspace(bytes));
  }
  if (rows > 0) {
    run({__func__, 0, updated_if(gradient, logits)}, &OperatorTable::row_cross_entropy, ctx, logits,
        targets, scale, gradient, losses);
  }
  run({__func__}, &OperatorTable::sum_of_losses, ctx, losses, rows, sum);
}

void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses) {
  rows_with_targets(__func__, logits, targets);
  if (rows_of(logits) == 0) return;
  if (losses == nullptr) refuse_pointer(__func__, "losses", "a number per row");
  run({__func__, 0, updated_if(gradient, logits)}, &OperatorTable::row_cross_entropy, ctx, logits,
      targets, scale, gradient, losses);
}

void sum_of_losses(ComputeContext& ctx, const double* losses, std::int64_t rows, double* sum) {
  if (sum == nullptr) refuse_pointer(__func__, "sum", "where the sum goes");
  if (rows < 0 || rows > kMostElements || (losses == nullptr && rows > 0)) {
    refuse(__func__, fmt::format("{} losses{}; legal: 0 to 2^60, with data if any", rows,
                                 losses == nullptr ? " without data" : ""));
  }
  run({__func__}, &OperatorTable::sum_of_losses, ctx, losses, rows, sum);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  fits(__func__, {"outputs", outputs}, in_rows(kF32, kAny, kAny), {{"targets", targets}});
  fits(__func__, {"targets", targets}, {kF32, outputs.elements(), 1, Legal::Form::kCount},
       {{"outputs", outputs}});
  if (sum == nullptr) refuse_pointer(__func__, "sum", "where the sum goes");
  run({__func__, 0, updated_if(gradient, outputs)}, &OperatorTable::mean_squared_error, ctx,
      outputs, targets, scale, gradient, sum);
}

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  update_runs(__func__, runs, true, true);
  if (step.moments != DType::kF32 && step.moments != DType::kBf16) {
    refuse(__func__, fmt::format("moments are {}; legal: f32, bf16", name_of(step.moments)));
  }
  run({__func__, 0, nullptr, ctx.profile() == nullptr ? 0 : update_bytes(runs, step.moments)},
      &OperatorTable::adamw, ctx, step, runs);
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  update_runs(__func__, runs, step.momentum != 0, false);
  run({__func__, 0, nullptr, ctx.profile() == nullptr ? 0 : update_bytes(runs, DType::kF32)},
      &OperatorTable::sgd, ctx, step, runs);
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  if (sums == nullptr && !vectors.empty()) {
    refuse_pointer(__func__, "sums", "a number per vector");
  }
  for (const std::span<const float>& vector : vectors) {
    const bool given = vector.data() != nullptr || vector.empty();
    if (given && vector.size() <= static_cast<std::size_t>(kMostElements)) [[likely]] {
      continue;
    }
    refuse(__func__,
           fmt::format("vector {} has {} elements{}; legal: 0 to 2^60, with data if any",
                       &vector - vectors.data(), vector.size(), given ? "" : " and no data"));
  }
  run({__func__}, &OperatorTable::sums_of_squares, ctx, vectors, sums);
}

std::size_t linear_forward_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return operators_of(ctx).linear_forward_workspace(ctx, shape);
}

std::size_t linear_backward_weight_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return operators_of(ctx).linear_backward_weight_workspace(ctx, shape);
}

std::size_t linear_activation_backward_input_workspace(ComputeContext& ctx, Activation activation,
                                                       const LinearShape& shape) {
  return operators_of(ctx).linear_activation_backward_input_workspace(ctx, activation, shape);
}

std::size_t embedding_backward_weight_workspace(ComputeContext& ctx, std::int64_t rows,
                                                std::int64_t vocabulary, std::int64_t width) {
  return operators_of(ctx).embedding_backward_weight_workspace(ctx, rows, vocabulary, width);
}

std::size_t norm_backward_workspace(ComputeContext& ctx, std::int64_t rows, std::int64_t width,
                                    int terms) {
  return operators_of(ctx).norm_backward_workspace(ctx, rows, width, terms);
}

std::size_t attention_forward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                        DType dtype, bool drops) {
  check_attention_shape(__func__, shape);
  return operators_of(ctx).attention_forward_workspace(ctx, shape, dtype, drops);
}

std::size_t attention_backward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                         DType dtype, bool drops) {
  check_attention_shape(__func__, shape);
  return operators_of(ctx).attention_backward_workspace(ctx, shape, dtype, drops);
}

std::size_t query_key_norm_backward_workspace(ComputeContext& ctx, const AttentionShape& shape) {
  check_attention_shape(__func__, shape);
  return operators_of(ctx).query_key_norm_backward_workspace(ctx, shape);
}

std::size_t softmax_cross_entropy_workspace(std::int64_t rows) { return row_sum_bytes(rows); }

std::size_t mean_squared_error_workspace(std::int64_t elements) {
  return block_sum_bytes(elements);
}

std::size_t sum_of_squares_workspace(std::int64_t elements) { return block_sum_bytes(elements); }

}  // namespace sluice
