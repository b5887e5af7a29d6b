#include "runtime/models/config_json.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kMostLevels = 50;
constexpr std::size_t kMostKeys = 4'000;

constexpr std::string_view kSliding = "sliding_attention", kFull = "full_attention";

// What an architecture is called, and what transformers takes for fields that a file lacks.
struct Architecture {
  const char* name;
  const char* type;
  double epsilon = 1e-6;
  int kv_heads = 0;  // 0: as many as heads
  int head_dim = 0;  // 0: width / heads
  int window = 0;
};
constexpr std::array<Architecture, 5> kArchitectures = {{
    {.name = "GPT2LMHeadModel", .type = "gpt2", .epsilon = 1e-5},
    {.name = "LlamaForCausalLM", .type = "llama"},
    {.name = "MistralForCausalLM", .type = "mistral", .kv_heads = 8, .window = 4096},
    {.name = "Qwen2ForCausalLM", .type = "qwen2", .kv_heads = 32, .window = 4096},
    {.name = "Qwen3ForCausalLM", .type = "qwen3", .kv_heads = 32, .head_dim = 128, .window = 4096},
}};

std::vector<std::string_view> architecture_names() {
  std::vector<std::string_view> names;
  for (const Architecture& each : kArchitectures) names.emplace_back(each.name);
  return names;
}

Json parse_config(std::string_view text) { return parse_bounded(text, kMostLevels, kMostKeys); }

// The fields of one file. A field that is null is one that is missing, but for is_null().
class Fields {
 public:
  Fields(const Json& json, const std::filesystem::path& path) : json_(json), path_(path) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    throw_error(ErrorCode::kWeights, "'{}': {}", path_.string(),
                fmt::format(text, std::forward<Args>(args)...));
  }
  [[nodiscard]] const Json* find(const char* name) const {
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  [[nodiscard]] bool is_null(const char* name) const {
    const auto found = json_.find(name);
    return found != json_.end() && found->is_null();
  }
  [[nodiscard]] int size(const char* name, int most) const {
    if (find(name) == nullptr) refuse("'{}' is missing; the model's shape needs it", name);
    return integer(name, 0, 1, most);
  }
  [[nodiscard]] int integer(const char* name, int otherwise, int least, int most) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number_integer() || value->get<std::int64_t>() < least ||
        value->get<std::int64_t>() > most) {
      refuse("'{}' is {}; legal are whole numbers from {} to {}", name, dump_json(*value), least,
             most);
    }
    return value->get<int>();
  }
  [[nodiscard]] double real(const char* name, double otherwise) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number() || !(value->get<double>() > 0) ||
        value->get<double>() > double{std::numeric_limits<float>::max()}) {
      refuse("'{}' is {}; legal are numbers above 0", name, dump_json(*value));
    }
    return value->get<double>();
  }
  [[nodiscard]] bool flag(const char* name, bool otherwise) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) {
      refuse("'{}' is {}; legal are true and false", name, dump_json(*value));
    }
    return value->get<bool>();
  }
  [[nodiscard]] std::string text(const char* name, const char* otherwise) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse("'{}' is {}; legal is a string", name, dump_json(*value));
    return value->get<std::string>();
  }
  // What Sluice computes in one way only.
  void require(const char* name, const std::vector<std::string>& legal,
               const char* otherwise) const {
    const std::string found = text(name, otherwise);
    if (std::find(legal.begin(), legal.end(), found) != legal.end()) return;
    refuse("'{}' is '{}'; legal: {}", name, found, joined(legal, ", "));
  }
  void require_absent(const char* name) const {
    if (find(name) != nullptr) refuse("'{}' is {}; Sluice lacks it", name, dump_json(*find(name)));
  }
  void require_flag(const char* name, bool legal, bool otherwise) const {
    if (flag(name, otherwise) != legal) refuse("'{}' is {}; legal: {}", name, !legal, legal);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  const Json& json_;
  const std::filesystem::path& path_;
};

