#include "runtime/files/atomic_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const char* what, const fs::path& path, int error) {
  throw_error(ErrorCode::kIo, "cannot {} '{}': {}", what, path.string(),
              std::generic_category().message(error));
}

// Pipes and some file systems cannot be synced; that is no error.
bool synced(int fd) {
  return ::fsync(fd) == 0 || errno == EINVAL || errno == EROFS || errno == ENOTSUP;
}

}  // namespace

AtomicFile::AtomicFile(const fs::path& path) : path_(path), target_(path) {
  std::error_code error;  // the open below reports a missing file
  if (fs::is_symlink(fs::symlink_status(path, error))) target_ = fs::weakly_canonical(path, error);
  const fs::file_status status = fs::status(target_, error);
  if (fs::is_directory(status)) fail("write", path_, EISDIR);
  const bool direct = fs::exists(status) && !fs::is_regular_file(status);
  written_ = target_;
  if (!direct) written_ += ".partial";
  fd_ = ::open(written_.c_str(), O_WRONLY | O_CLOEXEC | (direct ? 0 : O_CREAT | O_TRUNC), 0666);
  if (fd_ < 0) fail("write", path_, errno);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (written_ != target_) ::unlink(written_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  // Linux writes at most 2^31 - 4096 bytes a call.
  constexpr std::size_t kMostPerCall = std::size_t{1} << 30;
  while (!bytes.empty()) {
    const ::ssize_t n = ::write(fd_, bytes.data(), std::min(bytes.size(), kMostPerCall));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write", path_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void AtomicFile::write(std::string_view text) {
  write(std::as_bytes(std::span<const char>(text.data(), text.size())));
}

void AtomicFile::commit() {
  const bool direct = written_ == target_;
  if (!synced(fd_)) fail("write", path_, errno);
  const int closed = ::close(std::exchange(fd_, -1));
  const int close_error = errno;
  if (closed != 0 || (!direct && ::rename(written_.c_str(), target_.c_str()) != 0)) {
    const int error = closed != 0 ? close_error : errno;
    if (!direct) ::unlink(written_.c_str());
    fail("write", path_, error);
  }
}

void write_file(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void sync_directory(const fs::path& directory) {
  const fs::path& path = directory.empty() ? fs::path(".") : directory;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open directory", path, errno);
  const int error = synced(fd) ? 0 : errno;
  ::close(fd);
  if (error != 0) fail("sync directory", path, error);
}

void rename_durably(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail("rename", from, errno);
  sync_directory(to.parent_path());
  if (from.parent_path() != to.parent_path()) sync_directory(from.parent_path());
}

}  // namespace sluice
