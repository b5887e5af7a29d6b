#include "runtime/models/tensor_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

// By the end of a block's parameter's name.
struct Renamed {
  const char* part;
  std::vector<const char*> names;
};

const std::vector<Renamed>& gpt2_names() {
  static const std::vector<Renamed> names = {{"norm1", {"ln_1"}},
                                             {"attention.qkv", {"attn.c_attn"}},
                                             {"attention.output", {"attn.c_proj"}},
                                             {"norm2", {"ln_2"}},
                                             {"mlp.up", {"mlp.c_fc"}},
                                             {"mlp.down", {"mlp.c_proj"}}};
  return names;
}

const std::vector<Renamed>& llama_names() {
  static const std::vector<Renamed> names = {
      {"norm1", {"input_layernorm"}},
      {"attention.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"attention.query_norm", {"self_attn.q_norm"}},
      {"attention.key_norm", {"self_attn.k_norm"}},
      {"attention.output", {"self_attn.o_proj"}},
      {"norm2", {"post_attention_layernorm"}},
      {"mlp.gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
      {"mlp.down", {"mlp.down_proj"}}};
  return names;
}

constexpr std::array<std::pair<const char*, const char*>, 4> kGpt2Ends = {
    {{"token_embedding.weight", "transformer.wte.weight"},
     {"position_embedding.weight", "transformer.wpe.weight"},
     {"final_norm.", "transformer.ln_f."},
     {"head.weight", "lm_head.weight"}}};
constexpr std::array<std::pair<const char*, const char*>, 3> kLlamaEnds = {
    {{"token_embedding.weight", "model.embed_tokens.weight"},
     {"final_norm.", "model.norm."},
     {"head.weight", "lm_head.weight"}}};

// Rows of the parts of a block's parameter.
std::vector<std::int64_t> rows_of(const std::string& part, std::int64_t rows, std::size_t parts,
                                  const TransformerConfig& model) {
  if (parts == 1) return {rows};
  if (part == "mlp.gate_up") return {rows / 2, rows / 2};
  const std::int64_t heads = model.heads;
  const std::int64_t kv_heads = model.kv_heads > 0 ? model.kv_heads : heads;
  const std::int64_t head_dim = rows / (heads + 2 * kv_heads);
  return {heads * head_dim, kv_heads * head_dim, kv_heads * head_dim};
}

std::vector<FilePart> block_parts(const ParameterInfo& parameter, const TransformerConfig& model) {
  const bool gpt2 = model.kind == TransformerKind::kGpt2;
  constexpr std::string_view kBlocks = "blocks.";
  const std::size_t dot = parameter.name.find('.', kBlocks.size());
  const std::string number = parameter.name.substr(kBlocks.size(), dot - kBlocks.size());
  const std::size_t last = parameter.name.rfind('.');
  const std::string part = parameter.name.substr(dot + 1, last - dot - 1);
  const std::string end = parameter.name.substr(last);  // ".weight"
  for (const Renamed& renamed : gpt2 ? gpt2_names() : llama_names()) {
    if (part != renamed.part) continue;
    const std::vector<std::int64_t> rows =
        rows_of(part, parameter.shape[0], renamed.names.size(), model);
    std::vector<FilePart> parts;
    for (std::size_t i = 0; i < renamed.names.size(); ++i) {
      parts.push_back({fmt::format("{}.{}.{}{}", gpt2 ? "transformer.h" : "model.layers", number,
                                   renamed.names[i], end),
                       rows[i], gpt2 && parameter.shape.rank() == 2});
    }
    return parts;
  }
  return {};
}

template <typename Ends>
std::vector<FilePart> end_parts(const ParameterInfo& parameter, const Ends& ends) {
  for (const auto& [from, to] : ends) {
    const std::string_view name = parameter.name;
    if (!name.starts_with(from)) continue;
    return {
        {to + std::string(name.substr(std::string_view(from).size())), parameter.shape[0], false}};
  }
  return {};
}

}  // namespace

FileLayout layout_of_names(const TransformerConfig& model) {
  FileLayout layout;
  for (const ParameterInfo& parameter : parameter_list(model)) {
    std::vector<FilePart> parts =
        parameter.name.starts_with("blocks.")  ? block_parts(parameter, model)
        : model.kind == TransformerKind::kGpt2 ? end_parts(parameter, kGpt2Ends)
                                               : end_parts(parameter, kLlamaEnds);
    if (parts.empty()) {
      throw_error(ErrorCode::kInternal, "parameter '{}' has no name in other files",
                  parameter.name);
    }
    layout.emplace(parameter.name, std::move(parts));
  }
  return layout;
}

bool is_unread_tensor(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace sluice