const Architecture& find_architecture(const Fields& fields) {
  std::string name;
  if (const Json* names = fields.find("architectures")) {
    if (!names->is_array() || names->size() != 1 || !names->front().is_string()) {
      fields.refuse("'architectures' is {}; legal is a list of one of {}", dump_json(*names),
                    joined(architecture_names(), ", "));
    }
    name = names->front().get<std::string>();
  }
  const std::string type = fields.text("model_type", "");
  for (const Architecture& each : kArchitectures) {
    if (name.empty() ? type == each.type : name == each.name) return each;
  }
  if (name.empty() && type.empty()) {
    fields.refuse("neither 'architectures' nor 'model_type' is there; legal is a list of one of {}",
                  joined(architecture_names(), ", "));
  }
  fields.refuse("architecture '{}' is unknown; legal: {}", name.empty() ? type : name,
                joined(architecture_names(), ", "));
}

// rope_scaling of transformers 4, or rope_parameters of transformers 5 without its base.
RotaryScaling scaling_of(const Json& json, const char* name, const Fields& fields) {
  if (!json.is_object()) fields.refuse("'{}' is {}; legal is an object", name, dump_json(json));
  const Fields inner(json, fields.path());
  const std::string type = inner.text("rope_type", inner.text("type", "default").c_str());
  RotaryScaling scaling;
  if (type == "default") return scaling;
  scaling.factor = static_cast<float>(inner.real("factor", 0));
  if (type == "linear") {
    scaling.kind = RotaryScaling::Kind::kLinear;
  } else if (type == "llama3") {
    scaling.kind = RotaryScaling::Kind::kLlama3;
    scaling.low_frequency_factor = static_cast<float>(inner.real("low_freq_factor", 0));
    scaling.high_frequency_factor = static_cast<float>(inner.real("high_freq_factor", 0));
    scaling.original_context =
        inner.integer("original_max_position_embeddings", 0, 1, TransformerLimits::kContext);
  } else {
    fields.refuse("'{}' is of type '{}'; legal: default, linear, llama3", name, type);
  }
  if (inner.find("factor") == nullptr) fields.refuse("'{}' lacks 'factor'", name);
  return scaling;
}

void read_rotary(const Fields& fields, TransformerConfig& model) {
  double base = fields.real("rope_theta", 10000);
  if (const Json* scaling = fields.find("rope_scaling")) {
    model.rotary_scaling = scaling_of(*scaling, "rope_scaling", fields);
  }
  if (const Json* parameters = fields.find("rope_parameters")) {
    const RotaryScaling scaling = scaling_of(*parameters, "rope_parameters", fields);
    const Fields inner(*parameters, fields.path());
    const double other = inner.real("rope_theta", base);
    const bool both = fields.find("rope_scaling") != nullptr;
    if ((both && scaling != model.rotary_scaling) ||
        (fields.find("rope_theta") != nullptr && other != base)) {
      fields.refuse("'rope_parameters' and 'rope_theta' or 'rope_scaling' disagree");
    }
    if (inner.real("partial_rotary_factor", 1) != 1) {
      fields.refuse("'partial_rotary_factor' is not 1; Sluice lacks it");
    }
    base = other;
    model.rotary_scaling = scaling;
  }
  if (fields.real("partial_rotary_factor", 1) != 1) {
    fields.refuse("'partial_rotary_factor' is not 1; Sluice lacks it");
  }
  model.rotary_base = static_cast<float>(base);
}

// Which layers slide: layer_types, or what the architecture says without it.
void read_window(const Architecture& architecture, const Fields& fields, TransformerConfig& model) {
  if (architecture.window == 0) return;
  const std::string_view type = architecture.type;
  const int otherwise = fields.is_null("sliding_window") ? 0 : architecture.window;
  int window = fields.integer("sliding_window", otherwise, 1, std::numeric_limits<int>::max());
  if (type != "mistral" && !fields.flag("use_sliding_window", false)) window = 0;
  const int first = type == "mistral" ? 0
                                      : fields.integer("max_window_layers", 28, 0,
                                                       std::numeric_limits<int>::max());
  std::vector<int> full;
  const Json* types = fields.find("layer_types");
  if (types != nullptr && (!types->is_array() || static_cast<int>(types->size()) != model.layers)) {
    fields.refuse("'layer_types' is no list of {} types", model.layers);
  }
  for (int layer = 0; layer < model.layers; ++layer) {
    bool slides = layer >= first;
    if (types != nullptr) {
      const Json& each = (*types)[static_cast<std::size_t>(layer)];
      if (each != kSliding && each != kFull) {
        fields.refuse("'layer_types' has {}; legal: {}, {}", dump_json(each), kSliding, kFull);
      }
      slides = each == kSliding;
    }
    if (!slides) full.push_back(layer);
  }
  if (window == 0 || static_cast<int>(full.size()) == model.layers) return;
  model.window = window;
  model.full_layers = std::move(full);
}

