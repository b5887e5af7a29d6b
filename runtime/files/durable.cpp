#include "runtime/files/durable.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const char* what, const fs::path& path, int error) {
  throw_error(ErrorCode::kIo, "cannot {} '{}': {}", what, path.string(),
              std::generic_category().message(error));
}

}  // namespace

void sync_directory(const fs::path& directory) {
  const fs::path& path = directory.empty() ? fs::path(".") : directory;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open directory", path, errno);
  const int synced = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  if (synced != 0 && error != EINVAL && error != EROFS && error != ENOTSUP) {
    fail("sync directory", path, error);
  }
}

void rename_durably(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail("rename", from, errno);
  sync_directory(to.parent_path());
  if (from.parent_path() != to.parent_path()) sync_directory(from.parent_path());
}

}  // namespace sluice
