// Directories of models: both forms of config.json, and every refusal of other people's files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>

#include "runtime/models/config_json.hpp"
#include "runtime/models/model_config.hpp"
#include "tests/runtime/models/model_directory.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kWeights) << error.what();
    return error.what();
  }
  return "no error";
}

std::string config_error(const nlohmann::json& config) {
  return error_of([&] { (void)parse_hugging_face_config(config.dump(), "M/config.json"); });
}

TransformerConfig parsed(const nlohmann::json& config) {
  return parse_hugging_face_config(config.dump(), "M/config.json").model;
}

nlohmann::json golden_config(const char* name) {
  return golden_models().at("models").at(name).at("config");
}

TEST(HuggingFaceConfigTest, ReadsTheFormOfTransformers5) {
  for (const char* name : {"llama", "llama 3", "llama linear", "qwen3"}) {
    nlohmann::json config = golden_config(name);
    const TransformerConfig before = parsed(config);
    nlohmann::json parameters = config["rope_scaling"].is_null()
                                    ? nlohmann::json{{"rope_type", "default"}}
                                    : config["rope_scaling"];
    parameters["rope_theta"] = config["rope_theta"];
    config.erase("rope_scaling");
    config.erase("rope_theta");
    config["rope_parameters"] = parameters;
    config.erase("torch_dtype");
    EXPECT_EQ(model_config_text(parsed(config)), model_config_text(before)) << name;
  }
}

TEST(HuggingFaceConfigTest, WritesWhatItReads) {
  for (const auto& [name, model] : golden_models().at("models").items()) {
    SCOPED_TRACE(name);
    const nlohmann::json config = model.at("config");
    const TransformerConfig read = parsed(config);
    const std::string text = hugging_face_config_text(read, DType::kF32, config.dump());
    EXPECT_EQ(model_config_text(parse_hugging_face_config(text, "again").model),
              model_config_text(read));
    EXPECT_EQ(nlohmann::json::parse(text).at("architectures"), config.at("architectures"));
    EXPECT_EQ(nlohmann::json::parse(text).at("dtype"), "float32");
    EXPECT_EQ(nlohmann::json::parse(text).at("initializer_range"), config.at("initializer_range"));
    // The same without what others wrote.
    const std::string own = hugging_face_config_text(read, DType::kBf16, "");
    EXPECT_EQ(model_config_text(parse_hugging_face_config(own, "own").model),
              model_config_text(read));
  }
}

TEST(HuggingFaceConfigTest, TakesTheValuesOfTransformersForMissingFields) {
  nlohmann::json config = golden_config("mistral");
  for (const char* name : {"rms_norm_eps", "rope_theta", "head_dim", "sliding_window"}) {
    config.erase(name);
  }
  TransformerConfig model = parsed({{"model_type", "mistral"},
                                    {"hidden_size", 64},
                                    {"num_hidden_layers", 2},
                                    {"num_attention_heads", 16},
                                    {"intermediate_size", 70},
                                    {"vocab_size", 99},
                                    {"max_position_embeddings", 5000}});
  EXPECT_EQ(model.kv_heads, 8);
  EXPECT_EQ(model.window, 4096);
  EXPECT_FLOAT_EQ(model.norm_epsilon, 1e-6F);
  EXPECT_FALSE(model.tied);
  EXPECT_EQ(model.positions, 5000);
  EXPECT_EQ(model.context, HuggingFaceConfig::kDefaultContext);
  config["sliding_window"] = nullptr;
  EXPECT_EQ(parsed({{"model_type", "mistral"},
                    {"hidden_size", 64},
                    {"num_hidden_layers", 2},
                    {"num_attention_heads", 16},
                    {"intermediate_size", 70},
                    {"vocab_size", 99},
                    {"sliding_window", nullptr},
                    {"max_position_embeddings", 5000}})
                .window,
            0);
}

struct BadConfig {
  const char *model, *field;
  nlohmann::json value;
  const char *first, *second;  // what the error says
};

