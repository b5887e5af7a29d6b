// Models of Hugging Face's transformers, from their directories: logits and 20 steps of AdamW are
// transformers' (golden.json) on one and on several ranks; what is saved is such a directory again.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/hugging_face.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/models/model_tensors.hpp"
#include "tests/runtime/models/model_directory.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

// Of logits and losses, relative to numbers above 1.
constexpr double kNear = 1e-4;

struct Tokens {
  std::vector<std::int32_t> inputs, targets;
  std::int64_t samples = 0, sequence = 0;

  // batch() of golden.py.
  explicit Tokens(std::int64_t step) {
    const auto& golden = golden_models();
    samples = golden.at("samples");
    sequence = golden.at("sequence");
    const std::int64_t vocabulary = golden.at("vocabulary"), row = sequence + 1;
    for (std::int64_t i = 0; i < samples * row; ++i) {
      const auto token =
          static_cast<std::int32_t>((i * i * 7 + i * 3 + i / row + step * 5) % vocabulary);
      if (i % row < sequence) inputs.push_back(token);
      if (i % row > 0) targets.push_back(token);
    }
  }
  [[nodiscard]] Batch batch() {
    const Shape shape{samples, sequence};
    return {.inputs = {{inputs.data(), {DType::kI32, shape}}},
            .targets = {{targets.data(), {DType::kI32, shape}}}};
  }
};

class Model {
 public:
  Model(Communicator& comm, const HuggingFaceModel& from, const std::string& schedule)
      : pipeline_(comm, stages(from.config), spec(), options(schedule, comm.size())) {}

  Pipeline& pipeline() { return pipeline_; }

 private:
  // Of four ranks, two share a stage.
  static PipelineOptions options(const std::string& schedule, int ranks) {
    const auto& adamw = golden_models().at("adamw");
    PipelineOptions options;
    options.shape = {.micro_batches = 2, .micro_batch_size = 2};
    if (ranks == 4) options.shape.tensor = 2;
    options.order.schedule = schedule;
    options.training.optimizer = {.beta1 = adamw.at("betas")[0],
                                  .beta2 = adamw.at("betas")[1],
                                  .epsilon = adamw.at("eps"),
                                  .weight_decay = adamw.at("decay")};
    options.training.learning_rate = {.peak = adamw.at("lr")};
    options.training.clip = adamw.at("clip");
    return options;
  }
  static StageFactory stages(const TransformerConfig& config) { return Transformer(config); }
  static BatchSpec spec() {
    const Shape shape{golden_models().at("sequence").get<std::int64_t>()};
    return {.inputs = {{DType::kI32, shape}}, .targets = {{DType::kI32, shape}}};
  }

  Pipeline pipeline_;
};

void expect_logits(Pipeline& pipeline, const nlohmann::json& golden) {
  Tokens tokens(0);
  const Shape one{1, tokens.sequence};
  const Tensor input{tokens.inputs.data(), {DType::kI32, one}};
  const std::span<const Tensor> outputs =
      pipeline.infer({.inputs = {input}}, {.to = InferOptions::kEveryRank});
  ASSERT_EQ(outputs.size(), 1U);
  const auto expected = golden.at("logits").get<std::vector<double>>();
  const std::span<const float> logits = outputs[0].floats();
  ASSERT_EQ(logits.size(), expected.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_NEAR(logits[i], expected[i], kNear * std::max(1.0, std::abs(expected[i]))) << i;
  }
}

void expect_steps(Pipeline& pipeline, const nlohmann::json& golden) {
  const auto losses = golden.at("losses").get<std::vector<double>>();
  const auto norms = golden.at("norms").get<std::vector<double>>();
  ASSERT_EQ(losses.size(), 20U);
  for (std::size_t step = 0; step < losses.size(); ++step) {
    Tokens tokens(static_cast<std::int64_t>(step));
    const StepReport report = pipeline.train_step(tokens.batch());
    EXPECT_NEAR(report.loss, losses[step], kNear * losses[step]) << "step " << step + 1;
    EXPECT_NEAR(report.grad_norm, norms[step], kNear * norms[step]) << "step " << step + 1;
  }
}

void save(Pipeline& pipeline, const HuggingFaceModel& from, const std::filesystem::path& directory,
          DType precision) {
  save_checkpoint(pipeline, {.directory = directory,
                             .model = {},
                             .layout = hugging_face_layout(from.config),
                             .precision = precision,
                             .files = hugging_face_files(from.config, precision, from.files)});
}

// What a directory's parameters are, by name.
std::map<std::string, std::vector<float>> values_of(const std::filesystem::path& directory,
                                                    bool masters = true) {
  SavedTensors tensors = open_model_tensors(directory);
  if (masters) tensors.prefer_masters();
  std::map<std::string, std::vector<float>> values;
  for (const std::string& name : tensors.parameters()) {
    values[name].resize(static_cast<std::size_t>(tensors.find(name)->shape.elements()));
    tensors.read(name, values[name]);
  }
  return values;
}

// The step's directory without what is Sluice's own.
std::filesystem::path as_foreign(const std::filesystem::path& step,
                                 const std::filesystem::path& to) {
  std::filesystem::create_directory(to);
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    const std::string name = entry.path().filename();
    if (name == "state.json" || name.starts_with("optimizer")) continue;
    std::filesystem::copy(entry.path(), to / name);
  }
  return to;
}

