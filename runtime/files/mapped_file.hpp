// A regular file mapped read-only. The bytes are valid as long as no process shortens the file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include <sluice/error.hpp>

namespace sluice {

// Move-only owner of the mapping. Safe to read from several threads.
class MappedFile {
 public:
  // Throws Error(code) naming the path where it is missing, unreadable, a directory, or anything
  // else that is not a regular file. An empty file gives empty bytes.
  MappedFile(const std::filesystem::path& path, ErrorCode code);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  // Whole pages within `part` of bytes() may leave this process's memory; they stay readable.
  void release(std::span<const std::byte> part) const;

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace sluice