TEST(HuggingFaceConfigTest, NamesFieldsThatItCannotHonour) {
  const nlohmann::json yarn = {{"rope_type", "yarn"}, {"factor", 2.0}};
  const nlohmann::json low = {{"rope_type", "linear"}};
  const std::vector<BadConfig> bad = {
      {"llama", "architectures", nlohmann::json::array({"FalconForCausalLM"}), "FalconForCausalLM",
       "Qwen3ForCausalLM"},
      {"llama", "architectures", "LlamaForCausalLM", "'architectures'", "legal is a list"},
      {"llama", "hidden_act", "gelu", "'hidden_act' is 'gelu'", "legal: silu"},
      {"llama", "rope_scaling", yarn, "'yarn'", "legal: default, linear, llama3"},
      {"llama", "rope_scaling", low, "'rope_scaling' lacks 'factor'", ""},
      {"llama", "rope_scaling", 3, "'rope_scaling' is 3", "an object"},
      {"llama", "rope_parameters", {{"rope_theta", 5.0}}, "'rope_parameters' and", "disagree"},
      {"llama", "partial_rotary_factor", 0.5, "'partial_rotary_factor'", "Sluice lacks it"},
      {"llama", "hidden_size", nullptr, "'hidden_size' is missing", ""},
      {"llama", "hidden_size", -4, "'hidden_size' is -4", "from 1 to"},
      {"llama", "hidden_size", 1e30, "'hidden_size' is 1e+30", "whole numbers"},
      {"llama", "num_key_value_heads", 3, "--kv-heads", ""},
      {"llama", "rms_norm_eps", 0, "'rms_norm_eps' is 0", "above 0"},
      {"llama", "tie_word_embeddings", "yes", "'tie_word_embeddings' is \"yes\"", "true and false"},
      {"llama", "quantization_config", {{"bits", 4}}, "'quantization_config'", "Sluice lacks it"},
      {"qwen2", "layer_types", nlohmann::json::array({"full_attention"}), "'layer_types'",
       "list of 2"},
      {"qwen2", "layer_types", nlohmann::json::array({"full_attention", "chunked"}), "\"chunked\"",
       "sliding_attention"},
      {"gpt2", "activation_function", "relu", "'activation_function' is 'relu'", "gelu_new"},
      {"gpt2", "scale_attn_by_inverse_layer_idx", true, "'scale_attn_by_inverse_layer_idx' is true",
       "legal: false"},
  };
  for (const BadConfig& each : bad) {
    nlohmann::json config = golden_config(each.model);
    config[each.field] = each.value;
    EXPECT_THAT(config_error(config),
                AllOf(HasSubstr("M/config.json"), HasSubstr(each.first), HasSubstr(each.second)));
  }
  EXPECT_THAT(config_error({{"model_type", "bert"}}), HasSubstr("'bert' is unknown"));
  const std::string deep = std::string(200, '[') + std::string(200, ']');
  for (const std::string& text : {std::string("{"), std::string("[]"), "{\"a\":" + deep + "}"}) {
    EXPECT_THAT(error_of([&] { (void)parse_hugging_face_config(text, "M"); }),
                HasSubstr("no JSON object"));
  }
}

TEST(HuggingFaceConfigTest, KnowsWhichModelsNoArchitectureComputes) {
  TransformerConfig model;
  EXPECT_EQ(architecture_of(model), "GPT2LMHeadModel");
  model.kind = TransformerKind::kLlama;
  EXPECT_EQ(architecture_of(model), "LlamaForCausalLM");
  EXPECT_EQ(architecture_of(model, "MistralForCausalLM"), "MistralForCausalLM");
  EXPECT_EQ(architecture_of(model, "Qwen3ForCausalLM"), "LlamaForCausalLM");
  model.window = 8;
  EXPECT_EQ(architecture_of(model), "MistralForCausalLM");
  model.full_layers = {1};
  EXPECT_EQ(architecture_of(model), "");
  model.qkv_bias = true;
  EXPECT_EQ(architecture_of(model), "Qwen2ForCausalLM");
  model.qk_norm = model.attention_output_bias = true;
  EXPECT_EQ(architecture_of(model), "Qwen3ForCausalLM");
}

