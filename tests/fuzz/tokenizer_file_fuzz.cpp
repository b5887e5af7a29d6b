// Feeds arbitrary bytes to the reader of tokenizer.json. The first byte sets what is around them;
// what is read decodes its own ids and others.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/models/token_decoder.hpp"
#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

void use(const TokenizerFile& file, SpecialTokens special) {
  TokenDecoder decoder(file, special), again(file, special);
  std::string text, repeated;
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& [id, token] : file.tokens) text += decoder.add(id) + decoder.add(id + 1);
    text += decoder.finish();
  }
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& [id, token] : file.tokens) repeated += again.add(id) + again.add(id + 1);
    repeated += again.finish();
  }
  require(text == repeated && is_utf8(text));
}

void feed(std::uint8_t settings, std::string_view bytes) {
  static const MemoryDirectory directory;
  std::string text(bytes);
  if ((settings & 1) != 0) {
    text = R"({"model":{"vocab":{"a":0,"\u0120b":1,"<0x41>":2,"\u00c3":3,"\u2581":4}},"decoder":)" +
           text + "}";
  } else if ((settings & 2) != 0) {
    text = R"({"decoder":{"type":"ByteLevel"},"added_tokens":[)" + text +
           R"(],"model":{"vocab":{"a":0,"b":1}}})";
  }
  const auto path = directory.write("tokenizer.json", text);
  accepts({ErrorCode::kWeights}, [&] {
    const TokenizerFile file = read_tokenizer_file(path);
    use(file, SpecialTokens::kSkip);
    use(file, SpecialTokens::kShow);
  });
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return -1;
  sluice::feed(data[0], sluice::as_text(data + 1, size - 1));
  return 0;
}
