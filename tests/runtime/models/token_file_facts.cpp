// Prints what TokenFile reads of the file that is its argument, for prepare_tokens_test.py.
#include <cstdio>
#include <exception>

#include <sluice/data.hpp>

int main(int, char** argv) {
  try {
    const sluice::TokenFile file(argv[1], 0);
    std::printf("%d %d %d %d %s\n", static_cast<int>(file.format()), file.token_bytes(),
                file.vocabulary(), file.end_of_text(), file.tokenizer_sha256().c_str());
    for (std::int64_t i = 0; i < file.size(); ++i) std::printf("%d ", file.token(i));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
