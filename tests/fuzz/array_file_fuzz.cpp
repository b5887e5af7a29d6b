// Feeds arbitrary bytes to the readers of IDX and .npy files. The first byte chooses the reader and
// what comes before the other bytes: nothing, or a header's beginning.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <sluice/data.hpp>

#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

std::string npy_start(std::size_t bytes) {
  std::string start("\x93NUMPY\x01\0", 8);
  start += static_cast<char>(bytes & 0xFF);
  start += static_cast<char>(bytes >> 8 & 0xFF);
  return start;
}

void feed(std::uint8_t setting, std::string_view bytes) {
  static const MemoryDirectory directory;
  const bool idx = (setting & 1) != 0;
  std::string text;
  if ((setting & 2) != 0) text = idx ? std::string(2, '\0') : npy_start(bytes.size());
  text += bytes;
  const auto path = directory.write("array", text, 0);
  accepts({ErrorCode::kData}, [&] {
    const HostTensor read = idx ? read_idx(path) : read_npy(path);
    require(read.bytes.size() == read.spec.bytes());
    require(read.spec.shape.rank() <= Shape::kMaxDims);
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
