// Every operator checks its operands once, then calls the backend of the context's device.
//
// Each says in a text what its operands are, in the order of its parameters: "bias?:f(out)". Rule
// explains it. check() returns, or throws Error(kUsage) whose one line names the operator, the
// operand that does not fit, those that it has to fit, with type and shape, and what would be
// legal. An operand with elements has data. Contents, alignment and the size of memory behind a
// pointer are not checked. A check that returns allocates nothing and formats nothing.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/backend.hpp"
#include "stages/compute/call_arguments.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/compute/matmul_spec.hpp"
#include "stages/compute/operator_profile.hpp"
#include "stages/compute/operator_table.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/operators/context.hpp"

namespace sluice {

namespace {

// Sets of types, one bit each.
using Types = unsigned;
constexpr Types only(DType dtype) { return 1U << static_cast<unsigned>(dtype); }
constexpr Types kF32 = only(DType::kF32), kBf16 = only(DType::kBf16);
// The type of the first operand, of the one before, and of the last one on a GPU.
constexpr Types kFirst = 1U << kDTypes, kBefore = kFirst << 1U, kLastOnGpu = kFirst << 2U;

// A dimension by a letter: a small one is the size of the first operand with it, others are those
// of size_of(). `from`: that operand; none where it is the operand itself.
struct Dim {
  char name = '1';
  std::size_t from = 0;
  bool width = false;  // the operand's width, not its rows
};
// "r", or a matmul: "sq", "2w".
struct Size {
  Dim one, by;
};
constexpr std::int64_t kAny = -1;

// What an operand may be. As text: name, what else is said, colon, types, sizes.
struct Rule {
  enum class Form {
    kRows,    // "[r,w]": rows, which may be several dimensions, and width
    kVector,  // "(w)"
    kMatrix,  // "(r,w)"
    kTable,   // "(>r,w)": at least r rows
    kCount,   // "#(r,w)": r * w elements in any shape
  };
  std::string_view name;
  // "?": it may have no data. "!": not the memory of the operand before. "=": the memory of the
  // first operand only where the types are equal.
  char flag = ' ';
  // "f", "b", "i": f32, bf16, i32; "F": f32 and bf16; "1", "<", "$": kFirst, kBefore, kLastOnGpu.
  Types types = 0;
  Form form = Form::kRows;
  Size rows = {}, width = {};
};

constexpr Size size_in(std::string_view text) {
  return {{text[0]}, {text.size() == 2 ? text[1] : '1'}};
}

constexpr Rule rule_in(std::string_view text) {
  const auto colon = text.find(':'), open = text.find_first_of("[#(", colon);
  const std::string_view letters = "fbiF1<$";
  constexpr Types kMeant[] = {kF32,   kBf16,   only(DType::kI32), kF32 | kBf16,
                              kFirst, kBefore, kLastOnGpu};
  Rule rule{text.substr(0, colon)};
  if (std::string_view("?!=").find(rule.name.back()) != std::string_view::npos) {
    rule.flag = rule.name.back();
    rule.name.remove_suffix(1);
  }
  for (const char letter : text.substr(colon + 1, open - colon - 1)) {
    rule.types |= kMeant[letters.find(letter)];
  }
  std::string_view sizes = text.substr(open, text.size() - open - 1);
  const auto comma = sizes.find(',');
  rule.form = sizes[0] == '['                   ? Rule::Form::kRows
              : sizes[0] == '#'                 ? Rule::Form::kCount
              : sizes[1] == '>'                 ? Rule::Form::kTable
              : comma == std::string_view::npos ? Rule::Form::kVector
                                                : Rule::Form::kMatrix;
  sizes.remove_prefix(rule.form == Rule::Form::kCount || rule.form == Rule::Form::kTable ? 2 : 1);
  if (rule.form != Rule::Form::kVector) {
    rule.rows = size_in(sizes.substr(0, sizes.find(',')));
    sizes.remove_prefix(sizes.find(',') + 1);
  }
  rule.width = size_in(sizes);
  return rule;
}

constexpr void find(std::span<const Rule> rules, std::size_t index, Dim& dim) {
  dim.from = index;
  for (std::size_t i = index; i-- > 0 && dim.name >= 'a';) {
    const Rule& rule = rules[i];
    if (rule.flag == '?' || rule.form == Rule::Form::kCount) continue;
    const bool rows = rule.rows.one.name == dim.name && rule.rows.by.name == '1';
    const bool width = rule.width.one.name == dim.name && rule.width.by.name == '1';
    if (rows || width) dim = {dim.name, i, !rows};
  }
}

// Rules with a space between them, as a template's argument.
template <std::size_t kSize>
struct Text {
  // NOLINTNEXTLINE(google-explicit-constructor): a literal is a template's argument.
  consteval Text(const char (&from)[kSize]) { std::copy_n(from, kSize, text); }
  char text[kSize] = {};
};
template <Text kText>
constexpr auto kRules = [] {
  constexpr std::string_view kAll(kText.text);
  std::array<Rule, std::count(kAll.begin(), kAll.end(), ' ') + 1> rules;
  std::size_t begin = 0;
  for (Rule& rule : rules) {
    const std::size_t end = std::min(kAll.find(' ', begin), kAll.size());
    rule = rule_in(kAll.substr(begin, end - begin));
    begin = end + 1;
    const auto index = static_cast<std::size_t>(&rule - rules.data());
    for (Dim* dim : {&rule.rows.one, &rule.rows.by, &rule.width.one, &rule.width.by}) {
      find(rules, index, *dim);
    }
  }
  return rules;
}();

// What a call says besides its tensors.
struct Given {
  int number = 1;
  const AttentionShape* shape = nullptr;
  const Tensor* last = nullptr;  // of the operands
  bool on_gpu = false;
};

// In the order of the rules.
using Operands = std::array<const Tensor*, 8>;

std::int64_t width_of(const Tensor& tensor) {
  const Shape& shape = tensor.shape();
  return shape.rank() == 0 ? 1 : shape[shape.rank() - 1];
}

[[gnu::always_inline]] inline std::int64_t size_of(const Dim& dim, std::size_t index,
                                                   const Operands& operands, const Given& given) {
  switch (dim.name) {
    case '1':
    case '2':
      return dim.name - '0';
    case 'N':
      return given.number;
    case 'R':
      return given.shape->rows();
    case 'P':
      return given.shape->packed_width();
    case 'H':
      return given.shape->heads;
    case 'K':
      return std::int64_t{given.shape->heads} + given.shape->kv_heads;
    case 'D':
      return given.shape->head_dim;
    default:
      if (dim.from == index) return kAny;
      return dim.width ? width_of(*operands[dim.from]) : leading_rows(*operands[dim.from]);
  }
}

[[gnu::always_inline]] inline std::int64_t legal_size(const Size& size, std::size_t index,
                                                      const Operands& operands,
                                                      const Given& given) {
  const std::int64_t one = size_of(size.one, index, operands, given);
  const std::int64_t by = size_of(size.by, index, operands, given);
  return one == kAny || by == kAny ? kAny : one * by;
}

[[gnu::always_inline]] inline Types types_of(const Rule& rule, std::size_t index,
                                             const Operands& operands, const Given& given) {
  Types types = rule.types;
  if ((types & kFirst) != 0) types |= only(operands[0]->spec.dtype);
  if ((types & kBefore) != 0) types |= only(operands[index - 1]->spec.dtype);
  if ((types & kLastOnGpu) != 0 && given.on_gpu) types |= only(given.last->spec.dtype);
  return types & (kFirst - 1);
}

bool is(std::int64_t size, std::int64_t wanted) { return wanted == kAny || size == wanted; }

[[gnu::always_inline]] inline bool has_shape(const Tensor& tensor, Rule::Form form,
                                             std::int64_t rows, std::int64_t width) {
  const Shape& shape = tensor.shape();
  switch (form) {
    case Rule::Form::kRows:
      return is(leading_rows(tensor), rows) && is(width_of(tensor), width);
    case Rule::Form::kVector:
      return shape.rank() == 1 && is(shape[0], width);
    case Rule::Form::kMatrix:
      return shape.rank() == 2 && is(shape[0], rows) && is(shape[1], width);
    case Rule::Form::kTable:
      return shape.rank() == 2 && shape[0] >= rows && is(shape[1], width);
    case Rule::Form::kCount:
      return tensor.elements() == rows * width;
  }
  return false;
}

std::string to_text(std::string_view name, const Tensor& tensor) {
  return fmt::format("{} {}", name, to_string(tensor.spec));
}

std::string to_text(const AttentionShape& shape) {
  return fmt::format("shape of {} samples, {} positions, {} heads over {} of {} each{}{}",
                     shape.samples, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim,
                     shape.window == 0 ? "" : fmt::format(", a window of {}", shape.window),
                     shape.first_head == 0 ? ""
                                           : fmt::format(", from head {} of {} on",
                                                         shape.first_head, shape.all_heads));
}

std::string legal_text(Rule::Form form, Types types, std::int64_t rows, std::int64_t width) {
  std::string names;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kI32}) {
    if ((types & only(dtype)) == 0) continue;
    names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  const auto size = [](std::int64_t dim) { return dim == kAny ? "any" : std::to_string(dim); };
  switch (form) {
    case Rule::Form::kVector:
      return fmt::format("{} [{}]", names, size(width));
    case Rule::Form::kTable:
      return fmt::format("{} [at least {}, {}]", names, rows, size(width));
    case Rule::Form::kCount:
      return fmt::format("{} of any shape with {} elements", names, rows * width);
    default:
      return fmt::format("{} [{}, {}]", names, size(rows), size(width));
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const std::string& what) {
  throw_usage("{}: {}", name, what);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, std::span<const Rule> rules,
                                                   std::size_t index, Operands operands,
                                                   Given given) {
  const Rule& rule = rules[index];
  std::array<bool, std::tuple_size_v<Operands>> matters{};  // what the legal follows from
  matters[0] = (rule.types & kFirst) != 0;
  if ((rule.types & kBefore) != 0) matters[index - 1] = true;
  for (const Dim& dim : {rule.rows.one, rule.rows.by, rule.width.one, rule.width.by}) {
    matters[dim.from] = true;
  }
  std::string with;
  const auto mention = [&](const std::string& text) {
    with += (with.empty() ? " with " : " and ") + text;
  };
  for (std::size_t i = 0; i < index; ++i) {
    if (matters[i]) mention(to_text(rules[i].name, *operands[i]));
  }
  if (given.shape != nullptr) mention(to_text(*given.shape));
  const Tensor& operand = *operands[index];
  const bool no_data = operand.data == nullptr;
  const std::string legal = legal_text(rule.form, types_of(rule, index, operands, given),
                                       legal_size(rule.rows, index, operands, given),
                                       legal_size(rule.width, index, operands, given));
  refuse(name,
         fmt::format("{} is {}{}; legal{}: {}{}", rule.name, to_string(operand.spec),
                     no_data ? " without data" : "", with, legal, no_data ? " with data" : ""));
}

template <const auto& kAll, std::size_t kIndex>
[[gnu::always_inline]] inline void fits(const char* name, const Operands& operands,
                                        const Given& given) {
  constexpr Rule kRule = kAll[kIndex];
  const Tensor& operand = *operands[kIndex];
  if (kRule.flag == '?' && operand.data == nullptr) return;
  const std::int64_t rows = legal_size(kRule.rows, kIndex, operands, given);
  const std::int64_t width = legal_size(kRule.width, kIndex, operands, given);
  const bool right = (types_of(kRule, kIndex, operands, given) & only(operand.spec.dtype)) != 0 &&
                     has_shape(operand, kRule.form, rows, width) &&
                     (operand.data != nullptr || operand.elements() == 0);
  if (!right) [[unlikely]] {
    refuse(name, kAll, kIndex, operands, given);
  }
  if constexpr (kRule.flag == '!' || kRule.flag == '=') {
    constexpr std::size_t kOther = kRule.flag == '!' ? kIndex - 1 : 0;
    const Tensor& other = *operands[kOther];
    const bool legal = kRule.flag == '=' && operand.spec.dtype == other.spec.dtype;
    if (!legal && operand.data == other.data && operand.elements() > 0) [[unlikely]] {
      refuse(name, fmt::format("{} and {} share memory; legal: {}{} in memory of its own",
                               to_text(kAll[kOther].name, other), to_text(kRule.name, operand),
                               kRule.flag == '=' ? "equal types, or " : "", kRule.name));
    }
  }
}

// `operands`: in the order of the rules. Unrolled: a check is a few comparisons.
template <Text kText>
[[gnu::always_inline]] inline void check(const char* name, const Operands& operands, Given given) {
  given.last = operands[kRules<kText>.size() - 1];
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    (fits<kRules<kText>, kIndex>(name, operands, given), ...);
  }
  (std::make_index_sequence<kRules<kText>.size()>());
}

void require_given(const char* name, const void* pointer, const char* what, const char* legal) {
  if (pointer == nullptr) [[unlikely]] {
    refuse(name, fmt::format("{} is null; legal: {}", what, legal));
  }
}

int parts_of(Activation activation) { return activation == Activation::kSwiglu ? 2 : 1; }

// first, second: whether the update needs that state.
void require_runs(const char* name, std::span<const UpdateRun> runs, bool first, bool second) {
  for (const UpdateRun& run : runs) {
    const bool given =
        run.count == 0 || (run.value != nullptr && run.grad != nullptr &&
                           (!first || run.first != nullptr) && (!second || run.second != nullptr));
    if (given) [[likely]] {
      continue;
    }
    refuse(name, fmt::format("run {} has a null pointer; legal: memory for value, grad{}{}",
                             &run - runs.data(), first ? ", first" : "", second ? ", second" : ""));
  }
}

// `terms`: 2 for LayerNorm, 1 for RMSNorm, of statistics and weights.
void check_norm_backward(const char* name, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                         const Tensor& stats, int terms, const NormGradients& gradients) {
  const auto& [dx, residual, rounded, dgamma, dbeta, write] = gradients;
  check<
      "x:F[r,w] dy:1b[r,w] gamma:f(w) stats:f[r,N] dx?:1[r,w] residual?:1[r,w] rounded?:b[r,w] "
      "dgamma?:f(w)">(name, {&x, &dy, &gamma, &stats, &dx, &residual, &rounded, &dgamma},
                      {.number = terms});
  if (rounded.data != nullptr) check<"rounded:b[r,w] dx:f[r,w]">(name, {&rounded, &dx}, {});
  if (dbeta.data != nullptr && terms == 1) {
    refuse(name, to_text("dbeta", dbeta) + "; legal: no data, for RMSNorm has no beta");
  }
  if (terms == 2 && (dgamma.data != nullptr || dbeta.data != nullptr)) {
    check<"gamma:f(w) dgamma:f(w) dbeta:f(w)">(name, {&gamma, &dgamma, &dbeta}, {});
  }
}

void check_panels(const char* name, const LogitPanels& panels, const Tensor& targets) {
  check<"logits:F[r,N] targets:i#(r,1)">(name, {&panels.logits, &targets},
                                         {.number = static_cast<int>(panels.classes())});
}

// Checks only the shape: heads share keys evenly.
void check_attention_shape(const char* name, const AttentionShape& shape) {
  const bool right = shape.samples >= 0 && shape.sequence >= 0 && shape.kv_heads >= 1 &&
                     shape.head_dim >= 1 && shape.heads >= 1 && shape.heads % shape.kv_heads == 0 &&
                     shape.window >= 0 && shape.first_head >= 0 &&
                     (shape.all_heads == 0 ? shape.first_head == 0
                                           : shape.first_head <= shape.all_heads - shape.heads);
  if (right) [[likely]] {
    return;
  }
  refuse(name, to_text(shape) +
                   "; legal: heads that are a multiple of those they are over, at least 1 each, "
                   "a window of 0 (none) or more, and a first head whose heads are among all");
}

bool is_profiled(const ComputeContext& ctx) { return ContextAccess::profile(ctx) != nullptr; }

const OperatorTable& operators_of(const ComputeContext& ctx) {
  ctx.progress();
  return ContextAccess::backend(ctx).operators();
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
double matmul_flops(const Tensor& x, const Tensor& weight) {
  return 2.0 * static_cast<double>(leading_rows(x)) * static_cast<double>(weight.elements());
}

// Of so many matmuls over the pairs of a query and a key that it sees.
double attention_flops(const AttentionShape& shape, int matmuls) {
  const auto seen = static_cast<double>(shape.seen()), rows = static_cast<double>(shape.rows());
  const double pairs = rows * (seen - seen * seen / (2 * static_cast<double>(shape.sequence)));
  return 2.0 * matmuls * pairs * shape.heads * shape.head_dim;
}

// Checks the tensors among `arguments` by the rules, in their order, and what else they have; then
// calls the backend.
template <Text kText = "", typename Function, typename... Arguments>
void run(const Work& work, Function OperatorTable::*entry, ComputeContext& ctx,
         const Arguments&... arguments) {
  if constexpr (sizeof(kText.text) > 1) {
    Operands operands;
    std::size_t count = 0;
    Given given{.on_gpu = ctx.device().kind != DeviceKind::kCpu};
    const auto take = [&](const auto& argument) {
      using Type = std::decay_t<decltype(argument)>;
      if constexpr (std::is_same_v<Type, Tensor>) operands[count++] = &argument;
      if constexpr (std::is_same_v<Type, Activation>) given.number = parts_of(argument);
      if constexpr (std::is_same_v<Type, AttentionShape>) {
        check_attention_shape(work.name, argument);
        given.shape = &argument;
      }
      if constexpr (std::is_convertible_v<Type, const std::byte*>) {
        if (given.shape->rows() == 0) return;
        require_given(work.name, argument, "state", "memory of attention_state_bytes()");
      }
    };
    (take(arguments), ...);
    check<kText>(work.name, operands, given);
  }
  const ThreadTeam team(ctx);
  const Function call = operators_of(ctx).*entry;
  OperatorProfile* const profile = ContextAccess::profile(ctx);
  if (profile == nullptr) return call(ctx, arguments...);
  profile->begin();
  call(ctx, arguments...);
  const double more = work.bytes + (work.updated != nullptr ? operand_bytes(*work.updated) : 0);
  profile->end(work.name, (more + ... + operand_bytes(arguments)), work.flops);
}

}  // namespace

void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y) {
  run<"x:F[r,i] weight:1(o,i) bias?:f$(o) y:1f[r,o]">(
      {__func__, matmul_flops(x, weight)}, &OperatorTable::linear_forward, ctx, x, weight, bias, y);
}

