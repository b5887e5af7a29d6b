// Layers with parameters over the last dimension: linear, layer_norm, rms_norm, embedding.
#include <algorithm>
#include <cmath>
#include <optional>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/compute/internal_operators.hpp"
#include "stages/network/parts.hpp"
#include "stages/network/specs.hpp"
#include "stages/network/vocabulary.hpp"

namespace sluice::nn {
namespace {

BlockShape shape_of(const LayerCall& call) {
  return block_shape(call.x.spec, call.compute().device().kind);
}

class LinearLayer final : public OwnLayer<kOnGpus> {
 public:
  LinearLayer(std::int64_t in, std::int64_t out, const LinearOptions& options)
      : options_{.in = in, .out = out, .bias = options.bias, .split = options.split} {
    require_positive(in, "in");
    require_positive(out, "out");
    options_.weight = options_.bias_init = Init::uniform(1 / std::sqrt(static_cast<double>(in)));
  }

  Edges set_precision(const Precision& precision) override {
    options_.precision = precision.operands;
    options_.rounds_bias = precision.stream != DType::kF32;
    stream_ = precision.stream;
    return Edges::kOperands;
  }
  bool set_shards(const Shards& shards) override {
    if (options_.split == Split::kNone) return true;
    const bool by_rows = options_.split == Split::kRows;
    options_.shards = shards;
    options_.ranges = unit_ranges(shards, by_rows ? options_.in : options_.out, kColumnUnit);
    (by_rows ? in_ : out_) = 0;
    for (const auto& ranges : options_.ranges) (by_rows ? in_ : out_) += ranges[0].length;
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, in_, options_.precision);
    return {stream_, with_width(input, out_).shape};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    linear_.emplace(name, options_, set);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const StreamShape shape = shape_of(input, compute);
    LayerAllocators memory;
    (void)allocate(shape, memory);
    LayerNeeds needs{.memory = memory.used(),
                     .operator_bytes = linear_->workspace(compute, shape.whole.rows(), stream_)};
    auto& sums = by_rows() ? needs.collectives.forward : needs.collectives.backward_input;
    sums = linear_->sums_over_ranks(shape);
    return needs;
  }
  [[nodiscard]] LayerPromises promises() const override {
    LayerPromises promises = kOnGpus.promises;
    promises.reads_rounded = options_.precision != stream_;
    return promises;
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return static_cast<double>(input.shape.elements()) * static_cast<double>(out_);
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const StreamShape shape = shape_of(call.x.spec, call.compute());
    linear_->forward(call.stage, shape, as_rows(call.x), as_rows(y), {}, kept_of(call, shape).sum);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const StreamShape shape = shape_of(call.x.spec, call.compute());
    const Kept kept = kept_of(call, shape);
    linear_->backward_input(call.stage, shape, as_rows(operand_gradient(call, dy)),
                            dx.data != nullptr ? as_rows(dx) : kept.dx, kept.sum);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    linear_->backward_weight(call.compute(), nn::shape_of(call), as_rows(call.x),
                             as_rows(operand_gradient(call, dy)));
  }

 private:
  struct Kept {
    Linear::ShardSum sum;  // scratch
    Tensor dx;             // where ranks add it up
  };
  [[nodiscard]] bool by_rows() const { return options_.split == Split::kRows; }
  [[nodiscard]] StreamShape shape_of(const TensorSpec& input, ComputeContext& compute) const {
    return {block_shape(input, compute.device().kind), options_.shards};
  }
  Kept allocate(const StreamShape& shape, LayerAllocators& memory) const {
    const bool by_rows = this->by_rows();
    Kept kept;
    kept.sum = linear_->shard_sum(memory.scratch, shape, by_rows ? stream_ : options_.precision);
    if (!by_rows && shape.ranks() > 1) {
      kept.dx = unneeded_gradient(memory, options_.precision, shape.whole.rows(), in_);
    }
    return kept;
  }
  Kept kept_of(const LayerCall& call, const StreamShape& shape) const {
    LayerAllocators memory(call);
    return allocate(shape, memory);
  }

