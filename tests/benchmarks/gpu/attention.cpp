// Attention alone, each way that computes it, in turns: TFLOP/s by 4 operations per score and
// dimension forward and 10 backward, where half of the scores are masked, and the speed over that
// of bf16 without dropout as a model runs it (cuDNN, where it takes the shape).
#include <sluice/operators.hpp>

#include "stages/cuda_kernels/flash_attention.hpp"
#include "tests/benchmarks/gpu/rows.hpp"

namespace sluice::benchmarks {

namespace {

constexpr Dropout kDropout = {.probability = 0.1F, .key = {.seed = 1}};

// The operands of one type.
class Attention {
 public:
  Attention(ComputeContext& ctx, const AttentionShape& shape, DType dtype, bool tf32)
      : ctx_(ctx), shape_(shape), tf32_(tf32), memory_(ctx.device()) {
    const Shape width = {shape.rows(), std::int64_t{shape.heads} * shape.head_dim};
    qkv_ = memory_.make(dtype, {shape.rows(), shape.packed_width()});
    dqkv_ = memory_.make(dtype, qkv_.spec.shape);
    out_ = memory_.make(dtype, width);
    dout_ = memory_.make(dtype, width);
    const auto bytes =
        static_cast<std::int64_t>(attention_state_bytes(ctx.device().kind, shape, dtype));
    state_ = memory_.make(DType::kF32, {bytes / 4});
  }

  // As a model runs it, or by Sluice's own kernels.
  [[nodiscard]] Contender forward(const Dropout& dropout, bool own) {
    return {"forward", [this, dropout, own] {
              ctx_.set_tf32(tf32_);
              const auto run = own ? cuda::flash_attention_forward : attention_forward;
              run(ctx_, shape_, qkv_, dropout, out_, state_.as<std::byte>());
            }};
  }
  [[nodiscard]] Contender backward(const Dropout& dropout, bool own) {
    return {"backward", [this, dropout, own] {
              ctx_.set_tf32(tf32_);
              const auto run = own ? cuda::flash_attention_backward : attention_backward;
              run(ctx_, shape_, qkv_, out_, dout_, dropout, state_.as<std::byte>(), dqkv_);
            }};
  }

 private:
  ComputeContext& ctx_;
  AttentionShape shape_;
  bool tf32_;
  RandomOperands memory_;
  Tensor qkv_, dqkv_, out_, dout_, state_;
};

}  // namespace

void attention_row(const GpuOptions& options) {
  ComputeContext ctx(kBenchmarkGpu, 1);
  const TransformerConfig& model = options.model;
  const AttentionShape shape = {.samples = options.batch,
                                .sequence = model.context,
                                .heads = model.heads,
                                .kv_heads = model.heads,
                                .head_dim = model.width / model.heads};
  Attention bf16(ctx, shape, DType::kBf16, false), tf32(ctx, shape, DType::kF32, true),
      f32(ctx, shape, DType::kF32, false);
  struct Way {
    std::string name;
    Attention* operands;
    Dropout dropout;
    bool own;
  };
  const std::vector<Way> ways = {{"bf16, as a model runs it", &bf16, {}, false},
                                 {"bf16, own", &bf16, {}, true},
                                 {"bf16, own, dropout 0.1", &bf16, kDropout, true},
                                 {"tf32, own, dropout 0.1", &tf32, kDropout, true},
                                 {"f32, own, dropout 0.1", &f32, kDropout, true}};
  std::vector<Contender> contenders;
  for (const Way& way : ways) {
    contenders.push_back(way.operands->forward(way.dropout, way.own));
    contenders.push_back(way.operands->backward(way.dropout, way.own));
  }
  const std::vector<double> seconds = in_turns(ctx, options, contenders);
  Report report = gpu_report("GPU: attention alone", {"attention", "pass", "ms", "TFLOP/s",
                                                      "over bf16 as a model runs it"});
  report.fact("engine", attention_engine(ctx, shape, DType::kBf16, false));
  const double scores =
      static_cast<double>(shape.rows() * shape.heads) * static_cast<double>(shape.sequence) / 2;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const double operations = scores * shape.head_dim * (i % 2 == 0 ? 4 : 10);
    report.row({ways[i / 2].name, contenders[i].name, seconds[i] * 1e3,
                operations / seconds[i] * 1e-12, seconds[i % 2] / seconds[i]});
  }
  publish(report, options);
}

}  // namespace sluice::benchmarks