void linear_residual_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& residual, const Tensor& y) {
  run<"x:F[r,i] weight:1(o,i) bias?:f$(o) residual:1f[r,o] y!:<[r,o]">(
      {__func__, matmul_flops(x, weight)}, &OperatorTable::linear_residual_forward, ctx, x, weight,
      bias, residual, y);
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  run<"dy:F[r,o] weight:1(o,i) dx:1[r,i]">({__func__, matmul_flops(dy, weight)},
                                           &OperatorTable::linear_backward_input, ctx, dy, weight,
                                           dx);
}

void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias, Write write) {
  run<"x:F[r,i] dy:1[r,o] dweight:f(o,i) dbias?:f(o)">(
      {__func__, matmul_flops(x, dweight), updated_if(write == Write::kAdd, dweight)},
      &OperatorTable::linear_backward_weight, ctx, x, dy, dweight, dbias, write);
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  check<"x:F[r,i] y:1[r,h] weight:1(hN,i) bias?:f$(hN) raised:1[r,hN]">(
      __func__, {&x, &y, &weight, &bias, &raised},
      {.number = parts_of(activation), .on_gpu = ctx.device().kind != DeviceKind::kCpu});
  run({__func__, matmul_flops(x, weight)}, &OperatorTable::linear_activation_forward, ctx,
      activation, x, weight, bias, raised, y);
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  run<"dy:F[r,o] weight:1(o,i) raised:1[r,iN] draised:1[r,iN]">(
      {__func__, matmul_flops(dy, weight)}, &OperatorTable::linear_activation_backward_input, ctx,
      activation, dy, weight, raised, draised);
}

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  const double bytes = is_profiled(ctx) ? named_rows(tokens, table, 1) : 0;
  run<"tokens:i(s,q) table:f(v,w) positions?:f(>q,w) out:F[sq,w]">(
      {__func__, 0, nullptr, bytes}, &OperatorTable::embedding_forward, ctx, tokens, table,
      positions, out);
}

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions, Write write) {
  // What is overwritten is so in all rows.
  const bool some = is_profiled(ctx) && write == Write::kAdd;
  run<"tokens:i(s,q) dout:F[sq,w] dtable:f(v,w) dpositions?:f(>q,w)">(
      {__func__, 0, nullptr, some ? named_rows(tokens, dtable, 2) : 0},
      &OperatorTable::embedding_backward_weight, ctx, tokens, dout, dtable, dpositions, write);
}