  Linear::Options options_;
  std::int64_t in_ = options_.in, out_ = options_.out;  // of this rank
  DType stream_ = DType::kF32;
  std::optional<Linear> linear_;  // once there are parameters
};

class NormLayer final
    : public OwnLayer<LayerTraits{
          .promises = {.recomputes = true, .capturable = true, .writes_rounded = true}}> {
 public:
  NormLayer(Norm::Kind kind, std::int64_t width, double epsilon) : kind_(kind), width_(width) {
    require_positive(width, "width");
    require_epsilon(epsilon);
    epsilon_ = static_cast<float>(epsilon);
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, width_, input.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    norm_.emplace(kind_, name, width_, epsilon_, set);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const std::int64_t rows = rows_of(input);
    return {.memory = {.until_weight = norm_->stats({}, rows).spec.bytes()},
            .operator_bytes = norm_->workspace(compute, rows)};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    norm_->forward(call.compute(), call.x, y, stats_of(call));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    norm_->backward_input(call.compute(), dy, call.x, stats_of(call), {}, {dx, call.rounded_dx});
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    norm_->backward_weight(call.compute(), {shape_of(call), {}}, dy, call.x, stats_of(call));
  }
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    norm_->backward(call.compute(), {shape_of(call), {}}, dy, call.x, stats_of(call), {},
                    {dx, call.rounded_dx});
  }

 private:
  [[nodiscard]] Tensor stats_of(const LayerCall& call) const {
    return norm_->stats(call.until_weight, rows_of(call.x.spec));
  }

  Norm::Kind kind_;
  std::int64_t width_;
  float epsilon_ = 0;
  std::optional<Norm> norm_;  // once there are parameters
};

class EmbeddingLayer final : public OwnLayer<kOnGpus> {
 public:
  explicit EmbeddingLayer(const EmbeddingOptions& options)
      : options_(options), classes_(options.classes) {
    require_positive(options.classes, "classes");
    require_positive(options.width, "width");
    if (options.positions < 0) throw_usage("positions is {}; legal: at least 0", options.positions);
  }

