// A Hugging Face model's directory: which files it has, whether they are the model's, and what
// their tensors are called.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/models/config_json.hpp"
#include "runtime/weights/file_layout.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// Tokenizers of 256,000 tokens take 35 MB.
constexpr std::size_t kMostFileBytes = std::size_t{256} << 20;
constexpr const char* kHead = "lm_head.weight";

// What files call a parameter, by the end of a block's parameter's name.
struct Renamed {
  const char* part;
  std::vector<const char*> gpt2, llama;
};

const std::vector<Renamed>& block_names() {
  static const std::vector<Renamed> names = {
      {"norm1", {"ln_1"}, {"input_layernorm"}},
      {"attention.qkv",
       {"attn.c_attn"},
       {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"attention.query_norm", {}, {"self_attn.q_norm"}},
      {"attention.key_norm", {}, {"self_attn.k_norm"}},
      {"attention.output", {"attn.c_proj"}, {"self_attn.o_proj"}},
      {"norm2", {"ln_2"}, {"post_attention_layernorm"}},
      {"mlp.up", {"mlp.c_fc"}, {}},
      {"mlp.gate_up", {}, {"mlp.gate_proj", "mlp.up_proj"}},
      {"mlp.down", {"mlp.c_proj"}, {"mlp.down_proj"}}};
  return names;
}

// The same outside of blocks, by the beginning of the name.
struct End {
  std::string_view part;
  const char *gpt2, *llama;
};
constexpr std::array<End, 4> kEnds = {
    {{"token_embedding.weight", "transformer.wte.weight", "model.embed_tokens.weight"},
     {"position_embedding.weight", "transformer.wpe.weight", nullptr},
     {"final_norm.", "transformer.ln_f.", "model.norm."},
     {"head.weight", kHead, kHead}}};

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
  for (const Renamed& renamed : block_names()) {
    if (part != renamed.part) continue;
    const std::vector<const char*>& names = gpt2 ? renamed.gpt2 : renamed.llama;
    const std::vector<std::int64_t> rows = rows_of(part, parameter.shape[0], names.size(), model);
    std::vector<FilePart> parts;
    for (std::size_t i = 0; i < names.size(); ++i) {
      parts.push_back({fmt::format("{}.{}.{}{}", gpt2 ? "transformer.h" : "model.layers", number,
                                   names[i], end),
                       rows[i], gpt2 && parameter.shape.rank() == 2});
    }
    return parts;
  }
  return {};
}

std::vector<FilePart> end_parts(const ParameterInfo& parameter, const TransformerConfig& model) {
  for (const End& end : kEnds) {
    const char* const to = model.kind == TransformerKind::kGpt2 ? end.gpt2 : end.llama;
    if (to == nullptr || !parameter.name.starts_with(end.part)) continue;
    return {{to + parameter.name.substr(end.part.size()), parameter.shape[0], false}};
  }
  return {};
}

