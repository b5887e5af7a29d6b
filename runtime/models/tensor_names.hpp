// Names of tensors in the files of Hugging Face's models. hugging_face_layout() is in
// <sluice/hugging_face.hpp>.
#pragma once

#include <string_view>

namespace sluice {

// Tensors that some files hold and no model reads: masks of GPT-2, rotary frequencies of Llama.
[[nodiscard]] bool is_unread_tensor(std::string_view name);

}  // namespace sluice