// Whatever the bytes: read, or refused in one line.
TEST(HuggingFaceConfigTest, ReadsOrRefusesDamagedText) {
  std::mt19937 draw(1);
  int read = 0;
  for (const auto& [name, model] : golden_models().at("models").items()) {
    const std::string sound = model.at("config").dump();
    for (int round = 0; round < 2000; ++round) {
      std::string text = sound;
      for (int damage = 0; damage < 3; ++damage) {
        const std::size_t at = draw() % text.size();
        const char* const marks = "0123456789-.e[]{}\",:tfn";
        if (draw() % 2 == 0) text[at] = marks[draw() % 23];
        if (draw() % 3 == 0) text.erase(at, draw() % 6);
      }
      try {
        const HuggingFaceConfig config = parse_hugging_face_config(text, "M/config.json");
        (void)hugging_face_config_text(config.model, DType::kF32, text);
        ++read;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kWeights);
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_GT(read, 100);
}

class HuggingFaceFilesTest : public ::testing::Test {
 protected:
  std::string error_after(const std::function<void(ModelFiles&)>& damage,
                          const char* model = "gpt2", int parts = 1) {
    ModelFiles files(golden_models().at("models").at(model));
    damage(files);
    std::filesystem::remove_all(directory());
    files.write(directory(), parts);
    return error_of([&] { (void)read_hugging_face(directory()); });
  }
  [[nodiscard]] std::filesystem::path directory() const { return place_.path() / "model"; }

  TemporaryDirectory place_;
};

TEST_F(HuggingFaceFilesTest, NamesTensorsThatAreNotTheModels) {
  const std::string missing = "transformer.h.1.mlp.c_fc.weight";
  EXPECT_THAT(error_after([&](ModelFiles& files) { files.remove(missing); }),
              AllOf(HasSubstr("no tensor '" + missing + "'"), HasSubstr("[20, 80]")));
  EXPECT_THAT(error_after([](ModelFiles& files) {
                files.add("adapter.weight", Shape{3, 4});
              }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("'adapter.weight' is none of")));
  EXPECT_THAT(error_after([&](ModelFiles& files) {
                files.add(missing, Shape{80, 20});
              }),
              AllOf(HasSubstr(missing), HasSubstr("f32 [80, 20]"), HasSubstr("[20, 80]")));
  EXPECT_THAT(error_after([](ModelFiles& files) {
                HostTensor& tensor = files.at("transformer.ln_f.bias");
                tensor = {{DType::kI32, Shape{20}}, std::vector<std::byte>(80)};
              }),
              AllOf(HasSubstr("i32 [20]"), HasSubstr("f32, bf16 or f16")));
  EXPECT_THAT(error_after([](ModelFiles& files) { files.config["vocab_size"] = 38; }),
              AllOf(HasSubstr("transformer.wte.weight"), HasSubstr("[38, 20]")));
}

TEST_F(HuggingFaceFilesTest, TakesWhatOthersLeaveInTheirFiles) {
  EXPECT_EQ(error_after([](ModelFiles& files) {
              files.add("transformer.h.0.attn.bias", Shape{1, 1, 29, 29});
              files.add("transformer.h.0.attn.masked_bias", Shape{});
              files.add("lm_head.weight", Shape{37, 20});
            }),
            "no error");
  EXPECT_THAT(error_after([](ModelFiles& files) { files.add("lm_head.bias", Shape{37}); }),
              HasSubstr("lm_head.bias"));
}

TEST_F(HuggingFaceFilesTest, ReadsModelsThatWereSavedWithoutTheirHead) {
  const auto& golden = golden_models().at("models").at("gpt2");
  nlohmann::json stripped = golden;
  stripped["tensors"] = nlohmann::json::object();
  for (const auto& [name, shape] : golden.at("tensors").items()) {
    stripped["tensors"][name.substr(std::string("transformer.").size())] = shape;
  }
  ModelFiles(stripped).write(directory());
  EXPECT_EQ(read_hugging_face(directory()).layout.at("final_norm.bias").front().name, "ln_f.bias");
}

TEST_F(HuggingFaceFilesTest, NamesPartsAndFilesThatAreWrong) {
  EXPECT_EQ(error_after([](ModelFiles&) {}, "qwen3", 3), "no error");
  std::filesystem::copy(directory() / "model-00003-of-00003.safetensors",
                        directory() / "model-00004-of-00004.safetensors");
  const auto error = [&] { return error_of([&] { (void)read_hugging_face(directory()); }); };
  EXPECT_THAT(error(), AllOf(HasSubstr("model-00004-of-00004.safetensors"),
                             HasSubstr("model.safetensors.index.json does not name it")));
  std::filesystem::remove(directory() / "model-00004-of-00004.safetensors");
  std::filesystem::resize_file(directory() / "model-00002-of-00003.safetensors", 1000);
  EXPECT_THAT(error(), HasSubstr("model-00002-of-00003.safetensors"));
  std::filesystem::remove(directory() / "model-00002-of-00003.safetensors");
  EXPECT_THAT(error(), HasSubstr("model-00002-of-00003.safetensors"));
  for (const auto& entry : std::filesystem::directory_iterator(directory())) {
    if (entry.path().filename() != "config.json") std::filesystem::remove(entry.path());
  }
  EXPECT_THAT(error(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  std::ofstream(directory() / "pytorch_model.bin") << "x";
  EXPECT_THAT(error(), HasSubstr("safe_serialization"));
  std::filesystem::remove(directory() / "config.json");
  EXPECT_THAT(error(), HasSubstr("config.json"));
  EXPECT_FALSE(is_hugging_face(directory()));
}

TEST_F(HuggingFaceFilesTest, CarriesTokenizerFilesAndIds) {
  ModelFiles files(golden_models().at("models").at("llama"));
  files.write(directory());
  place_.write("model/tokenizer.json", "{\"model\": {}}");
  place_.write("model/generation_config.json", "{\"eos_token_id\": [5, 7]}");
  place_.write("model/README.md", "not carried");
  const HuggingFaceModel model = read_hugging_face(directory());
  EXPECT_EQ(model.stop_ids, (std::vector<int>{5, 7}));
  const auto written = hugging_face_files(model.config, DType::kBf16, model.files);
  EXPECT_EQ(written.at("tokenizer.json"), "{\"model\": {}}");
  EXPECT_EQ(written.at("generation_config.json"), "{\"eos_token_id\": [5, 7]}");
  EXPECT_EQ(written.count("README.md"), 0U);
  EXPECT_EQ(nlohmann::json::parse(written.at("config.json")).at("torch_dtype"), "bfloat16");
  EXPECT_EQ(nlohmann::json::parse(written.at("config.json")).at("bos_token_id"), 1);
}

}  // namespace
}  // namespace sluice::testing