void embedding_part_forward(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                            const Tensor& table, const Tensor& values) {
  const double bytes = is_profiled(ctx) ? named_rows(tokens, table, 1) : 0;
  run<"tokens:i(s,q) table:f(v,w) values:f[sq,w]">({__func__, 0, nullptr, bytes},
                                                   &OperatorTable::embedding_part_forward, ctx,
                                                   tokens, first, table, values);
}

void embedding_part_backward_weight(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                                    const Tensor& dout, const Tensor& dtable,
                                    const Tensor& dpositions, Write write) {
  const bool some = is_profiled(ctx) && write == Write::kAdd;
  run<"tokens:i(s,q) dout:F[sq,w] dtable:f(v,w) dpositions?:f(>q,w)">(
      {__func__, 0, nullptr, some ? named_rows(tokens, dtable, 2) : 0},
      &OperatorTable::embedding_part_backward_weight, ctx, tokens, first, dout, dtable, dpositions,
      write);
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  run<"x:F[r,w] gamma:f(w) beta:f(w) y:1b[r,w] stats:f[r,2]">(
      {__func__}, &OperatorTable::layer_norm_forward, ctx, x, gamma, beta, epsilon, y, stats);
}

void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  check_norm_backward(__func__, dy, x, gamma, stats, 2, gradients);
  run({__func__}, &OperatorTable::layer_norm_backward, ctx, dy, x, gamma, stats, gradients);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats) {
  run<"x:F[r,w] gamma:f(w) y:1b[r,w] stats:f[r,1]">({__func__}, &OperatorTable::rms_norm_forward,
                                                    ctx, x, gamma, epsilon, y, stats);
}

