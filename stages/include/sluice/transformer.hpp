// Decoder-only transformers, GPT-2 and Llama style, as pipeline stages.
//
// Layers in order: embedding, `layers` blocks, head (final norm, projection to the vocabulary).
// The residual stream is what edges carry: [samples, sequence, width] of stream_precision. Stage 0
// takes tokens i32 [samples, sequence]; the last stage gives logits [samples, sequence, vocabulary]
// of the precision; its targets are i32 [samples, sequence], negative: not counted.
// In a model of shards a rank has the logits of its own: of one after the other [samples, sequence,
// classes of the shard].
//
//   gpt2:  learned positions, LayerNorm, GELU MLP of 4 * width, biases; initial values as GPT-2
//   llama: rotary positions, RMSNorm, SwiGLU MLP, grouped-query attention; with its options also
//          Mistral (window), Qwen2 (qkv_bias) and Qwen3 (head_dim, qk_norm)
//
// Parameter names: token_embedding.weight, position_embedding.weight, blocks.<i>.{norm1,norm2}.
// {weight,bias}, blocks.<i>.attention.{qkv,output}.{weight,bias}, blocks.<i>.mlp.{up,down}.{weight,
// bias} (llama: mlp.{gate_up,down}), final_norm.{weight,bias}, head.weight; with qk_norm
// blocks.<i>.attention.{query_norm,key_norm}.weight [head_dim]. qkv is [(heads + 2 kv_heads) *
// head_dim, width], output [width, heads * head_dim]. Tied: the head's use is a second entry named
// token_embedding.weight.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/stage.hpp>

