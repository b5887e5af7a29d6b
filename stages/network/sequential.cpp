#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/network/converted.hpp"
#include "stages/network/network_stage.hpp"
#include "stages/network/specs.hpp"

namespace sluice {

struct Sequential::Model {
  std::vector<nn::LayerSpec> layers;  // without cuts
  std::vector<int> cuts;              // the layers that begin a stage, ascending
  std::vector<nn::Skip> skips;
  nn::LossSpec loss;
  nn::Precision precision;
  std::vector<double> costs;  // of layers; empty: the input is not known
  std::string text;           // StageDescription::model

  // One line for each thing that ranks compare, and for like layers in a row.
  [[nodiscard]] std::string describe() const {
    std::string all = fmt::format("{} layers\n", layers.size());
    std::size_t begin = 0;
    std::string like = text_of(layers[0]);
    for (std::size_t i = 1; i <= layers.size(); ++i) {
      std::string next = i < layers.size() ? text_of(layers[i]) : "";
      if (next == like) continue;
      all += i == begin + 1 ? fmt::format("layer {}: {}\n", begin, like)
                            : fmt::format("layers {} to {}: {}\n", begin, i - 1, like);
      begin = i;
      like = std::move(next);
    }
    for (const nn::Skip& skip : skips) {
      all += fmt::format("skip({}, {}), {}, {}\n", skip.from, skip.to, static_cast<int>(skip.join),
                         skip.axis);
    }
    if (precision.operands != DType::kF32) {
      all += fmt::format("precision {}, stream {}\n", name_of(precision.operands),
                         name_of(precision.stream));
    }
    return all + fmt::format("cut() before layers {}\nloss {}({})\n", joined(cuts, ", "), loss.kind,
                             loss.settings);
  }
  // Null without a loss; an Error names it.
  [[nodiscard]] std::unique_ptr<nn::Loss> make_loss(const Shards& shards = {}) const {
    if (loss.kind.empty() && !loss.make) return nullptr;
    return nn::naming(loss.kind.empty() ? "a loss" : loss.kind, [&] {
      if (!loss.make) throw_usage("a LossSpec without `make`; legal: a function that makes a Loss");
      std::unique_ptr<nn::Loss> made = loss.make();
      if (made == nullptr) throw_usage("LossSpec::make returned null; legal: a Loss");
      if (shards.count > 1 && !made->set_shards(shards)) {
        throw_usage(
            "does not say how {} shards divide it (Loss::set_shards); legal: 1 shard, of 1 rank",
            shards.count);
      }
      if (precision.operands == DType::kF32 || made->set_precision(precision)) return made;
      return widened(std::move(made));
    });
  }
  // The layers before which a cut by cost may be: not those that get panels.
  [[nodiscard]] std::vector<int> begins() const {
    std::vector<int> begins;
    std::optional<nn::ShardForms::Form> form = nn::ShardForms::kWhole;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (form != nn::ShardForms::kPanels) begins.push_back(static_cast<int>(i));
      form = nn::made_of(nn::forms_of(layers[i]), form);
    }
    return begins;
  }
  [[nodiscard]] std::vector<nn::NumberedLayer> make(std::size_t index) const {
    const int number = static_cast<int>(index);
    return make_layers(layers[index], number, number);
  }
};