void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients) {
  check_norm_backward(__func__, dy, x, gamma, stats, 1, gradients);
  run({__func__}, &OperatorTable::rms_norm_backward, ctx, dy, x, gamma, stats, gradients);
}

std::size_t attention_state_bytes(DeviceKind device, const AttentionShape& shape, DType dtype) {
  check_attention_shape(__func__, shape);
  return operators_for(device).attention_state_bytes(device, shape, dtype);
}

std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape, DType dtype,
                             bool drops) {
  check_attention_shape(__func__, shape);
  return operators_of(ctx).attention_engine(ctx, shape, dtype, drops);
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  run<"qkv:F[R,P] out:1[R,HD]">({__func__, attention_flops(shape, 2)},
                                &OperatorTable::attention_forward, ctx, shape, qkv, dropout, out,
                                state);
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  run<"qkv:F[R,P] out:1[R,HD] dout:1[R,HD] dqkv:1[R,P]">(
      {__func__, attention_flops(shape, 5)}, &OperatorTable::attention_backward, ctx, shape, qkv,
      out, dout, dropout, state, dqkv);
}

void rotary(ComputeContext& ctx, const AttentionShape& shape, const RotaryPositions& positions,
            const Tensor& qkv, bool backward) {
  run<"qkv:F[R,P]">({__func__, 0, nullptr, queries_and_keys(shape, qkv)}, &OperatorTable::rotary,
                    ctx, shape, positions, qkv, backward);
}

