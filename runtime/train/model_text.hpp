// Options of a model beyond its sizes, some of which are lists in text.
#pragma once

#include <string>

#include <sluice/transformer.hpp>

#include "runtime/options/option_table.hpp"

namespace sluice {

struct ModelText {
  // "none", "linear,FACTOR", "llama3,FACTOR,LOW,HIGH,CONTEXT"; "0,2,5-9" or empty.
  std::string rotary_scaling = "none", full_layers;
};

void add_model_text(OptionTable& table, TransformerConfig& model, ModelText& text);
// Throws Error(kUsage) naming the option and what is legal.
void take_model_text(const ModelText& text, TransformerConfig& model);
[[nodiscard]] ModelText text_of(const TransformerConfig& model);

}  // namespace sluice