void read_gpt2(const Fields& fields, TransformerConfig& model) {
  using Limits = TransformerLimits;
  model.kind = TransformerKind::kGpt2;
  model.layers = fields.size("n_layer", Limits::kLayers);
  model.heads = fields.size("n_head", Limits::kHeads);
  model.width = fields.size("n_embd", Limits::kWidth);
  model.positions = fields.size("n_positions", Limits::kContext);
  model.mlp_width = fields.integer("n_inner", 0, 1, Limits::kMlpWidth);
  model.norm_epsilon = static_cast<float>(fields.real("layer_norm_epsilon", 1e-5));
  model.tied = fields.flag("tie_word_embeddings", true);
  fields.require("activation_function", {"gelu_new", "gelu_pytorch_tanh"}, "gelu_new");
  fields.require_flag("scale_attn_weights", true, true);
  fields.require_flag("scale_attn_by_inverse_layer_idx", false, false);
  fields.require_flag("add_cross_attention", false, false);
}

void read_llama(const Architecture& architecture, const Fields& fields, TransformerConfig& model) {
  using Limits = TransformerLimits;
  const std::string_view type = architecture.type;
  model.kind = TransformerKind::kLlama;
  model.layers = fields.size("num_hidden_layers", Limits::kLayers);
  model.heads = fields.size("num_attention_heads", Limits::kHeads);
  model.width = fields.size("hidden_size", Limits::kWidth);
  model.mlp_width = fields.size("intermediate_size", Limits::kMlpWidth);
  model.positions = fields.size("max_position_embeddings", Limits::kContext);
  const int kv_heads = architecture.kv_heads > 0 ? architecture.kv_heads : model.heads;
  model.kv_heads = fields.integer("num_key_value_heads", kv_heads, 1, Limits::kHeads);
  model.head_dim = fields.integer("head_dim", architecture.head_dim, 1, Limits::kWidth);
  if (std::int64_t{model.head_dim} * model.heads == model.width) model.head_dim = 0;
  model.norm_epsilon = static_cast<float>(fields.real("rms_norm_eps", architecture.epsilon));
  model.tied = fields.flag("tie_word_embeddings", false);
  const bool biases = type == "llama" || type == "qwen3";
  model.qkv_bias = type == "qwen2" || (biases && fields.flag("attention_bias", false));
  model.attention_output_bias = biases && fields.flag("attention_bias", false);
  model.mlp_bias = type == "llama" && fields.flag("mlp_bias", false);
  model.qk_norm = type == "qwen3";
  fields.require("hidden_act", {"silu"}, "silu");
  read_rotary(fields, model);
  read_window(architecture, fields, model);
}

// Of the default, a block's parameters say it.
std::int64_t mlp_width_of(const TransformerConfig& model) {
  if (model.mlp_width > 0) return model.mlp_width;
  TransformerConfig block = model;
  block.layers = 1;
  block.full_layers.clear();
  for (const ParameterInfo& parameter : parameter_list(block)) {
    if (parameter.name == "blocks.0.mlp.down.weight") return parameter.shape[1];
  }
  throw_error(ErrorCode::kInternal, "a block without an MLP");
}