void query_key_norm_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Tensor& query_gain, const Tensor& key_gain, float epsilon,
                            const Tensor& raw, const Tensor& stats) {
  run<"qkv:F[R,P] query_gain:f(D) key_gain:f(D) raw:1[R,KD] stats:f[R,K]">(
      {__func__, 0, nullptr, queries_and_keys(shape, qkv)}, &OperatorTable::query_key_norm_forward,
      ctx, shape, qkv, query_gain, key_gain, epsilon, raw, stats);
}

void query_key_norm_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                             const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats,
                             const Tensor& dqkv, const Tensor& dgains) {
  run<"raw:F[R,KD] query_gain:f(D) key_gain:f(D) stats:f[R,K] dqkv:1[R,P] dgains:f(2,D)">(
      {__func__, 0, nullptr, queries_and_keys(shape, dqkv)},
      &OperatorTable::query_key_norm_backward, ctx, shape, raw, query_gain, key_gain, stats, dqkv,
      dgains);
}

void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y) {
  run<"x:F[r,w] y:1[r,w]">({__func__}, &OperatorTable::pointwise_forward, ctx, function, x, y);
}

void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx) {
  run<"x:F[r,w] dy:1[r,w] dx:1[r,w]">({__func__}, &OperatorTable::pointwise_backward, ctx, function,
                                      x, dy, dx);
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  check<"y:F[r,w] gate_up:1[r,2w]">(__func__, {&y, &gate_up}, {});
  run({__func__}, &OperatorTable::swiglu_forward, ctx, gate_up, y);
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  check<"dy:F[r,w] gate_up:1[r,2w] dgate_up:1[r,2w]">(__func__, {&dy, &gate_up, &dgate_up}, {});
  run({__func__}, &OperatorTable::swiglu_backward, ctx, gate_up, dy, dgate_up);
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  run<"x:F[r,w] y=:1b[r,w]">({__func__}, &OperatorTable::dropout, ctx, x, dropout, y);
}

