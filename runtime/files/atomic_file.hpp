// Output files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace sluice {

// Writes to "<path>.partial" and renames it to `path` in commit(); without a commit the partial
// file is removed and `path` stays unchanged. A path that exists and is no regular file (a pipe, a
// device) is written directly; a symbolic link is followed. Every failure throws Error(kIo)
// naming the path. One writer per path.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  // Syncs the bytes to the disk, then renames.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::filesystem::path path_;     // as the caller named it, for messages
  std::filesystem::path target_;   // links resolved
  std::filesystem::path written_;  // of fd_; equals target_ where written directly
  int fd_ = -1;
};

}  // namespace sluice
