// A regular file mapped read-only. The bytes are valid as long as no process shortens the file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

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

  // The path of the mapping of this process that has `address`; empty where there is none, or where
  // there are more than 64. Also in a signal handler: a file that has become shorter is SIGBUS.
  [[nodiscard]] static std::string_view path_at(const void* address) noexcept;

 private:
  std::span<const std::byte> bytes_;
  std::size_t place_ = 0;  // among the process's mappings
};

}  // namespace sluice
