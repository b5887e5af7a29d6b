#include "runtime/program/cli/sampling.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

// Any number that differs from every layer's random_site().
constexpr std::uint64_t kSite = 0xCD840A92;

// In [0, 1), 53 bits.
double uniform(std::uint64_t seed, std::uint64_t position) {
  const RandomKey key = {.seed = seed, .site = kSite, .step = 0};
  const auto words = philox(key, 0, position);
  const std::uint64_t bits = (std::uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

// Indices of the `count` largest, ascending.
std::vector<int> largest(std::span<const float> logits, int count) {
  std::vector<int> indices(logits.size());
  std::iota(indices.begin(), indices.end(), 0);
  if (count <= 0 || static_cast<std::size_t>(count) >= logits.size()) return indices;
  const auto at = [&](int index) { return logits[static_cast<std::size_t>(index)]; };
  std::partial_sort(indices.begin(), indices.begin() + count, indices.end(),
                    [&](int a, int b) { return at(a) != at(b) ? at(a) > at(b) : a < b; });
  indices.resize(static_cast<std::size_t>(count));
  std::ranges::sort(indices);
  return indices;
}

}  // namespace

int sample_token(std::span<const float> logits, const SamplingOptions& options,
                 std::uint64_t position) {
  if (!std::ranges::all_of(logits, [](float x) { return std::isfinite(x); })) {
    throw_error(ErrorCode::kNumeric,
                "logits of the token at position {} are not finite: the weights are "
                "damaged or the training had diverged",
                position);
  }
  const auto likeliest = std::ranges::max_element(logits);
  if (options.temperature == 0) return static_cast<int>(likeliest - logits.begin());
  const std::vector<int> candidates = largest(logits, options.top_k);
  std::vector<double> cumulative;
  cumulative.reserve(candidates.size());
  double sum = 0;
  for (const int candidate : candidates) {
    const double logit = logits[static_cast<std::size_t>(candidate)];
    sum += std::exp((logit - double{*likeliest}) / options.temperature);
    cumulative.push_back(sum);
  }
  const double target = uniform(options.seed, position) * sum;
  const auto chosen = std::ranges::upper_bound(cumulative, target);
  const auto index = std::min<std::ptrdiff_t>(chosen - cumulative.begin(),
                                              static_cast<std::ptrdiff_t>(candidates.size()) - 1);
  return candidates[static_cast<std::size_t>(index)];
}

std::vector<int> parse_tokens(std::string_view option, std::string_view text, int vocabulary) {
  constexpr std::string_view kSpace = " \t\r\n";
  std::vector<int> tokens;
  for (std::size_t at = 0; (at = text.find_first_not_of(kSpace, at)) != std::string_view::npos;) {
    const std::string_view word = text.substr(at, text.find_first_of(kSpace, at) - at);
    at += word.size();
    int& token = tokens.emplace_back(-1);
    if (parse_whole(word, token) && token >= 0 && token < vocabulary) continue;
    const bool plain = std::ranges::all_of(word, [](unsigned char c) {
      return c > ' ' && c < 0x7f;  // what may stand in a message
    });
    throw_usage(
        "option {}: '{}' is not a token of this model with --vocabulary {}; legal are "
        "numbers below it, separated by spaces",
        option, plain ? word.substr(0, 40) : "a word of other bytes", vocabulary);
  }
  return tokens;
}

std::vector<int> TokenText::prompt_tokens(std::string_view text) const {
  std::vector<int> tokens;
  if (!bytes()) {
    tokens = parse_tokens("--prompt", text, vocabulary_);
  } else {
    for (const char letter : text) tokens.push_back(static_cast<unsigned char>(letter));
  }
  const auto beyond = std::ranges::find_if(tokens, [&](int token) { return token >= vocabulary_; });
  if (beyond != tokens.end()) {
    throw_usage("option --prompt: {} is not a token of this model with --vocabulary {}", *beyond,
                vocabulary_);
  }
  if (tokens.empty()) throw_usage("option --prompt: at least one token is needed");
  return tokens;
}

std::string TokenText::text_of(int token) const {
  return bytes() ? std::string(1, static_cast<char>(token)) : fmt::format("{} ", token);
}

}  // namespace sluice
