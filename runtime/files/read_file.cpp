#include "runtime/files/read_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

std::string cause_of(int error) { return std::generic_category().message(error); }

}  // namespace

ReadFile::ReadFile(const std::filesystem::path& path)
    : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_ < 0) throw ReadProblem(cause_of(errno));
  struct stat status = {};
  std::string problem;
  if (::fstat(descriptor_, &status) != 0) {
    problem = cause_of(errno);
  } else if (S_ISDIR(status.st_mode)) {
    problem = cause_of(EISDIR);
  } else if (!S_ISREG(status.st_mode)) {
    problem = "it is not a regular file";
  }
  if (!problem.empty()) {
    ::close(descriptor_);
    throw ReadProblem(problem);
  }
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

ReadFile::~ReadFile() { ::close(descriptor_); }

std::size_t ReadFile::read(std::span<std::byte> into, std::uint64_t first) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ::ssize_t got = ::pread(descriptor_, into.data() + done, into.size() - done,
                                  static_cast<::off_t>(first + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw ReadProblem(cause_of(errno));
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

std::string read_text(const std::filesystem::path& path, std::uint64_t most, ErrorCode code) {
  try {
    const ReadFile file(path);
    if (file.bytes() > most) {
      throw_error(code, "'{}' has {} bytes; legal are at most {}", path.string(), file.bytes(),
                  most);
    }
    std::string text(file.bytes(), '\0');
    text.resize(file.read(std::as_writable_bytes(std::span(text)), 0));
    return text;
  } catch (const ReadProblem& problem) {
    throw_error(code, "cannot read file '{}': {}", path.string(), problem.what());
  }
}

}  // namespace sluice
