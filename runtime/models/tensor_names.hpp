// Names of tensors in the files of Hugging Face's models.
#pragma once

#include <string_view>

#include <sluice/parameter.hpp>
#include <sluice/transformer.hpp>

namespace sluice {

// As hugging_face_layout().
[[nodiscard]] FileLayout layout_of_names(const TransformerConfig& model);

// Tensors that some files hold and no model reads: masks of GPT-2, rotary frequencies of Llama.
[[nodiscard]] bool is_unread_tensor(std::string_view name);

}  // namespace sluice
