#include "runtime/checkpoint/verify.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

struct Range {
  std::uint64_t first = 0, count = 0;
};

// Hashes pieces of a file. Throws Error(kWeights) where they cannot be read.
class HashedFile {
 public:
  explicit HashedFile(fs::path path) : path_(std::move(path)) {
    in_words([&] { file_.emplace(path_); });
  }

  [[nodiscard]] const fs::path& path() const { return path_; }
  // Of `count` bytes from `first` on.
  [[nodiscard]] std::string hash(std::uint64_t first, std::uint64_t count) {
    constexpr std::size_t kMost = std::size_t{1} << 20;
    buffer_.resize(kMost);
    Checksum checksum;
    while (count > 0) {
      const std::span<std::byte> piece =
          std::span(buffer_).first(std::min<std::uint64_t>(count, kMost));
      std::size_t got = 0;
      in_words([&] { got = file_->read(piece, first); });
      if (got < piece.size()) {
        throw_error(ErrorCode::kWeights, "'{}' is damaged: it ends after {} bytes", path_.string(),
                    first + got);
      }
      checksum.add(piece);
      first += got;
      count -= got;
    }
    return checksum.finish();
  }

 private:
  template <typename Body>
  void in_words(const Body& body) const {
    try {
      body();
    } catch (const ReadProblem& problem) {
      throw_error(ErrorCode::kWeights, "cannot read '{}': {}", path_.string(), problem.what());
    }
  }

  fs::path path_;
  std::optional<ReadFile> file_;
  std::vector<std::byte> buffer_;
};

// Where each tensor of a weights file lies in it.
std::map<std::string, Range> ranges_of(const SafetensorsFile& file, std::uint64_t bytes) {
  std::map<std::string, Range> ranges;
  std::uint64_t total = 0;
  for (const SafetensorsFile::Entry& entry : file.entries()) total += entry.bytes.size();
  std::uint64_t at = bytes - total;  // entries follow the header without gaps
  for (const SafetensorsFile::Entry& entry : file.entries()) {
    ranges[entry.name] = {at, entry.bytes.size()};
    at += entry.bytes.size();
  }
  return ranges;
}

bool overlap(const Range& a, const Range& b) {
  return a.first < b.first + b.count && b.first < a.first + a.count;
}