// Tensors that some files hold and no model reads: masks of GPT-2, rotary frequencies of Llama.
bool is_unread_tensor(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

void require_weights(const fs::path& directory) {
  if (has_weights(directory, "model")) return;
  std::error_code error;
  const bool pickled = fs::exists(directory / "pytorch_model.bin", error) ||
                       fs::exists(directory / "pytorch_model.bin.index.json", error);
  throw_error(ErrorCode::kWeights,
              "'{}' holds neither model.safetensors nor model.safetensors.index.json{}",
              directory.string(),
              pickled ? "; its pytorch_model.bin is Python's pickle, which Sluice does not read: "
                        "save_pretrained(DIR, safe_serialization=True) writes safetensors"
                      : "");
}

// Models that were saved without their head lack the first part of every name.
void strip_prefix(FileLayout& layout, const WeightsDirectory& weights) {
  const std::string& first = layout.at("token_embedding.weight").front().name;
  const std::string prefix = first.substr(0, first.find('.') + 1);
  if (weights.find(first) != nullptr || weights.find(first.substr(prefix.size())) == nullptr) {
    return;
  }
  for (auto& [parameter, parts] : layout) {
    for (FilePart& part : parts) {
      if (part.name.starts_with(prefix)) part.name.erase(0, prefix.size());
    }
  }
}

void require_tensor(const fs::path& directory, const std::string& architecture,
                    const WeightsDirectory& weights, const FilePart& part, const Shape& shape) {
  const SafetensorsFile::Entry* entry = weights.find(part.name);
  if (entry == nullptr) {
    throw_error(ErrorCode::kWeights,
                "weights in '{}' have no tensor '{}', which {} of this config.json needs as {}",
                directory.string(), part.name, architecture, to_string(shape));
  }
  const DType dtype = entry->spec.dtype;
  const bool legal = dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
  if (legal && entry->spec.shape == shape) return;
  throw_error(ErrorCode::kWeights,
              "'{}': tensor '{}' is {}; {} of this config.json needs {} of f32, bf16 or f16",
              (directory / weights.file_of(part.name)).string(), part.name, to_string(entry->spec),
              architecture, to_string(shape));
}

// All of the model's tensors are there, and no others.
void require_tensors(const fs::path& directory, const HuggingFaceModel& model,
                     const WeightsDirectory& weights) {
  std::set<std::string> known;
  for (const ParameterInfo& parameter : parameter_list(model.config)) {
    for (const FilePart& part : model.layout.at(parameter.name)) {
      require_tensor(directory, model.architecture, weights, part,
                     part_shape(part, parameter.shape));
      known.insert(part.name);
    }
  }
  for (const std::string& name : weights.names()) {
    // A tied head is the embedding's copy.
    if (known.contains(name) || is_unread_tensor(name) || (model.config.tied && name == kHead)) {
      continue;
    }
    throw_error(ErrorCode::kWeights, "'{}': tensor '{}' is none of {} with this config.json",
                (directory / weights.file_of(name)).string(), name, model.architecture);
  }
}

}  // namespace

FileLayout hugging_face_layout(const TransformerConfig& model) {
  FileLayout layout;
  for (const ParameterInfo& parameter : parameter_list(model)) {
    std::vector<FilePart> parts = parameter.name.starts_with("blocks.")
                                      ? block_parts(parameter, model)
                                      : end_parts(parameter, model);
    if (parts.empty()) {
      throw_error(ErrorCode::kInternal, "parameter '{}' has no name in other files",
                  parameter.name);
    }
    layout.emplace(parameter.name, std::move(parts));
  }
  return layout;
}

std::string architecture_of(const TransformerConfig& config, const std::string& preferred) {
  return architecture_for(config, preferred);
}

bool is_hugging_face(const fs::path& directory) {
  std::error_code error;
  const fs::path path = directory / "config.json";
  if (!fs::is_regular_file(path, error) || fs::exists(directory / "state.json", error))
    return false;
  if (fs::file_size(path, error) > kMostConfigBytes || error) return false;
  return is_hugging_face_config(read_config_text(path));
}

HuggingFaceModel read_hugging_face(const fs::path& directory) {
  const fs::path path = directory / "config.json";
  HuggingFaceConfig config = parse_hugging_face_config(read_config_text(path), path);
  require_weights(directory);
  HuggingFaceModel model;
  model.config = config.model;
  model.architecture = std::move(config.architecture);
  model.layout = hugging_face_layout(model.config);
  const WeightsDirectory weights(directory, "model");
  strip_prefix(model.layout, weights);
  require_tensors(directory, model, weights);
  model.files = read_model_files(directory);
  model.stop_ids = read_stop_ids(directory);
  return model;
}

std::map<std::string, std::string> hugging_face_files(
    const TransformerConfig& config, DType dtype, const std::map<std::string, std::string>& base) {
  std::map<std::string, std::string> files = base;
  std::string& text = files["config.json"];
  text = hugging_face_config_text(config, dtype, text);
  if (!files.contains("generation_config.json")) {
    files["generation_config.json"] = generation_config_text(text);
  }
  return files;
}

std::map<std::string, std::string> read_model_files(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const std::string_view name : model_file_names()) {
    const fs::path path = directory / name;
    std::error_code error;
    if (!fs::is_regular_file(path, error)) continue;
    files.emplace(name, read_text(path, kMostFileBytes, ErrorCode::kWeights));
  }
  return files;
}

}  // namespace sluice