class HuggingFaceTrainingTest : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  const nlohmann::json& golden() const {
    return golden_models().at("models").at(std::get<0>(GetParam()));
  }
  [[nodiscard]] int ranks() const { return std::get<1>(GetParam()); }
};

TEST_P(HuggingFaceTrainingTest, FollowsTransformersAndHandsTheModelBack) {
  TemporaryDirectory place;
  ModelFiles(golden()).write(place.path() / "model", ranks());
  const DType precision = ranks() == 2 ? DType::kBf16 : DType::kF32;
  with_ranks(ranks(), [&](Communicator& comm) {
    const HuggingFaceModel from = read_hugging_face(place.path() / "model");
    Model model(comm, from, ranks() == 2 ? "zb-h1" : "1f1b");
    load_weights(model.pipeline(), place.path() / "model", from.layout);
    if (ranks() < 4) expect_logits(model.pipeline(), golden());  // shards have parts of them
    save(model.pipeline(), from, place.path() / "start", DType::kF32);
    expect_steps(model.pipeline(), golden());
    save(model.pipeline(), from, place.path() / "run", precision);
  });
  const auto start = place.path() / "start" / step_directory_name(0);
  EXPECT_EQ(values_of(place.path() / "model"), values_of(start));
  EXPECT_EQ(values_of(start), values_of(as_foreign(start, place.path() / "again")));
  const auto end = place.path() / "run" / step_directory_name(20);
  const HuggingFaceModel back = read_hugging_face(as_foreign(end, place.path() / "back"));
  EXPECT_EQ(back.architecture, golden().at("config").at("architectures")[0].get<std::string>());
  EXPECT_EQ(values_of(end, /*masters=*/false), values_of(place.path() / "back"));
  const bool rounded = precision == DType::kBf16;
  EXPECT_EQ(rounded, values_of(end) != values_of(place.path() / "back"));
}

std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A model with a part of one's own: the others have transformers' names.
TEST(HuggingFacePartsTest, ASaveHasTransformersNamesWhereThePartsAreIts) {
  TemporaryDirectory place;
  TransformerConfig config = small_model();
  std::vector<nn::LayerSpec> layers = nn::transformer_layers(config);
  nn::LayerSpec mlp = nn::residual({nn::layer_norm(config.width), nn::linear(config.width, 8),
                                    nn::relu(), nn::linear(8, config.width)});
  mlp.name = "own_mlp.";
  layers[2].parts[1] = std::move(mlp);  // of the second block
  const Sequential model =
      Sequential(layers, nn::transformer_loss(config)).with_input({DType::kI32, {config.context}});
  with_ranks(2, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {.pipeline = 2, .micro_batches = 2, .micro_batch_size = 2};
    const auto data = synthetic_tokens(config);
    Pipeline pipeline(comm, model, *data, options);
    for (int step = 0; step < 2; ++step) (void)pipeline.train_step();
    save_checkpoint(pipeline, {.directory = place.path() / "run",
                               .model = {},
                               .layout = hugging_face_layout(config),
                               .files = hugging_face_files(config, DType::kF32)});
    const std::string digest = digest_of(pipeline);
    Pipeline other(comm, model, *data, options);
    (void)load_checkpoint(other, place.path() / "run");
    EXPECT_EQ(digest_of(other), digest);
    EXPECT_EQ(other.train_step().loss, pipeline.train_step().loss);
  });
  const auto step = place.path() / "run" / step_directory_name(2);
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    if (entry.path().filename().string().starts_with("model")) text += text_of_file(entry.path());
  }
  for (const char* name : {"transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight",
                           "transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias",
                           "blocks.1.own_mlp.1.weight"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  EXPECT_EQ(text.find("transformer.h.1.mlp"), std::string::npos);
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& [name, model] : golden_models().at("models").items()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Models, HuggingFaceTrainingTest,
                         ::testing::Combine(::testing::ValuesIn(model_names()),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& each) {
                           std::string name = std::get<0>(each.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name + "_" + std::to_string(std::get<1>(each.param));
                         });

// A resumed run has the bits of one that went on, also where the model's files are rounded.
TEST(HuggingFaceResumeTest, RoundedFilesLoseNoBit) {
  TemporaryDirectory place;
  ModelFiles(golden_models().at("models").at("gpt2")).write(place.path() / "model");
  const HuggingFaceModel from = read_hugging_face(place.path() / "model");
  const auto steps = [](Pipeline& pipeline, std::int64_t first, std::int64_t end) {
    for (std::int64_t step = first; step < end; ++step) {
      Tokens tokens(step);
      (void)pipeline.train_step(tokens.batch());
    }
  };
  std::string expected;
  with_ranks(3, [&](Communicator& comm) {
    Model model(comm, from, "1f1b");
    load_weights(model.pipeline(), place.path() / "model", from.layout);
    steps(model.pipeline(), 0, 3);
    save(model.pipeline(), from, place.path() / "run", DType::kBf16);
    steps(model.pipeline(), 3, 6);
    const std::string digest = digest_of(model.pipeline());
    if (comm.rank() == 0) expected = digest;
  });
  with_ranks(2, [&](Communicator& comm) {
    Model model(comm, from, "gpipe");
    EXPECT_EQ(load_checkpoint(model.pipeline(), place.path() / "run").step, 3U);
    steps(model.pipeline(), 3, 6);
    const std::string digest = digest_of(model.pipeline());
    if (comm.rank() == 0) {
      EXPECT_EQ(digest, expected);
    }
  });
}

}  // namespace
}  // namespace sluice::testing
