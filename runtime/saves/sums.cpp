#include "runtime/saves/sums.hpp"

#include <fmt/format.h>

#include <sstream>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {

std::string sum_line(std::span<const std::byte> bytes, const std::string& name) {
  return fmt::format("{}  {}\n", sha256_hex(bytes), name);
}

std::string sums_of(const std::vector<std::filesystem::path>& files) {
  std::string sums;
  for (const std::filesystem::path& file : files) {
    sums += sum_line(MappedFile(file, ErrorCode::kIo).bytes(), file.filename().string());
  }
  return sums;
}

std::size_t require_sums(const std::filesystem::path& directory) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 24, kDigits = 64;
  const std::filesystem::path path = directory / kSumsName;
  std::istringstream lines(read_text(path, kMostBytes, ErrorCode::kWeights));
  std::size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const std::string name = line.substr(std::min(line.size(), kDigits + 2));
    if (!is_save_file_name(name)) {
      throw_error(ErrorCode::kWeights, "'{}' is damaged: '{}' is no sum of a model's file",
                  path.string(), line);
    }
    const std::string found =
        sum_line(MappedFile(directory / name, ErrorCode::kWeights).bytes(), name);
    if (found == line + '\n') continue;
    throw_error(ErrorCode::kWeights, "'{}' is damaged: expected sha256 {}, found {}",
                (directory / name).string(), line.substr(0, kDigits), found.substr(0, kDigits));
  }
  return count;
}

}  // namespace sluice