  Edges set_precision(const Precision& precision) override {
    options_.stream = precision.stream;
    return Edges::kStream;
  }
  bool set_shards(const Shards& shards) override {
    classes_ = DividedClasses(options_.classes, shards);
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    const Shape& shape = input.shape;
    const std::int64_t most = options_.context > 0 ? options_.context : options_.positions;
    const bool right = input.dtype == DType::kI32 &&
                       (shape.rank() == 2 || (shape.rank() == 1 && most == 0)) &&
                       (most == 0 || shape[1] <= most) &&
                       (options_.context == 0 || (shape[0] >= 1 && shape[1] >= 1));
    if (!right && most == 0) {
      throw_usage("the input is {}; legal: i32 [samples] or [samples, n]", to_string(input));
    }
    if (!right && options_.context > 0) {
      throw_usage(
          "the input is {}; legal: i32 [samples, sequence] with at least 1 sample and 1 to {} "
          "positions",
          to_string(input), most);
    }
    if (!right) {
      throw_usage("the input is {}; legal with {} positions: i32 [samples, n] with n up to {}",
                  to_string(input), most, most);
    }
    if (shape.rank() == 1) return {options_.stream, {shape[0], options_.width}};
    if (options_.context == 0) return {options_.stream, {shape[0], shape[1], options_.width}};
    return dealt_stream({options_.stream, {shape[0], shape[1], options_.width}}, classes_.shards());
  }
  // Tied uses have one name, whatever groups they are in.
  void add_parameters(ParameterSet& set, const std::string& name) override {
    const Init init = Init::normal(options_.deviation);
    const std::string table = (options_.tied ? "" : name) + options_.table_name;
    const Shape shape{options_.classes, options_.width};
    table_ = classes_.divided()
                 ? &set.add_parts(table, shape, init, true, options_.tied, classes_.parts())
                 : &set.add(table, shape, init, true, options_.tied);
    if (options_.positions == 0) return;
    positions_ =
        &set.add(name + options_.positions_name, {options_.positions, options_.width}, init);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const StreamShape shape = shape_of(input, compute);
    LayerAllocators memory;
    (void)allocate(shape, memory);
    LayerNeeds needs{.memory = memory.used(),
                     .operator_bytes = embedding_backward_weight_workspace(
                         compute, input.shape.elements(), classes_.count(), options_.width)};
    if (classes_.ranks() == 1) return needs;
    const TensorSpec sum{DType::kF32, {shape.whole.rows(), options_.width}};
    needs.collectives.forward = {
        {.kind = shape.dealt ? CollectiveKind::kReduceScatter : CollectiveKind::kSum,
         .bytes = sum.bytes()}};
    needs.collectives.backward_input = gathers(shape, options_.stream, options_.width);
    return needs;
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return static_cast<double>(input.shape.elements() * options_.width);
  }
  void check_inputs(const Tensor& x) const override {
    const auto* const begin = x.as<const std::int32_t>();
    std::uint32_t most = 0;  // a negative one is the largest
    for (const auto* each = begin; each != begin + x.elements(); ++each) {
      most = std::max(most, static_cast<std::uint32_t>(*each));
    }
    if (most < options_.classes) return;
    throw_error(ErrorCode::kData, "token {} is outside the vocabulary; legal: 0 to {}",
                static_cast<std::int32_t>(most), options_.classes - 1);
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const Tensor rows = as_rows(y);
    if (classes_.divided()) {
      forward_parts(call, rows);
    } else {
      embedding_forward(call.compute(), tokens_of(call), table_->value,
                        positions_ != nullptr ? positions_->value : Tensor{}, rows);
    }
    for_dropped(call, [&](const Dropout& dropped, std::int64_t first, std::int64_t count) {
      dropout(call.compute(), rows_from(rows, first, count), dropped,
              rows_from(rows, first, count));
    });
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& /*dx*/) override {
    const StreamShape shape = shape_of(call.x.spec, call.compute());
    const Kept kept = kept_of(call, shape);
    Tensor mine = as_rows(dy);
    for_dropped(call, [&](const Dropout& dropped, std::int64_t first, std::int64_t count) {
      dropout(call.compute(), rows_from(as_rows(dy), first, count), dropped,
              rows_from(kept.dmine, first, count));
      mine = kept.dmine;
    });
    if (shape.dealt) gather_rows(call.stage, shape, mine, kept.dy);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    const Kept kept = kept_of(call, shape_of(call.x.spec, call.compute()));
    const Tensor from = kept.dy.data != nullptr ? kept.dy : as_rows(dy);
    const Tensor positions = positions_ != nullptr ? positions_->grad : Tensor{};
    const Write write = next_write({table_, positions_}, call.compute().stream());
    if (classes_.divided()) {
      return embedding_part_backward_weight(call.compute(), tokens_of(call), classes_.first(), from,
                                            table_->grad, positions, write);
    }
    embedding_backward_weight(call.compute(), tokens_of(call), from, table_->grad, positions,
                              write);
  }

