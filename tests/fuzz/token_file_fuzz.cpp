// Feeds arbitrary bytes to the reader of token files and to the source of samples over it. The
// first eight bytes are the settings (below), the others the file.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/data.hpp>

#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

constexpr std::size_t kSettings = 8;

// Header of llm.c for the tokens that follow it.
std::string llm_c_header(std::size_t bytes, bool wide) {
  const std::int32_t words[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1,
                                 static_cast<std::int32_t>(bytes / (wide ? 4 : 2))};
  std::string header(256 * sizeof(std::int32_t), '\0');
  std::memcpy(header.data(), words, sizeof(words));
  return header;
}

// The header of TokenFormat::kSluice.
std::string own_header(std::size_t bytes, bool wide, std::uint32_t vocabulary) {
  std::string header = "\xffSLTOKEN";
  header.resize(256, '\0');
  const std::uint32_t words[6] = {
      1, wide ? 4U : 2U, static_cast<std::uint32_t>(bytes / (wide ? 4 : 2)),
      0, vocabulary,     0xFFFFFFFF};
  std::memcpy(header.data() + 8, words, sizeof(words));
  return header;
}

void require_samples(const DataSource& source, Phase phase, int context, int vocabulary) {
  constexpr std::int64_t kSamples = 3;
  std::vector<std::int32_t> inputs(static_cast<std::size_t>(kSamples * context)), targets = inputs;
  const TensorSpec spec = source.input_specs(kSamples).at(0);
  require(spec.bytes() == inputs.size() * sizeof(std::int32_t));
  for (const std::uint64_t step : {std::uint64_t{1}, ~std::uint64_t{0}}) {
    const SampleRange range{static_cast<std::int64_t>(step >> 2), kSamples};
    const Tensor into{inputs.data(), spec}, shifted{targets.data(), spec};
    source.inputs(phase, step, range, {&into, 1});
    source.targets(phase, step, range, {&shifted, 1});
    for (const std::int32_t token : inputs) require(token >= 0 && token < vocabulary);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool last = (i + 1) % static_cast<std::size_t>(context) == 0;
      require(last || targets[i] == inputs[i + 1]);
    }
  }
}

void use(const std::shared_ptr<TokenFile>& file, int context, int vocabulary) {
  require(file->size() > 0 && file->train_size() >= 0 && file->train_size() <= file->size());
  std::vector<std::int32_t> tokens(
      static_cast<std::size_t>(std::min<std::int64_t>(file->size(), 4096)));
  file->copy(file->size() - static_cast<std::int64_t>(tokens.size()), tokens);
  require(tokens.back() == file->token(file->size() - 1));
  const int most = *std::max_element(tokens.begin(), tokens.end());
  if (file->size() <= 4096) require(most == file->largest_token());
  require(file->identity("data").size() == 2);
  require(file->vocabulary() >= 0 && file->end_of_text() < std::max(1, file->vocabulary()));
  require(file->tokenizer_sha256().empty() || file->tokenizer_sha256().size() == 64);
  accepts({ErrorCode::kData, ErrorCode::kUsage}, [&] {
    const auto source = make_token_source(file, context, vocabulary, 1);
    require_samples(*source, Phase::kTrain, context, vocabulary);
    require_samples(*source, Phase::kEvaluate, context, vocabulary);
  });
}

void feed(const std::uint8_t* settings, std::string_view bytes) {
  static const MemoryDirectory directory;
  const bool binary = (settings[0] & 1) != 0, header = (settings[0] & 2) != 0;
  const bool own = (settings[0] & 4) != 0, wide = (settings[0] & 8) != 0;
  const std::size_t zeros = (settings[0] & 0xF0) == 0xF0 ? std::size_t{1} << 20 : 0;
  std::string text;
  if (header) text = llm_c_header(bytes.size() + zeros, wide);
  if (header && own) {
    const auto vocabulary = static_cast<std::uint32_t>(settings[7] << 9 | settings[6] >> 1);
    text = own_header(bytes.size() + zeros, wide, vocabulary);
  }
  text += bytes;
  const auto path = directory.write(binary ? "tokens.bin" : "tokens.txt", text, zeros);
  const double share = (settings[1] - 1) / 254.0;  // slightly beyond the legal ones too
  const int context = settings[2] | (settings[3] & 15) << 8;
  // A large file has every vocabulary: a search of all its tokens would slow the fuzzer down.
  const int vocabulary =
      zeros != 0 ? 65536 : settings[4] | settings[5] << 8 | (settings[6] & 1) << 16;
  accepts({ErrorCode::kData, ErrorCode::kUsage},
          [&] { use(std::make_shared<TokenFile>(path, share), context, vocabulary); });
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < sluice::kSettings) return -1;
  sluice::feed(data, sluice::as_text(data + sluice::kSettings, size - sluice::kSettings));
  return 0;
}
