// Samples the next token from the model's logits. The result is a function of logits, options and
// the token's position alone, so a text does not depend on the layout that generates it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct SamplingOptions {
  double temperature = 0.8;  // 0: always the likeliest token
  int top_k = 0;             // of the likeliest tokens only; 0: of all
  std::uint64_t seed = 1;
};

// Softmax of logits / temperature in double precision over the top_k largest (ties: the lower index
// first), then the inverse of the distribution at a Philox number keyed by seed and `position`.
// `logits` f32 [vocabulary], not empty. Throws Error(kNumeric) where one is not finite.
[[nodiscard]] int sample_token(std::span<const float> logits, const SamplingOptions& options,
                               std::uint64_t position);

// Numbers below `vocabulary`, separated by spaces, tabs or lines; may be none. Throws Error(kUsage)
// naming `option`, the number or text that is no token, and what would be legal.
[[nodiscard]] std::vector<int> parse_tokens(std::string_view option, std::string_view text,
                                            int vocabulary);

// Converts between text and tokens of a model without a tokenizer. With a vocabulary of up to 256
// tokens are bytes, else numbers separated by spaces.
class TokenText {
 public:
  explicit TokenText(int vocabulary) : vocabulary_(vocabulary) {}
  [[nodiscard]] bool bytes() const { return vocabulary_ <= 256; }
  // Throws Error(kUsage) naming the option --prompt, the text that is not a token, and what would
  // be legal.
  [[nodiscard]] std::vector<int> prompt_tokens(std::string_view text) const;
  // One token as it is printed.
  [[nodiscard]] std::string text_of(int token) const;

 private:
  int vocabulary_;
};

}  // namespace sluice