// The fields of an architecture that say what `model` is.
Json shape_fields(const TransformerConfig& model, const Architecture& architecture) {
  const int positions = std::max(model.positions, model.context);
  if (model.kind == TransformerKind::kGpt2) {
    return {{"n_layer", model.layers},
            {"n_head", model.heads},
            {"n_embd", model.width},
            {"n_positions", positions},
            {"n_inner", model.mlp_width > 0 ? Json(model.mlp_width) : Json()},
            {"vocab_size", model.vocabulary},
            {"activation_function", "gelu_new"},
            {"scale_attn_weights", true},
            {"scale_attn_by_inverse_layer_idx", false},
            {"add_cross_attention", false},
            {"tie_word_embeddings", model.tied}};
  }
  Json json = {{"num_hidden_layers", model.layers},
               {"num_attention_heads", model.heads},
               {"num_key_value_heads", model.kv_heads > 0 ? model.kv_heads : model.heads},
               {"head_dim", model.head_dim > 0 ? model.head_dim : model.width / model.heads},
               {"hidden_size", model.width},
               {"intermediate_size", mlp_width_of(model)},
               {"max_position_embeddings", positions},
               {"vocab_size", model.vocabulary},
               {"hidden_act", "silu"},
               {"tie_word_embeddings", model.tied}};
  const std::string_view type = architecture.type;
  if (type == "llama" || type == "qwen3") json["attention_bias"] = model.qkv_bias;
  if (type == "llama") json["mlp_bias"] = model.mlp_bias;
  return json;
}

// A float's shortest text that gives it back, as a number.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

Json rotary_fields(const TransformerConfig& model) {
  Json scaling = {{"rope_type", "default"}};
  const RotaryScaling& from = model.rotary_scaling;
  if (from.kind == RotaryScaling::Kind::kLinear) {
    scaling = {{"rope_type", "linear"}, {"factor", shortest(from.factor)}};
  } else if (from.kind == RotaryScaling::Kind::kLlama3) {
    scaling = {{"rope_type", "llama3"},
               {"factor", shortest(from.factor)},
               {"low_freq_factor", shortest(from.low_frequency_factor)},
               {"high_freq_factor", shortest(from.high_frequency_factor)},
               {"original_max_position_embeddings", from.original_context}};
  }
  Json json;
  json["rope_theta"] = shortest(model.rotary_base);
  json["rope_scaling"] = from.kind == RotaryScaling::Kind::kNone ? Json() : scaling;
  scaling["rope_theta"] = shortest(model.rotary_base);
  json["rope_parameters"] = scaling;
  return json;
}

Json window_fields(const TransformerConfig& model, const Architecture& architecture) {
  if (architecture.window == 0) return Json::object();
  Json json;
  json["sliding_window"] = model.window > 0 ? Json(model.window) : Json();
  if (std::string_view(architecture.type) == "mistral") return json;
  json["use_sliding_window"] = model.window > 0;
  Json types = Json::array();
  int first = 0;  // that slides, where those before it do not and those after it do
  for (int layer = 0; layer < model.layers; ++layer) {
    const bool full = model.window == 0 ||
                      std::binary_search(model.full_layers.begin(), model.full_layers.end(), layer);
    types.push_back(full ? kFull : kSliding);
    if (full) first = layer + 1;
  }
  json["max_window_layers"] = first;
  json["layer_types"] = std::move(types);
  return json;
}

bool computes(const Architecture& architecture, const TransformerConfig& model) {
  const std::string_view type = architecture.type;
  if (model.kind == TransformerKind::kGpt2) return type == "gpt2";
  const bool same_biases = model.qkv_bias == model.attention_output_bias;
  if (type == "llama") return same_biases && !model.qk_norm && model.window == 0;
  if (type == "mistral") {
    return same_biases && !model.qkv_bias && !model.mlp_bias && !model.qk_norm &&
           model.full_layers.empty();
  }
  if (type == "qwen2") {
    return model.qkv_bias && !model.attention_output_bias && !model.mlp_bias && !model.qk_norm;
  }
  return type == "qwen3" && same_biases && !model.mlp_bias && model.qk_norm;
}

}  // namespace

std::string read_config_text(const std::filesystem::path& path) {
  return read_text(path, kMostConfigBytes, ErrorCode::kWeights);
}

bool is_hugging_face_config(std::string_view text) {
  const Json json = parse_config(text);
  return json.is_object() && (json.contains("model_type") || json.contains("architectures"));
}

