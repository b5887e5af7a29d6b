// A regular file that is read piece by piece. Unlike a mapped one, a file that shrinks or whose
// disk fails does not end the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>

#include <sluice/error.hpp>

namespace sluice {

// Why a file cannot be read, such as "No such file or directory"; without its name.
struct ReadProblem : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ReadFile {
 public:
  // Throws ReadProblem for what is missing or unreadable, and for what is not a regular file. Does
  // not wait for the other end of a named pipe.
  explicit ReadFile(const std::filesystem::path& path);
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  // When it was opened.
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] int descriptor() const { return descriptor_; }
  // Fills `into` with the bytes from `first` on. Returns how many there are: fewer than
  // into.size() at the end of the file. Throws ReadProblem.
  std::size_t read(std::span<std::byte> into, std::uint64_t first) const;

 private:
  int descriptor_;
  std::uint64_t bytes_ = 0;
};

// The whole of a file of at most `most` bytes. Throws Error(code) naming the file for what ReadFile
// refuses, and for a larger file before any of it is read.
[[nodiscard]] std::string read_text(const std::filesystem::path& path, std::uint64_t most,
                                    ErrorCode code);

}  // namespace sluice
