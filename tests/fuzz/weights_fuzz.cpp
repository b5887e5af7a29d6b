// Feeds arbitrary bytes to the readers of safetensors files. The first byte says what the others
// are: 'F' a file; 'H' its header; 'D' an index and the headers of two parts, separated by lines
// "--". A header gets its length in front and, after it, as many bytes of data as the largest
// number in it says. What is accepted is read to the last byte, written, and must read back equal.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/weights/weights.hpp"
#include "tests/fuzz/fuzz_tools.hpp"
#include "tests/runtime/named_tensors.hpp"

namespace sluice {
namespace {

const MemoryDirectory& one_file() {
  static const MemoryDirectory directory;
  return directory;
}
const MemoryDirectory& parts() {
  static const MemoryDirectory directory;
  return directory;
}

bool equal(const SafetensorsFile::Entry& one, const SafetensorsFile::Entry& two) {
  return one.name == two.name && one.spec == two.spec &&
         std::equal(one.bytes.begin(), one.bytes.end(), two.bytes.begin(), two.bytes.end());
}

// Writing sorts tensors, so they are compared by name.
void require_written_equal(const WeightsDirectory& weights, const SafetensorsFile& file) {
  std::vector<std::vector<std::byte>> values;
  std::vector<NamedTensor> tensors;
  for (const SafetensorsFile::Entry& entry : file.entries()) {
    void* data = values.emplace_back(entry.bytes.begin(), entry.bytes.end()).data();
    tensors.push_back({entry.name, {data, entry.spec}});
  }
  write_safetensors(one_file().path() / "again.safetensors", tensors, file.metadata());
  const WeightsDirectory again(one_file().path(), "again");
  require(SafetensorsFile(one_file().path() / "again.safetensors").metadata() == file.metadata());
  require(again.names() == weights.names());
  for (const std::string& name : weights.names()) {
    require(equal(*weights.find(name), *again.find(name)));
  }
}

// What the program does with weights.
void use(const WeightsDirectory& weights) {
  for (const std::string& name : weights.names()) {
    const SafetensorsFile::Entry& entry = *weights.find(name);
    require(entry.bytes.size() == entry.spec.bytes());
  }
}

void feed_file(std::string_view bytes) {
  const auto path = one_file().write("model.safetensors", bytes);
  accepts({ErrorCode::kWeights}, [&] {
    const SafetensorsFile file(path);
    const WeightsDirectory weights(one_file().path(), "model");
    use(weights);
    require_written_equal(weights, file);
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      const std::vector<std::byte> before(entry.bytes.begin(), entry.bytes.end());
      file.release(entry);  // its pages come back
      require(std::equal(before.begin(), before.end(), entry.bytes.begin()));
    }
  });
}

std::string framed(std::string_view header) {
  std::size_t most = 0, number = 0;
  for (const char c : header) {
    const bool digit = c >= '0' && c <= '9';
    number =
        digit ? std::min<std::size_t>(number * 10 + static_cast<std::size_t>(c - '0'), 9999) : 0;
    if (number < 9999) most = std::max(most, number);
  }
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += header;
  for (std::size_t i = 0; i < most; ++i) bytes += static_cast<char>(i * 37);
  return bytes;
}

void feed_directory(std::string_view text) {
  std::array<std::string_view, 3> pieces;
  for (std::string_view& piece : pieces) {
    constexpr std::string_view kLine = "\n--\n";
    const std::size_t end = text.find(kLine);
    piece = text.substr(0, end);
    text = end == std::string_view::npos ? "" : text.substr(end + kLine.size());
  }
  parts().write("model.safetensors.index.json", pieces[0]);
  parts().write("model-00001-of-00002.safetensors", framed(pieces[1]));
  parts().write("model-00002-of-00002.safetensors", framed(pieces[2]));
  accepts({ErrorCode::kWeights}, [] {
    const WeightsDirectory weights(parts().path(), "model");
    use(weights);
  });
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest = sluice::as_text(data + 1, size - 1);
  if (data[0] == 'F') sluice::feed_file(rest);
  if (data[0] == 'H') sluice::feed_file(sluice::framed(rest));
  if (data[0] == 'D') sluice::feed_directory(rest);
  return data[0] == 'F' || data[0] == 'H' || data[0] == 'D' ? 0 : -1;
}