void dropout_residual(ComputeContext& ctx, const Tensor& x, const Dropout& dropout,
                      const Tensor& residual, const Tensor& y) {
  run<"x:F[r,w] residual:1f[r,w] y=:<[r,w]">({__func__}, &OperatorTable::dropout_residual, ctx, x,
                                             dropout, residual, y);
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  run<"x:F[r,w] y:1f[r,w]">({__func__, 0, &y}, &OperatorTable::add, ctx, x, y);
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  run<"from:F[r,w] to:F[r,w]">({__func__}, &OperatorTable::convert, ctx, from, to);
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  for (const auto& [from, to] : conversions)
    check<"from:f[r,w] to:b[r,w]">(__func__, {&from, &to}, {});
  run({__func__}, &OperatorTable::convert_all, ctx, conversions);
}

void softmax_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                           StepValue<double> scale, bool gradient, double* sum) {
  check<"logits:F[r,w] targets:i#(r,1)">(__func__, {&logits, &targets}, {});
  require_given(__func__, sum, "sum", "where the sum goes");
  const std::int64_t rows = leading_rows(logits);
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

void sum_of_shards(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                   std::span<const std::int64_t> sizes, bool backward, const Tensor& bias,
                   const Tensor& residual, const Tensor& y) {
  check<"y:F[r,w] bias?:f(w) residual?:1[r,w]">(__func__, {&y, &bias, &residual}, {});
  const std::int64_t size = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (x.elements() != leading_rows(y) * size || weight.elements() != width_of(y) * size ||
      !is_float(x.spec.dtype) || x.spec.dtype != weight.spec.dtype ||
      (x.elements() > 0 && x.data == nullptr) ||
      (weight.elements() > 0 && weight.data == nullptr)) {
    refuse(__func__,
           fmt::format("{} and {} with {}; legal: {} columns in all, of one type, with data",
                       to_text("x", x), to_text("weight", weight), to_text("y", y), size));
  }
  run({__func__, matmul_flops(y, weight)}, &OperatorTable::sum_of_shards, ctx, x, weight, sizes,
      backward, bias, residual, y);
}

void finish_sum(ComputeContext& ctx, const Tensor& sum, const Tensor& bias, const Tensor& residual,
                const Tensor& y) {
  check<"sum:f(r,w) bias?:f(w) y:F[r,w] residual?:<[r,w]">(__func__, {&sum, &bias, &y, &residual},
                                                           {});
  run({__func__}, &OperatorTable::finish_sum, ctx, sum, bias, residual, y);
}

void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses) {
  check<"logits:F[r,w] targets:i#(r,1)">(__func__, {&logits, &targets}, {});
  if (leading_rows(logits) == 0) return;
  require_given(__func__, losses, "losses", "a number per row");
  run({__func__, 0, updated_if(gradient, logits)}, &OperatorTable::row_cross_entropy, ctx, logits,
      targets, scale, gradient, losses);
}

