// Against golden.json, which golden.py makes with Hugging Face's transformers: logits, the loss and
// gradients of each architecture, on one stage and on several; with SLUICE_ON_A_GPU on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

#include "tests/golden.hpp"
#include "tests/gpus/required_gpus.hpp"
#include "tests/stages/transformer/local_pipeline.hpp"

namespace sluice {
namespace {

using nlohmann::json;
using testing::expect_near;
using testing::LocalPipeline;
using testing::MicroBatch;

// The environment names it for a program that runs elsewhere than it was built.
const json& golden() {
  const char* const path = std::getenv("SLUICE_GOLDEN_TRANSFORMERS");
  static const json file =
      testing::read_golden(path != nullptr ? path : SLUICE_GOLDEN_TRANSFORMERS);
  return file;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& [name, model] : golden().at("models").items()) names.push_back(name);
  return names;
}

RotaryScaling scaling_of(const json& from) {
  RotaryScaling scaling;
  from.at("factor").get_to(scaling.factor);
  scaling.kind = RotaryScaling::Kind::kLinear;
  if (from.at("kind") == "linear") return scaling;
  scaling.kind = RotaryScaling::Kind::kLlama3;
  from.at("low").get_to(scaling.low_frequency_factor);
  from.at("high").get_to(scaling.high_frequency_factor);
  from.at("original_context").get_to(scaling.original_context);
  return scaling;
}

// Fails where the file names a field that is not read here.
TransformerConfig config_of(json from) {
  TransformerConfig config;
  const auto take = [&](const char* name, auto& field) {
    if (!from.contains(name)) return;
    from.at(name).get_to(field);
    from.erase(name);
  };
  std::string kind;
  take("kind", kind);
  config.kind = kind == "gpt2" ? TransformerKind::kGpt2 : TransformerKind::kLlama;
  take("layers", config.layers);
  take("heads", config.heads);
  take("kv_heads", config.kv_heads);
  take("width", config.width);
  take("mlp_width", config.mlp_width);
  take("vocabulary", config.vocabulary);
  take("context", config.context);
  take("tied", config.tied);
  take("head_dim", config.head_dim);
  take("norm_epsilon", config.norm_epsilon);
  take("rotary_base", config.rotary_base);
  take("qkv_bias", config.qkv_bias);
  take("attention_output_bias", config.attention_output_bias);
  take("mlp_bias", config.mlp_bias);
  take("qk_norm", config.qk_norm);
  take("window", config.window);
  take("full_layers", config.full_layers);
  json scaling;
  take("rotary_scaling", scaling);
  if (!scaling.is_null()) config.rotary_scaling = scaling_of(scaling);
  EXPECT_TRUE(from.empty()) << from;
  return config;
}

void fill(Device device, Parameter& parameter) {
  std::vector<float> values(static_cast<std::size_t>(parameter.shape.elements()));
  testing::fill_by_name(parameter.name, values);
  copy_now(device, parameter.value.data, values.data(), values.size() * sizeof(float));
}

MicroBatch batch_of(const json& model) {
  return {.first_sample = 0,
          .samples = golden().at("samples"),
          .sequence = golden().at("sequence"),
          .tokens = model.at("tokens"),
          .targets = model.at("targets")};
}

std::vector<double> some_logits(const LocalPipeline& pipeline, const TransformerConfig& config) {
  const std::vector<float>& all = pipeline.logits(0);
  const auto sequence = golden().at("sequence").get<std::size_t>();
  const auto every = golden().at("logits of every").get<std::size_t>();
  const auto width = static_cast<std::size_t>(config.vocabulary);
  std::vector<double> some;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i / width % sequence % every == 0) some.push_back(static_cast<double>(all[i]));
  }
  return some;
}

void expect_gradient(const std::vector<float>& all, const json& expected, const std::string& name) {
  const auto values = expected.at("values").get<std::vector<double>>();
  const std::size_t stride = std::max<std::size_t>(1, all.size() / 12);
  std::vector<double> some;
  double square = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    square += static_cast<double>(all[i]) * static_cast<double>(all[i]);
    if (i % stride == 0) some.push_back(static_cast<double>(all[i]));
  }
  expect_near(some, values, 1e-4, name);
  const auto norm = expected.at("norm").get<double>();
  EXPECT_NEAR(std::sqrt(square), norm, 1e-5 * norm) << name;
}

void check_model(Device device, const std::string& name_of_model) {
  const json& model = golden().at("models").at(name_of_model);
  const TransformerConfig config = config_of(model.at("config"));
  const json& gradients = model.at("gradients");
  EXPECT_EQ(parameter_list(config).size(), gradients.size());
  for (const ParameterInfo& parameter : parameter_list(config)) {
    ASSERT_TRUE(gradients.contains(parameter.name)) << parameter.name;
    const json& shape = gradients.at(parameter.name).at("shape");
    EXPECT_EQ(parameter.shape, testing::golden_shape(shape)) << parameter.name;
  }
  for (const Partition& partition : {Partition{{0, 4}}, {{0, 2, 4}}, {{0, 1, 2, 4}}}) {
    SCOPED_TRACE(partition.stages());
    LocalPipeline pipeline(config, partition, {batch_of(model)}, {.device = device});
    pipeline.for_each_parameter([&](Parameter& parameter) { fill(device, parameter); });
    pipeline.mark_values_changed();
    pipeline.step();
    const auto loss = model.at("loss").get<double>();
    EXPECT_NEAR(pipeline.loss_sum(), loss, 1e-6 * loss);
    expect_near(some_logits(pipeline, config), model.at("logits").get<std::vector<double>>(), 1e-5,
                "logits");
    for (const auto& [name, gradient] : pipeline.grads()) {
      expect_gradient(gradient, gradients.at(name), name);
    }
  }
}

std::string instance_name(const ::testing::TestParamInfo<std::string>& instance) {
  std::string name = instance.param;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

#ifdef SLUICE_ON_A_GPU
class CudaGoldenTransformerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { SLUICE_NEED_A_GPU(); }
};
TEST_P(CudaGoldenTransformerTest, HasTransformersNumbers) {
  check_model({DeviceKind::kCuda, 0}, GetParam());
}
INSTANTIATE_TEST_SUITE_P(Models, CudaGoldenTransformerTest, ::testing::ValuesIn(model_names()),
                         instance_name);
#else
class GoldenTransformerTest : public ::testing::TestWithParam<std::string> {};
TEST_P(GoldenTransformerTest, HasTransformersNumbers) { check_model({}, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Models, GoldenTransformerTest, ::testing::ValuesIn(model_names()),
                         instance_name);
#endif

}  // namespace
}  // namespace sluice