// The tensors in a damaged piece, where the file's header is sound: ", in tensor a, b".
std::string tensors_in(const fs::path& directory, const HashPiece& piece, std::uint64_t bytes) {
  std::vector<std::string> names;
  try {
    const SafetensorsFile file(directory / piece.file);
    for (const auto& [name, range] : ranges_of(file, bytes)) {
      if (overlap(range, {piece.first, piece.count})) names.push_back(name);
    }
  } catch (const Error&) {
    return "";
  }
  if (names.empty()) return "";
  constexpr std::size_t kMost = 3;
  const std::size_t more = names.size() - std::min(names.size(), kMost);
  names.resize(std::min(names.size(), kMost));
  return fmt::format(", in tensor {}{}", joined(names, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

std::vector<HashPiece> pieces_of(const SavedFile& file) {
  if (file.blocks.empty()) return {{file.name, 0, file.bytes, file.hash}};
  std::vector<HashPiece> pieces;
  for (std::size_t i = 0; i < file.blocks.size(); ++i) {
    const std::uint64_t first = i * kHashBlock;
    pieces.push_back({file.name, first, std::min<std::uint64_t>(kHashBlock, file.bytes - first),
                      file.blocks[i]});
  }
  return pieces;
}

}  // namespace

std::vector<HashPiece> hash_pieces(const SaveState& state) {
  std::vector<HashPiece> pieces;
  for (const SavedFile& file : state.files) {
    std::vector<HashPiece> more = pieces_of(file);
    std::move(more.begin(), more.end(), std::back_inserter(pieces));
  }
  return pieces;
}

std::vector<HashPiece> hash_pieces_of(const fs::path& directory, const SaveState& state,
                                      const std::set<std::string>& tensors) {
  std::map<std::string, std::set<std::string>> wanted;  // by file
  std::set<std::string> with_tensors;
  for (const SavedTensor& tensor : state.tensors) {
    with_tensors.insert(tensor.file);
    if (tensors.contains(tensor.name)) wanted[tensor.file].insert(tensor.name);
  }
  std::vector<HashPiece> pieces;
  for (const SavedFile& file : state.files) {
    if (with_tensors.contains(file.name) && !wanted.contains(file.name)) continue;
    const std::vector<HashPiece> all = pieces_of(file);
    if (all.size() == 1) {
      pieces.push_back(all.front());
      continue;
    }
    const std::map<std::string, Range> ranges =
        ranges_of(SafetensorsFile(directory / file.name), file.bytes);
    std::uint64_t data = file.bytes;
    for (const auto& [name, range] : ranges) data = std::min(data, range.first);
    for (const HashPiece& piece : all) {
      const Range where = {piece.first, piece.count};
      bool needed = overlap(where, {0, data});
      for (const std::string& name : wanted[file.name]) {
        const auto range = ranges.find(name);
        needed = needed || (range != ranges.end() && overlap(where, range->second));
      }
      if (needed) pieces.push_back(piece);
    }
  }
  return pieces;
}

void require_complete(const fs::path& directory, const SaveState& state) {
  for (const SavedFile& file : state.files) {
    const fs::path path = directory / file.name;
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::is_regular_file(status)) {
      throw_error(ErrorCode::kWeights, "'{}' is {}", path.string(),
                  fs::exists(status) ? "no regular file" : "missing");
    }
    const std::uint64_t bytes = fs::file_size(path, error);
    if (error || bytes != file.bytes) {
      throw_error(ErrorCode::kWeights, "'{}' is damaged: expected {} bytes, found {}",
                  path.string(), file.bytes, error ? error.message() : std::to_string(bytes));
    }
  }
}

void require_hashes(const fs::path& directory, const SaveState& state,
                    const std::vector<HashPiece>& pieces) {
  std::optional<HashedFile> file;
  for (const HashPiece& piece : pieces) {
    const fs::path path = directory / piece.file;
    if (!file || file->path() != path) file.emplace(path);
    const std::string found = file->hash(piece.first, piece.count);
    if (found == piece.expected) continue;
    const auto saved = std::find_if(state.files.begin(), state.files.end(),
                                    [&](const SavedFile& each) { return each.name == piece.file; });
    throw_error(ErrorCode::kWeights,
                "'{}' is damaged: bytes {} to {}{}: expected hash {}, found {}", path.string(),
                piece.first, piece.first + piece.count,
                tensors_in(directory, piece, saved == state.files.end() ? 0 : saved->bytes),
                piece.expected, found);
  }
}

void require_headers(const fs::path& directory, const SaveState& state,
                     const std::set<std::string>& files) {
  std::map<std::string, std::map<std::string, TensorSpec>> expected;  // by file
  for (const SavedTensor& tensor : state.tensors) {
    if (files.empty() || files.contains(tensor.file)) {
      expected[tensor.file][tensor.name] = tensor.spec;
    }
  }
  for (const auto& [name, tensors] : expected) {
    const fs::path path = directory / name;
    const SafetensorsFile file(path);
    std::size_t found = 0;
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      const auto tensor = tensors.find(entry.name);
      if (tensor == tensors.end() || tensor->second != entry.spec) {
        throw_error(ErrorCode::kWeights, "'{}': tensor '{}' is {}, but state.json says {}",
                    path.string(), entry.name, to_string(entry.spec),
                    tensor == tensors.end() ? "that it is not there" : to_string(tensor->second));
      }
      ++found;
    }
    if (found != tensors.size()) {
      throw_error(ErrorCode::kWeights, "'{}' holds {} tensors, but state.json says {}",
                  path.string(), found, tensors.size());
    }
  }
}

void require_sound(const fs::path& directory, const SaveState& state, bool hashes) {
  require_complete(directory, state);
  if (hashes) require_hashes(directory, state, hash_pieces(state));
  require_headers(directory, state);
}

}  // namespace sluice
