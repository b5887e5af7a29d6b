// Output files that appear whole or not at all, and renames that last through a crash of the host.
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
  std::filesystem::path path_;     // as the caller named it, for messages
  std::filesystem::path target_;   // links resolved
  std::filesystem::path written_;  // of fd_; equals target_ where written directly
  int fd_ = -1;
};

// Writes and commits an AtomicFile that holds `text`.
void write_file(const std::filesystem::path& path, std::string_view text);

// Syncs a directory's entries to its disk. Throws Error(kIo) naming it. File systems that cannot
// sync a directory are no error.
void sync_directory(const std::filesystem::path& directory);
// Renames within one directory or between two, and syncs them. Throws Error(kIo).
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace sluice