#pragma GCC visibility push(default)
namespace sluice {

enum class TransformerKind { kGpt2, kLlama };

// What backward computes again instead of keeping it per micro-batch. The bits do not change;
// describe() returns the memory of each.
enum class Recompute {
  kNone,
  kAttention,  // attention's results from queries, keys and values
  kBlock,      // everything except each layer's input from the residual stream
};

// The largest legal values: every product of sizes fits 64 bits.
struct TransformerLimits {
  static constexpr int kLayers = 1 << 16, kHeads = 1 << 12, kWidth = 1 << 18;
  static constexpr int kMlpWidth = 1 << 20, kContext = 1 << 20, kVocabulary = 1 << 24;
  static constexpr int kHeadDim = 1 << 18, kWindow = 1 << 20, kLogitChunks = 1 << 16;
};

struct TransformerConfig {
  TransformerKind kind = TransformerKind::kGpt2;
  int layers = 4, heads = 4, width = 256, context = 256, vocabulary = 256;
  int kv_heads = 0;   // llama only; 0: as many as heads
  int mlp_width = 0;  // 0: 4 * width (gpt2), 8/3 * width rounded up to a multiple of 64 (llama)
  float dropout = 0;  // after the embedding, on probabilities, after attention and MLP
  bool tied = true;   // head shares the input embedding
  int positions = 0;  // gpt2: learned ones, at least context; llama: for people; 0: context
  float norm_epsilon = 1e-5F;
  // llama only, from here to full_layers; gpt2 has all biases and learned positions. head_dim is
  // even.
  int head_dim = 0;  // 0: width / heads
  float rotary_base = 10000;
  RotaryScaling rotary_scaling = {};
  bool qkv_bias = false, attention_output_bias = false, mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of each head's queries and keys, before rotary positions
  int window = 0;        // positions that a query sees, itself the last of them; 0: all
  std::vector<int> full_layers = {};  // blocks that see all positions in spite of it, ascending
  DType precision = DType::kF32;  // of matmuls' operands; kBf16 keeps f32 master weights and sums
  // Of the residual stream, its gradient and the edges between stages. kBf16 needs a precision of
  // kBf16. All that leaves a layer has this type, so the bits do not depend on where stages end. On
  // a CPU what is added to the stream is rounded before the sum, which is rounded too.
  DType stream_precision = DType::kF32;
  Recompute recompute = Recompute::kNone;
  // [block] In place of `recompute`; the head goes by the last. Empty: all blocks go by that.
  std::vector<Recompute> recompute_blocks = {};
  // Above 1 the last stage never has all logits of a micro-batch: LossStage::loss() makes them for
  // a part of its rows after the other, with the head's gradients. Its outputs are then the final
  // norm's results, and infer() is Error(kUsage). A part has a multiple of 512 rows, so that there
  // may be fewer parts; with sums_by_sample() at most those of one sample. On a CPU the bits are
  // those of 1; on a GPU, whose matmuls then have other shapes, they are a function of it.
  int logit_chunks = 1;
  // On a CPU, sums over rows (gradients of weights, biases and gains) start anew at each sample,
  // and samples are added in ascending order. So the bits do not depend on how a batch is cut into
  // micro-batches. Always so from a context of 256 on; below, it costs time.
  bool batch_invariant = false;
  [[nodiscard]] bool sums_by_sample() const;
};

// Throws Error(kUsage) naming the option, its value and the nearest legal one: sizes >= 1 and small
// enough, width a multiple of heads unless head_dim is given, heads of kv_heads, even head size for
// llama, dropout in [0, 1), epsilon and scaling factors above 0 and finite, low_frequency_factor
// below high_frequency_factor, full_layers ascending blocks of a model with a window,
// recompute_blocks none or as many as layers. With gpt2, a field of llama that is not at its
// initial value is refused: head_dim, kv_heads other than heads, the rotary ones, biases, qk_norm,
// window, full_layers.
void validate(const TransformerConfig& config);

// Floating-point operations of one sample's forward, per layer (embedding, blocks, head): the costs
// of parse_partition.
[[nodiscard]] std::vector<double> layer_costs(const TransformerConfig& config);
// The part of them that backward computes again.
[[nodiscard]] std::vector<double> recompute_costs(const TransformerConfig& config);

// Floating-point operations of one sample's forward and backward, as publications count them: 6 for
// each parameter and position, and attention's matmuls over the positions that queries see.
// Without what backward computes again. The source: Narayanan et al. 2021, "Efficient large-scale
// language model training on GPU clusters", and Chowdhery et al. 2022, "PaLM", appendix B.
[[nodiscard]] double training_flops(const TransformerConfig& config);

// Number of parameters, each counted once.
[[nodiscard]] std::int64_t parameter_count(const TransformerConfig& config);

// Names and shapes of all parameters, in global order, each once (owners only).
struct ParameterInfo {
  std::string name;
  Shape shape;
};
[[nodiscard]] std::vector<ParameterInfo> parameter_list(const TransformerConfig& config);

// Stages that hold a use of the tied embedding, ascending; empty where nothing is tied. With both
// uses on one stage: that stage once.
[[nodiscard]] std::vector<int> tied_stages(const TransformerConfig& config,
                                           const Partition& partition);

// --- the model, and its layers ---
// Makes stages: Pipeline pipeline(world, Transformer(config), data, options). Stages are cut by
// the cost of the layers; stage_of() takes another partition. Throws as validate() does.
class Transformer : public Sequential {
 public:
  explicit Transformer(const TransformerConfig& config);
};

}  // namespace sluice

namespace sluice::nn {

// What a Transformer is made of, for models that replace a layer: the embedding, `layers` blocks,
// the head. Layers keep the names of their parameters, whatever stands beside them. A layer of
// another kind has its number in the list; LayerSpec::name gives it a name.
//   std::vector<nn::LayerSpec> layers = nn::transformer_layers(config);
//   layers[3].parts[1] = nn::residual({nn::rms_norm(width), nn::layer<MyMlp>("mlp", width)});
//   const Sequential model(std::move(layers), nn::transformer_loss(config));
// A block has two parts: attention and MLP, each with its norm and its sum.
[[nodiscard]] std::vector<LayerSpec> transformer_layers(const TransformerConfig& config);
// Of the head's outputs; with TransformerConfig::logit_chunks it has the head's projection.
[[nodiscard]] LossSpec transformer_loss(const TransformerConfig& config);

// A block as a layer of any Sequential: [samples, sequence, width] of the stream's type, with
// parameters "3.norm1.weight", "3.attention.qkv.weight", "3.mlp.up.weight" and so on. Of `config`
// it takes all but context, vocabulary, tied, full_layers and recompute_blocks. The last two are
// empty: each block has the window and the recomputation of its own `config`. `layers` is for
// initial values.
[[nodiscard]] LayerSpec transformer_block(const TransformerConfig& config);

}  // namespace sluice::nn
#pragma GCC visibility pop
