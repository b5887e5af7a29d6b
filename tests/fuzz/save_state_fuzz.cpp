// Feeds arbitrary bytes to the reader of state.json: as they are, and as the text before the hash
// that such a file ends with. What it accepts must read back equal after to_json_text.
#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "runtime/checkpoint/save_state.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/checksum.hpp"
#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

auto fields(const SavedFile& file) {
  return std::tie(file.name, file.bytes, file.hash, file.blocks);
}
auto fields(const SavedTensor& tensor) {
  return std::tie(tensor.name, tensor.file, tensor.spec, tensor.parameter, tensor.first_row,
                  tensor.rows, tensor.transposed, tensor.range);
}
auto fields(const SaveState& state) {
  return std::tie(state.save, state.run, state.sequence, state.step, state.time, state.weights_only,
                  state.layout, state.arithmetic, state.options, state.model, state.data,
                  state.skipped, state.user);
}

template <class Items>
void require_equal(const Items& one, const Items& two) {
  require(one.size() == two.size());
  for (std::size_t i = 0; i < one.size(); ++i) require(fields(one[i]) == fields(two[i]));
}

// The bytes that a file's pieces cover are the file's, each once.
void require_whole(const SaveState& state) {
  std::uint64_t bytes = 0, covered = 0;
  for (const SavedFile& file : state.files) bytes += file.bytes;
  for (const HashPiece& piece : hash_pieces(state)) covered += piece.count;
  require(bytes == covered);
}

void feed(std::string_view text) {
  SaveState state;
  if (!accepts({ErrorCode::kWeights}, [&] { state = parse_save_state(text, "state.json"); }))
    return;
  const SaveState again = parse_save_state(to_json_text(state), "again.json");
  require(fields(state) == fields(again));
  require_equal(state.files, again.files);
  require_equal(state.tensors, again.tensors);
  require_whole(state);
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = sluice::as_text(data, size);
  sluice::feed(text);
  sluice::feed(fmt::format("{},\n \"check\": \"{}\"\n}}\n", text,
                           sluice::checksum_hex(std::as_bytes(std::span(text)))));
  return 0;
}
