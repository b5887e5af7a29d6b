#include "runtime/files/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

// Closes on scope exit; the mapping outlives the descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void refuse(ErrorCode code, const std::filesystem::path& path, int error) {
  throw_error(code, "cannot read file '{}': {}", path.string(),
              std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path, ErrorCode code) {
  // Without O_NONBLOCK a named pipe would block here instead of being refused below.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) refuse(code, path, errno);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) refuse(code, path, errno);
  if (S_ISDIR(status.st_mode)) refuse(code, path, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    throw_error(code,
                "cannot read file '{}': it is not a regular file, which is "
                "needed to map it into memory",
                path.string());
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) refuse(code, path, errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace sluice