namespace {

nn::Precision precision_of(const ModelOptions& options) {
  const DType precision = options.precision, stream = options.stream_precision;
  const bool legal = (precision == DType::kF32 || precision == DType::kBf16) &&
                     (stream == DType::kF32 || stream == precision);
  if (legal) return {precision, stream};
  throw_usage(
      "precision {} with stream_precision {}; legal: f32 with f32, and bf16 with f32 or bf16",
      name_of(precision), name_of(stream));
}

constexpr const char* kLegal =
    "legal: linear() with Split::kColumns, layers that go element by element, but for dropout, and "
    "linear() with Split::kRows, on one stage";

// What the layer, or the last one of a group, makes.
nn::ShardForms::Form output_of(const nn::LayerSpec& layer, const std::string& path,
                               nn::ShardForms::Form input) {
  for (std::size_t i = 0; i < layer.parts.size(); ++i) {
    input = output_of(layer.parts[i], fmt::format("{}.{}", path, i), input);
  }
  if (!layer.parts.empty()) return input;
  const std::optional<nn::ShardForms::Form> made = nn::made_of(layer.forms, input);
  if (made) return *made;
  throw_usage("layer {} ({}): {}; {}", path, layer.kind,
              !layer.forms.of_whole && !layer.forms.of_panels
                  ? "its layers do not fit each other, by the columns that a rank's shards have"
              : input == nn::ShardForms::kPanels
                  ? "it needs its whole input, and gets the columns that a rank's shards have"
                  : "it needs the columns that a rank's shards have, and gets its whole input",
              kLegal);
}

// Throws Error(kUsage) that names the layer, connection or loss that cannot take what it gets.
// `begins`: of stages.
void require_forms(std::span<const nn::LayerSpec> layers, std::span<const int> begins,
                   std::span<const nn::Skip> skips, const nn::LossSpec& loss) {
  // Of the model's input, and of each layer.
  std::vector<nn::ShardForms::Form> forms = {nn::ShardForms::kWhole};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool begins_stage = std::ranges::find(begins, static_cast<int>(i)) != begins.end();
    if (begins_stage && forms.back() == nn::ShardForms::kPanels) {
      throw_usage(
          "a stage begins with layer {} ({}), which gets the columns that a rank's shards have; {}",
          i, layers[i].kind, kLegal);
    }
    forms.push_back(output_of(layers[i], std::to_string(i), forms.back()));
  }
  for (const nn::Skip& skip : skips) {
    for (const int layer : {skip.from, skip.to - 1}) {
      if (forms[at(layer + 1)] == nn::ShardForms::kWhole) continue;
      throw_usage(
          "skip({}, {}) takes what layer {} makes, the columns that a rank's shards have; {}",
          skip.from, skip.to, layer, kLegal);
    }
  }
  if (loss.takes == forms.back()) return;
  throw_usage(
      "{}: {}", loss.make ? loss.kind : "the model's output",
      loss.takes == nn::ShardForms::kWhole
          ? "it needs whole outputs, and gets the columns that a rank's shards have; legal: "
            "linear() with Split::kRows before it, or nn::transformer_loss()"
          : "it needs the columns that a rank's shards have, and gets whole outputs; legal: "
            "a transformer's head, or linear() with Split::kColumns");
}

}  // namespace

std::string nn::settings_of(std::initializer_list<double> numbers) {
  return sluice::joined(std::span(numbers.begin(), numbers.size()), ", ");
}

Sequential::Sequential(std::initializer_list<nn::LayerSpec> layers, nn::LossSpec loss,
                       const ModelOptions& options)
    : Sequential(std::vector<nn::LayerSpec>(layers), std::move(loss), options) {}

Sequential::Sequential(std::vector<nn::LayerSpec> layers, nn::LossSpec loss,
                       const ModelOptions& options) {
  const auto model = std::make_shared<Model>();
  model->loss = std::move(loss);
  model->precision = precision_of(options);
  for (nn::LayerSpec& spec : layers) {
    if (spec.skip) {
      model->skips.push_back(*spec.skip);
      continue;
    }
    if (spec.make) {
      const bool again = options.recompute && spec.composed && spec.kind != "recompute";
      model->layers.push_back(again ? nn::recompute(std::move(spec)) : std::move(spec));
      continue;
    }
    const int next = static_cast<int>(model->layers.size());
    if (next == 0 || (!model->cuts.empty() && model->cuts.back() == next)) {
      throw_usage("cut() before layer {} leaves a stage without layers", next);
    }
    model->cuts.push_back(next);
  }
  if (model->layers.empty()) throw_usage("a Sequential needs at least one layer");
  if (!model->cuts.empty() && model->cuts.back() == static_cast<int>(model->layers.size())) {
    throw_usage("cut() after the last layer leaves a stage without layers");
  }
  require_skips(model->skips, static_cast<int>(model->layers.size()));
  for (std::size_t i = 0; i < model->layers.size(); ++i) (void)model->make(i);
  (void)model->make_loss();
  model->text = model->describe();
  model_ = model;
}

Sequential Sequential::with_input(const TensorSpec& sample) const {
  const auto model = std::make_shared<Model>(*model_);
  std::vector<std::int64_t> dims = {1};
  for (int d = 0; d < sample.shape.rank(); ++d) dims.push_back(sample.shape[d]);
  TensorSpec spec =
      at_entry({sample.dtype, Shape(std::span<const std::int64_t>(dims))}, model->precision);
  model->costs.clear();
  const int layers = static_cast<int>(model->layers.size());
  const nn::StageSkips skips(model->skips, 0, layers, /*last=*/true);
  std::vector<TensorSpec> outputs = {spec};  // of the model's input, and of each layer
  const auto join_before = [&](int layer) {
    for (const nn::Skip& skip : skips.joins()) {
      if (skip.to != layer) continue;
      const int output = skip.from + 1;  // 0: the model's input
      spec = joined(skip, spec, outputs[static_cast<std::size_t>(output)]);
    }
  };
  for (int i = 0; i < layers; ++i) {
    join_before(i);
    const nn::LayerRun made(model->make(static_cast<std::size_t>(i)),
                            {.precision = model->precision});
    model->costs.push_back(made.cost(spec));
    spec = made.output(spec);
    outputs.push_back(spec);
  }
  join_before(layers);
  if (const std::unique_ptr<nn::Loss> loss = model->make_loss()) {
    nn::naming(model->loss.kind, [&] { (void)loss->targets(spec); });
  }
  Sequential same = *this;
  same.model_ = model;
  return same;
}