void panel_maxima(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  float* maxima) {
  check_panels(__func__, panels, targets);
  require_given(__func__, maxima, "maxima", "a number per row");
  run({__func__}, &OperatorTable::panel_maxima, ctx, panels, targets, maxima);
}

void panel_sums(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                bool gradient, float* maxima, float* sums, float* found) {
  check_panels(__func__, panels, targets);
  for (const float* memory : {maxima, sums, found}) {
    require_given(__func__, memory, "maxima, sums or found", "numbers per row");
  }
  run({__func__}, &OperatorTable::panel_sums, ctx, panels, targets, gradient, maxima, sums, found);
}

void panel_losses(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  StepValue<double> scale, bool gradient, const float* shifts, float* found,
                  double* losses) {
  check_panels(__func__, panels, targets);
  for (const void* memory : {static_cast<const void*>(shifts), static_cast<const void*>(found),
                             static_cast<const void*>(losses)}) {
    require_given(__func__, memory, "shifts, found or losses", "numbers per row");
  }
  run({__func__, 0, updated_if(gradient, panels.logits)}, &OperatorTable::panel_losses, ctx, panels,
      targets, scale, gradient, shifts, found, losses);
}

void sum_of_losses(ComputeContext& ctx, const double* losses, std::int64_t rows, double* sum) {
  require_given(__func__, sum, "sum", "where the sum goes");
  if (rows > 0) require_given(__func__, losses, "losses", "a number per row");
  run({__func__}, &OperatorTable::sum_of_losses, ctx, losses, rows, sum);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  check<"outputs:f[r,w] targets:f#(r,w)">(__func__, {&outputs, &targets}, {});
  require_given(__func__, sum, "sum", "where the sum goes");
  run({__func__, 0, updated_if(gradient, outputs)}, &OperatorTable::mean_squared_error, ctx,
      outputs, targets, scale, gradient, sum);
}

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  require_runs(__func__, runs, true, true);
  if (step.moments != DType::kF32 && step.moments != DType::kBf16) {
    refuse(__func__, fmt::format("moments are {}; legal: f32, bf16", name_of(step.moments)));
  }
  run({__func__, 0, nullptr, is_profiled(ctx) ? update_bytes(runs, step.moments) : 0},
      &OperatorTable::adamw, ctx, step, runs);
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  require_runs(__func__, runs, step.momentum != 0, false);
  run({__func__, 0, nullptr, is_profiled(ctx) ? update_bytes(runs, DType::kF32) : 0},
      &OperatorTable::sgd, ctx, step, runs);
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (const std::span<const float> vector : vectors) {
    if (vector.empty()) continue;
    require_given(__func__, vector.data(), "a vector", "memory for its numbers");
    require_given(__func__, sums, "sums", "a number per block");
  }
  run({__func__}, &OperatorTable::sums_of_squares, ctx, vectors, sums);
}

std::size_t linear_forward_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return operators_of(ctx).linear_forward_workspace(ctx, shape);
}

std::size_t sum_of_shards_workspace(ComputeContext& ctx, std::int64_t rows, std::int64_t width,
                                    std::size_t shards, DType operands, DType result) {
  return operators_of(ctx).sum_of_shards_workspace(ctx, rows, width, shards, operands, result);
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

}  // namespace sluice
