// attention(): self-attention as a layer of a Sequential.
#include <cmath>
#include <memory>
#include <optional>

#include "comm/base/throw_error.hpp"
#include "stages/layers/branches.hpp"
#include "stages/network/specs.hpp"

namespace sluice::nn {
namespace {

void require_legal(std::int64_t width, int heads, const AttentionOptions& options) {
  if (width < 1 || heads < 1 || width % heads != 0) {
    throw_usage("a width of {} in {} heads; legal: a multiple of the heads, from 1", width, heads);
  }
  const int kv_heads = options.kv_heads;
  if (kv_heads < 0 || (kv_heads > 0 && heads % kv_heads != 0)) {
    throw_usage("kv_heads is {}; legal with {} heads: 0 and their divisors", kv_heads, heads);
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw_usage("dropout is {}; legal: at least 0 and below 1", options.dropout);
  }
  if (!options.rotary_base) return;
  if (!std::isfinite(*options.rotary_base) || *options.rotary_base <= 1) {
    throw_usage("rotary_base is {}; legal: above 1", *options.rotary_base);
  }
  if (width / heads % 2 != 0) {
    throw_usage("heads of {} numbers with rotary positions; legal: an even number", width / heads);
  }
}

class AttentionSpecLayer final : public OwnLayer<kOnGpus> {
 public:
  AttentionSpecLayer(std::int64_t width, int heads, const AttentionOptions& options, int number)
      : width_(width), heads_(heads), options_(options), number_(number) {
    require_legal(width, heads, options);
  }

  Edges set_precision(const Precision& precision) override {
    precision_ = precision;
    return Edges::kOperands;
  }
  bool set_shards(const Shards& shards) override {
    shards_ = shards;
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_stream(input, precision_.operands, width_);
    return {precision_.stream, input.shape};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    std::optional<RotaryPositions> positions;
    if (options_.rotary_base) positions = {.base = *options_.rotary_base};
    branch_.emplace(
        SelfAttention::Options{
            .width = width_,
            .heads = heads_,
            .kv_heads = options_.kv_heads > 0 ? options_.kv_heads : heads_,
            .head_dim = static_cast<int>(width_ / heads_),
            .positions = positions,
            .probabilities = {static_cast<float>(options_.dropout),
                              random_site(static_cast<std::uint32_t>(number_), 1)},
            .qkv_bias = options_.bias,
            .output_bias = options_.bias,
            .precision = precision_.operands,
            .result = {precision_.stream, precision_.stream},
            .shards = shards_},
        name, set);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const StreamShape shape{block_shape(input, compute.device().kind), shards_};
    LayerAllocators memory;
    (void)unneeded(shape, memory);
    return branch_->needs(compute, shape, memory);
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    const auto rows = static_cast<double>(input.shape[0] * input.shape[1]);
    const auto width = static_cast<double>(width_), places = static_cast<double>(input.shape[1]);
    return rows * width * (4 * width + places);
  }
  [[nodiscard]] LayerPromises promises() const override {
    return {.recomputes = true,
            .keeps_alone = true,
            .capturable = true,
            .reads_rounded = precision_.operands != precision_.stream};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    keep_again(call, y);
    branch_->result(inner(call), {}, as_rows(y));
  }
  void keep_again(LayerCall& call, const Tensor& /*y*/) override {
    branch_->keep(inner(call), as_rows(call.x));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    LayerAllocators memory(call);
    const BranchCall made = inner(call);
    branch_->backward_input(made, as_rows(operand_gradient(call, dy)),
                            dx.data != nullptr ? as_rows(dx) : unneeded(made.stream, memory));
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    branch_->backward_weight(inner(call), as_rows(call.x), as_rows(operand_gradient(call, dy)));
  }

 private:
  [[nodiscard]] BranchCall inner(LayerCall& call) const {
    BranchCall made{call,
                    {block_shape(call.x.spec, call.compute().device().kind), shards_},
                    LayerAllocators(call)};
    (void)unneeded(made.stream, made.memory);
    return made;
  }
  [[nodiscard]] Tensor unneeded(const StreamShape& shape, LayerAllocators& memory) const {
    if (shape.ranks() == 1) return {};
    return unneeded_gradient(memory, precision_.operands, shape.whole.rows(), width_);
  }

  std::int64_t width_;
  int heads_;
  AttentionOptions options_;
  int number_;
  Precision precision_;
  Shards shards_;
  std::optional<SelfAttention> branch_;  // once there are parameters
};

}  // namespace

LayerSpec attention(std::int64_t width, int heads, const AttentionOptions& options) {
  return {"attention",
          [=](int number) {
            return std::make_unique<AttentionSpecLayer>(width, heads, options, number);
          },
          {},
          settings_of(width, heads, options.kv_heads, options.rotary_base.value_or(0.0F),
                      options.dropout, options.bias)};
}

}  // namespace sluice::nn
