#include "stages/network/shard_forms.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "comm/base/throw_error.hpp"

namespace sluice::nn {
namespace {

constexpr const char* kLegal =
    "legal: linear() with Split::kColumns, layers that go element by element, but for dropout, and "
    "linear() with Split::kRows, on one stage";

std::optional<ShardForm> made_of(const ShardForms& forms, std::optional<ShardForm> input) {
  if (!input) return {};
  return *input == ShardForm::kWhole ? forms.of_whole : forms.of_panels;
}

// What the layer, or the last one of a group, makes.
ShardForm output_of(const LayerSpec& layer, const std::string& path, ShardForm input) {
  for (std::size_t i = 0; i < layer.parts.size(); ++i) {
    input = output_of(layer.parts[i], fmt::format("{}.{}", path, i), input);
  }
  if (!layer.parts.empty()) return input;
  if (const std::optional<ShardForm> made = made_of(layer.forms, input)) return *made;
  throw_usage("layer {} ({}): {}; {}", path, layer.kind,
              !layer.forms.of_whole && !layer.forms.of_panels
                  ? "its layers do not fit each other, by the columns that a rank's shards have"
              : input == ShardForm::kPanels
                  ? "it needs its whole input, and gets the columns that a rank's shards have"
                  : "it needs the columns that a rank's shards have, and gets its whole input",
              kLegal);
}

}  // namespace

ShardForms forms_of(const LayerSpec& layer) {
  return layer.parts.empty() ? layer.forms : forms_of(layer.parts);
}

ShardForms forms_of(std::span<const LayerSpec> layers) {
  ShardForms all{.of_panels = ShardForm::kPanels, .dealt = true};
  for (const LayerSpec& layer : layers) {
    const ShardForms next = forms_of(layer);
    all = {made_of(next, all.of_whole), made_of(next, all.of_panels), all.dealt && next.dealt};
  }
  return all;
}

ShardForms forms_of_sum(const ShardForms& first, const ShardForms& second) {
  const auto both = [](const auto& a, const auto& b) {
    return a == b ? a : std::optional<ShardForm>{};
  };
  return {both(first.of_whole, second.of_whole), both(first.of_panels, second.of_panels),
          first.dealt && second.dealt};
}

void require_forms(std::span<const LayerSpec> layers, std::span<const int> begins,
                   std::span<const Skip> skips, const LossSpec& loss) {
  std::vector<ShardForm> forms = {ShardForm::kWhole};  // of the model's input, and of each layer
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool begins_stage = std::ranges::find(begins, static_cast<int>(i)) != begins.end();
    if (begins_stage && forms.back() == ShardForm::kPanels) {
      throw_usage(
          "a stage begins with layer {} ({}), which gets the columns that a rank's shards have; {}",
          i, layers[i].kind, kLegal);
    }
    forms.push_back(output_of(layers[i], std::to_string(i), forms.back()));
  }
  for (const Skip& skip : skips) {
    for (const int layer : {skip.from, skip.to - 1}) {
      if (forms[static_cast<std::size_t>(layer + 1)] == ShardForm::kWhole) continue;
      throw_usage(
          "skip({}, {}) takes what layer {} makes, the columns that a rank's shards have; {}",
          skip.from, skip.to, layer, kLegal);
    }
  }
  if (loss.takes == forms.back()) return;
  throw_usage(
      "{}: {}", loss.make ? loss.kind : "the model's output",
      loss.takes == ShardForm::kWhole
          ? "it needs whole outputs, and the last layer makes the columns that a rank's shards "
            "have; "
            "legal: linear() with Split::kRows after it, or nn::transformer_loss()"
          : "it needs the columns that a rank's shards have, and gets whole outputs; legal: "
            "a transformer's head, or linear() with Split::kColumns");
}

}  // namespace sluice::nn