 private:
  struct Kept {
    Tensor sums, mine;  // scratch, f32: of shards, where the output does not serve
    Tensor dy;          // gradients: of all rows, where dropped or gathered
    Tensor dmine;       // before it is gathered; dy where it is not
  };
  [[nodiscard]] StreamShape shape_of(const TensorSpec& input, ComputeContext& compute) const {
    return stream_shape(output(input), classes_.shards(), compute.device().kind);
  }
  Kept allocate(const StreamShape& shape, LayerAllocators& memory) const {
    const std::int64_t all = shape.whole.rows(), rows = shape.mine.rows(), width = options_.width;
    const bool rounds = options_.stream != DType::kF32, drops = options_.dropout.probability > 0;
    Kept kept;
    if (classes_.divided() && (rounds || shape.dealt)) {
      kept.sums = memory.scratch.tensor(DType::kF32, all, width);
      if (rounds && shape.dealt) kept.mine = memory.scratch.tensor(DType::kF32, rows, width);
    }
    if (drops || shape.dealt) kept.dy = memory.gradients.tensor(options_.stream, all, width);
    kept.dmine =
        drops && shape.dealt ? memory.scratch.tensor(options_.stream, rows, width) : kept.dy;
    return kept;
  }
  Kept kept_of(const LayerCall& call, const StreamShape& shape) const {
    LayerAllocators memory(call);
    return allocate(shape, memory);
  }
  // As the operator takes them: [samples, n].
  static Tensor tokens_of(const LayerCall& call) {
    const Shape& shape = call.x.shape();
    return {call.x.data, {DType::kI32, {shape[0], shape.rank() == 1 ? 1 : shape[1]}}};
  }
  // Sums over ranks are of one row and zeros: they have no order.
  void forward_parts(LayerCall& call, const Tensor& rows) {
    const StreamShape shape = shape_of(call.x.spec, call.compute());
    const Kept kept = kept_of(call, shape);
    const Tensor& sums = kept.sums.data != nullptr ? kept.sums : rows;
    embedding_part_forward(call.compute(), tokens_of(call), classes_.first(), table_->value, sums);
    const Tensor& mine = !shape.dealt ? sums : kept.mine.data != nullptr ? kept.mine : rows;
    if (classes_.ranks() > 1) sum_rows(call.stage, shape, sums, mine);
    const std::int64_t sequence = shape.mine.sequence;
    for (std::int64_t row = 0; positions_ != nullptr && row < rows.shape()[0]; row += sequence) {
      add(call.compute(), rows_from(positions_->value, shape.first_position(), sequence),
          rows_from(mine, row, sequence));
    }
    if (rows.spec.dtype != DType::kF32) convert(call.compute(), mine, rows);
  }
  template <typename Work>
  void for_dropped(const LayerCall& call, const Work& work) const {
    if (!options_.dropout.active(call)) return;
    options_.dropout.for_rows(call, shape_of(call.x.spec, call.compute()), options_.width, work);
  }

  EmbeddingOptions options_;
  DividedClasses classes_;
  Parameter *table_ = nullptr, *positions_ = nullptr;
};

LayerSpec norm(const char* name, Norm::Kind kind, std::int64_t width, double epsilon) {
  LayerSpec spec = layer<NormLayer>(name, kind, width, epsilon);
  spec.settings = settings_of(width, epsilon);
  return spec;
}

}  // namespace

LayerSpec linear(std::int64_t in, std::int64_t out, const LinearOptions& options) {
  LayerSpec spec = layer<LinearLayer>("linear", in, out, options);
  spec.settings = settings_of(in, out, options.bias);
  if (options.split == Split::kColumns) {
    spec.settings += ", columns";
    spec.forms.of_whole = ShardForms::kPanels;
  } else if (options.split == Split::kRows) {
    spec.settings += ", rows";
    spec.forms = {.of_whole = {}, .of_panels = ShardForms::kWhole};
  }
  return spec;
}

LayerSpec linear(std::int64_t in, std::int64_t out, bool bias) {
  return linear(in, out, LinearOptions{.bias = bias});
}

LayerSpec layer_norm(std::int64_t width, double epsilon) {
  return norm("layer_norm", Norm::Kind::kLayer, width, epsilon);
}

LayerSpec rms_norm(std::int64_t width, double epsilon) {
  return norm("rms_norm", Norm::Kind::kRms, width, epsilon);
}

LayerSpec embedding(std::int64_t classes, std::int64_t width, std::int64_t positions) {
  const EmbeddingOptions options{.classes = classes, .width = width, .positions = positions};
  return {"embedding",
          [options](int) { return make_embedding(options); },
          {},
          settings_of(classes, width, positions)};
}

std::unique_ptr<Layer> make_embedding(const EmbeddingOptions& options) {
  return std::make_unique<EmbeddingLayer>(options);
}

}  // namespace sluice::nn
