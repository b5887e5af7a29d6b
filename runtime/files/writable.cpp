#include "runtime/files/writable.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>
#include <system_error>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace fs = std::filesystem;

fs::path nearest_existing(const fs::path& directory) {
  std::error_code error;
  fs::path there = fs::absolute(directory, error);
  while (!fs::exists(there, error) && !fs::is_symlink(there, error) && there.has_relative_path()) {
    there = there.parent_path();
  }
  return there;
}

void require_writable_directory(const fs::path& directory) {
  const auto fail = [&](const std::string& cause) {
    throw_error(ErrorCode::kIo, "cannot write to directory '{}': {}", directory.string(), cause);
  };
  if (directory.empty()) fail("the name is empty");
  const fs::path there = nearest_existing(directory);
  std::error_code error;
  if (!fs::exists(there, error)) {
    fail("it is a link to '" + fs::read_symlink(there, error).string() + "', which is not there");
  }
  // Processes that check at the same time use different names.
  std::string probe = (there / kWritablePrefix).string() + "XXXXXX";
  const int fd = ::mkstemp(probe.data());
  if (fd < 0) fail(std::generic_category().message(errno));
  ::close(fd);
  ::unlink(probe.c_str());
}

void require_writable_file(const fs::path& file) {
  const auto fail = [&](int error) {
    throw_error(ErrorCode::kIo, "cannot write file '{}': {}", file.string(),
                std::generic_category().message(error));
  };
  const int flags = O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK;
  int fd = ::open(file.c_str(), flags);
  // A pipe without a reader can be written to later.
  if (fd < 0 && errno == ENXIO) return;
  if (fd >= 0) {
    ::close(fd);
    return;
  }
  if (errno != ENOENT) fail(errno);
  fd = ::open(file.c_str(), flags | O_CREAT | O_EXCL, 0666);
  if (fd < 0 && errno == EEXIST) return;  // another process has just created it
  if (fd < 0) fail(errno);
  ::close(fd);
  ::unlink(file.c_str());
}

void require_replaceable_file(const fs::path& file, std::string_view begin, std::string_view what) {
  require_writable_file(file);
  std::error_code error;
  if (!fs::is_regular_file(file, error) || fs::file_size(file, error) == 0) return;
  std::string found(begin.size(), '\0');
  std::ifstream(file, std::ios::binary)
      .read(found.data(), static_cast<std::streamsize>(found.size()));
  if (found == begin) return;
  throw_error(ErrorCode::kIo,
              "'{}' holds something else than a {}, which would replace it; give another file, or "
              "remove that",
              file.string(), what);
}

}  // namespace sluice