HuggingFaceConfig parse_hugging_face_config(std::string_view text,
                                            const std::filesystem::path& path) {
  const Json json = parse_config(text);
  if (!json.is_object()) {
    throw_error(ErrorCode::kWeights, "'{}' is no JSON object of at most {} levels", path.string(),
                kMostLevels);
  }
  const Fields fields(json, path);
  const Architecture& architecture = find_architecture(fields);
  HuggingFaceConfig config;
  config.architecture = architecture.name;
  fields.require_absent("quantization_config");
  TransformerConfig& model = config.model;
  model.vocabulary = fields.size("vocab_size", TransformerLimits::kVocabulary);
  if (std::string_view(architecture.type) == "gpt2") {
    read_gpt2(fields, model);
  } else {
    read_llama(architecture, fields, model);
  }
  model.context = std::min(model.positions, HuggingFaceConfig::kDefaultContext);
  try {
    validate(model);
  } catch (const Error& error) {
    fields.refuse("{}", error.what());
  }
  return config;
}

std::string architecture_for(const TransformerConfig& model, std::string_view preferred) {
  std::string first;
  for (const Architecture& each : kArchitectures) {
    if (!computes(each, model)) continue;
    if (preferred == each.name) return each.name;
    if (first.empty()) first = each.name;
  }
  return first;
}

std::string hugging_face_config_text(const TransformerConfig& model, DType dtype,
                                     const std::string& base) {
  Json before = base.empty() ? Json::object() : parse_config(base);
  if (!before.is_object()) before = Json::object();
  std::string preferred;
  if (const auto names = before.find("architectures");
      names != before.end() && names->is_array() && !names->empty() && names->front().is_string()) {
    preferred = names->front().get<std::string>();
  }
  const std::string name = architecture_for(model, preferred);
  const auto found = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                  [&](const Architecture& each) { return name == each.name; });
  if (found == kArchitectures.end()) {
    throw_error(ErrorCode::kInternal, "no architecture computes this model");
  }
  Json json;
  json["architectures"] = Json::array({found->name});
  json["model_type"] = found->type;
  for (const char* ids : {"bos_token_id", "eos_token_id", "pad_token_id"}) json[ids] = nullptr;
  json.update(before);
  json["architectures"] = Json::array({found->name});
  json["model_type"] = found->type;
  json.update(shape_fields(model, *found));
  json[model.kind == TransformerKind::kGpt2 ? "layer_norm_epsilon" : "rms_norm_eps"] =
      shortest(model.norm_epsilon);
  if (model.kind == TransformerKind::kGpt2) {
    for (const char* each : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
      json[each] = shortest(model.dropout);
    }
  } else {
    json.update(rotary_fields(model));
    json.update(window_fields(model, *found));
  }
  json["dtype"] = json["torch_dtype"] = dtype == DType::kBf16 ? "bfloat16" : "float32";
  return dump_json(json, 2, InvalidUtf8::replace) + "\n";
}

std::string generation_config_text(std::string_view config) {
  const Json from = parse_config(config);
  Json json = {{"_from_model_config", true}};
  for (const char* ids : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (from.is_object() && from.contains(ids)) json[ids] = from[ids];
  }
  return dump_json(json, 2, InvalidUtf8::replace) + "\n";
}

std::vector<int> stop_ids_of(std::string_view text) {
  const Json json = parse_config(text);
  std::vector<int> ids;
  if (!json.is_object() || !json.contains("eos_token_id")) return ids;
  const Json& value = json["eos_token_id"];
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (id.is_number_integer() && id.get<std::int64_t>() >= 0 &&
        id.get<std::int64_t>() <= TransformerLimits::kVocabulary) {
      ids.push_back(id.get<int>());
    }
  }
  return ids;
}

std::vector<int> read_stop_ids(const std::filesystem::path& directory) {
  std::vector<int> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path path = directory / name;
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) continue;
    ids = stop_ids_of(read_config_text(path));
    if (!ids.empty()) break;
  }
  return ids;
}

}  // namespace sluice