Partition Sequential::partition(int stages) const {
  const int layers = static_cast<int>(model_->layers.size());
  if (stages < 1) throw_usage("a Sequential over {} stages; legal: at least 1", stages);
  if (stages == 1) return {{0, layers}};
  if (model_->cuts.empty()) {
    if (model_->costs.empty()) {
      throw_usage(
          "a Sequential over {} stages needs cut() between its layers, or with_input() to be cut "
          "by cost",
          stages);
    }
    std::vector<int> begins = model_->begins();
    begins.push_back(layers);
    std::vector<double> costs;  // of the layers between two of them
    for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
      costs.push_back(std::accumulate(model_->costs.begin() + begins[i],
                                      model_->costs.begin() + begins[i + 1], 0.0));
    }
    if (std::ssize(costs) < std::min(stages, layers)) {
      throw_usage(
          "a Sequential over {} stages has {} parts to be cut by cost, since layers of panels stay "
          "with the layer before them; legal: at most as many stages",
          stages, costs.size());
    }
    Partition cut = partition_by_cost(costs, stages);
    for (int& first : cut.first) first = begins[at(first)];
    return cut;
  }
  if (static_cast<int>(model_->cuts.size()) + 1 != stages) {
    throw_usage("{} cut()s make {} stages of a Sequential; the pipeline has {} (legal: 1 or {})",
                model_->cuts.size(), model_->cuts.size() + 1, stages, model_->cuts.size() + 1);
  }
  Partition cut{{0}};
  cut.first.insert(cut.first.end(), model_->cuts.begin(), model_->cuts.end());
  cut.first.push_back(layers);
  return cut;
}

std::unique_ptr<Stage> Sequential::operator()(int stage, int stages) const {
  return stage_of(partition(stages), stage);
}

std::unique_ptr<Stage> Sequential::operator()(const StagePlace& place) const {
  return stage_of(partition(place.stages), place.stage, place.shards_here());
}

std::unique_ptr<Stage> Sequential::stage_of(const Partition& partition, int stage,
                                            const Shards& shards) const {
  const std::vector<int>& first = partition.first;
  const int count = static_cast<int>(model_->layers.size());
  if (first.size() < 2 || first.front() != 0 || first.back() != count ||
      !std::is_sorted(first.begin(), first.end()) || first[1] == 0) {
    throw_usage(
        "the partition [{}] does not cut layers 0 to {} into stages, ascending from 0 to {}",
        joined(first, ", "), count - 1, count);
  }
  const int stages = partition.stages();
  if (stage < 0 || stage >= stages) {
    throw_usage("stage {} of a partition into {} stages; legal: 0 to {}", stage, stages,
                stages - 1);
  }
  nn::StageLayers mine{.layers = {},
                       .begin = first[at(stage)],
                       .model = model_->text,
                       .precision = model_->precision,
                       .shards = shards};
  if (shards.count > 1) {
    require_forms(model_->layers, first, model_->skips, model_->loss);
    // All stages deal positions, or none does; a transformer's head, whose logits are panels, ends
    // it.
    mine.shards.deals_positions = shards.deals_positions && model_->skips.empty() &&
                                  nn::forms_of(model_->layers).dealt &&
                                  model_->loss.takes == nn::ShardForms::kPanels;
    mine.model += fmt::format("{} shards\n", shards.count);
  }
  for (int i = first[at(stage)]; i < first[at(stage) + 1]; ++i) {
    std::ranges::move(model_->make(at(i)), std::back_inserter(mine.layers));
  }
  mine.skips = nn::StageSkips(model_->skips, first[at(stage)], first[at(stage) + 1],
                              /*last=*/stage == stages - 1);
  std::unique_ptr<nn::Loss> loss = stage < stages - 1 ? nullptr : model_->make_loss(shards);
  if (loss == nullptr) return std::make_unique<nn::NetworkStage>(std::move(mine));
  return std::make_unique<nn::LossNetworkStage>(std::move(mine), model_->loss.kind,
                                                std::move(loss));
}

}  // namespace sluice
