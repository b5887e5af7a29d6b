// config.json of a Hugging Face model directory, between its text and a TransformerConfig. Both
// forms are read and written: that of transformers 4 (rope_theta, rope_scaling, torch_dtype) and
// that of transformers 5 (rope_parameters, dtype, layer_types).
//
// Architectures: GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM,
// Qwen3ForCausalLM. Fields that are missing have the values that transformers gives them; sizes
// may not be missing. A field that would change the mathematics and that Sluice lacks is refused.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/transformer.hpp>

namespace sluice {

struct HuggingFaceConfig {
  TransformerConfig model;   // `positions` as the file says, `context` at most kDefaultContext
  std::string architecture;  // "Qwen3ForCausalLM"

  static constexpr int kDefaultContext = 1024;
};

// Bytes that a config.json may have.
inline constexpr std::size_t kMostConfigBytes = std::size_t{16} << 20;

// Throws Error(kWeights) naming a file that is no regular one, or larger than that.
[[nodiscard]] std::string read_config_text(const std::filesystem::path& path);

// Whether a JSON text is such a config.json: an object that says "model_type" or "architectures".
[[nodiscard]] bool is_hugging_face_config(std::string_view text);

// Throws Error(kWeights) naming `path`, the field and what would be legal.
[[nodiscard]] HuggingFaceConfig parse_hugging_face_config(std::string_view text,
                                                          const std::filesystem::path& path);

// As architecture_of().
[[nodiscard]] std::string architecture_for(const TransformerConfig& model,
                                           std::string_view preferred = {});

// The text for weights of type `dtype`. Fields of `base`, the text of another config.json or empty,
// that say nothing of the model's shape stay. Requires: architecture_for(model) is
// not empty.
[[nodiscard]] std::string hugging_face_config_text(const TransformerConfig& model, DType dtype,
                                                   const std::string& base);

// A generation_config.json for a model of this config.json.
[[nodiscard]] std::string generation_config_text(std::string_view config);

// eos_token_id, a number or several, of config.json's or generation_config.json's text; empty where
// it names none.
[[nodiscard]] std::vector<int> stop_ids_of(std::string_view text);

// Those of a directory: generation_config.json's, where it has some, else config.json's. What is
// no regular file has none.
[[nodiscard]] std::vector<int> read_stop_ids(const std::filesystem::path& directory);

}  // namespace sluice
