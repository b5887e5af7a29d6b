// Directories of models as Hugging Face's transformers reads and writes them: config.json,
// model.safetensors or its parts with their index, tokenizer files. A transformer starts from one
// (read_hugging_face(), load_weights()), and its saves are such directories
// (CheckpointOptions::layout and files).
//
// Architectures: GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM,
// Qwen3ForCausalLM. Nothing here uses MPI.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>
#include <sluice/transformer.hpp>

#pragma GCC visibility push(default)
namespace sluice {

struct HuggingFaceModel {
  // `positions` is what the model was made for, `context` that or 1024, if that is less. It is the
  // caller's to choose, up to `positions`; so are dropout, both precisions and recompute.
  TransformerConfig config;
  std::string architecture;   // "Qwen3ForCausalLM"
  FileLayout layout;          // of the directory's files, for load_weights()
  std::vector<int> stop_ids;  // tokens that end a text
  std::map<std::string, std::string>
      files;  // config.json, tokenizer files and the like: name, text
};

// Whether `directory` holds a config.json of transformers, and is no save of Sluice.
[[nodiscard]] bool is_hugging_face(const std::filesystem::path& directory);

// Reads config.json and the headers of the weights, no values. Throws Error(kWeights) naming file,
// field or tensor and what would be legal: an architecture or field that Sluice lacks; a tensor
// that is missing, comes twice, is no tensor of the model, or has another shape or type.
[[nodiscard]] HuggingFaceModel read_hugging_face(const std::filesystem::path& directory);

// The architecture that computes what `config` says: `preferred` if it does; empty where none does.
[[nodiscard]] std::string architecture_of(const TransformerConfig& config,
                                          const std::string& preferred = {});

// The model's tensors for a save: transformers' names, matrices transposed where it has them so.
// Lists every parameter. In a model with a part of the program's own, that part's parameters keep
// their own names. Requires: architecture_of(config) is not empty.
[[nodiscard]] FileLayout hugging_face_layout(const TransformerConfig& config);

// The files beside the weights, which are of type `dtype`. Those of `base`, of the model that this
// one started from, are kept; fields of its config.json that say the shape follow `config`.
// Requires: architecture_of(config) is not empty.
[[nodiscard]] std::map<std::string, std::string> hugging_face_files(
    const TransformerConfig& config, DType dtype,
    const std::map<std::string, std::string>& base = {});

// config.json and the other files that `directory` holds beside weights; empty where it has none.
[[nodiscard]] std::map<std::string, std::string> read_model_files(
    const std::filesystem::path& directory);

}  // namespace sluice
#pragma GCC visibility pop
