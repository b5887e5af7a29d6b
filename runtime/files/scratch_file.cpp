#include "runtime/files/scratch_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/checksum.hpp"

namespace sluice {
namespace {

// Without a name from the start where the file system can, else from here on.
int open_nameless(const std::filesystem::path& directory, int flags) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
  std::string name = directory / ".sluice-scratch-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named < 0) return named;
  ::unlink(name.c_str());
  if (::fcntl(named, F_SETFL, flags) == 0) return named;
  const int error = errno;
  ::close(named);
  errno = error;
  return -1;
}

// Calls the system until all of `bytes` are moved; the number that the last call gave if it is
// none.
template <typename Call>
ssize_t move_all(std::size_t bytes, const Call& call) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t moved = call(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved;
    done += static_cast<std::size_t>(moved);
  }
  return 1;
}

// Takes the room on the disk; where a file system cannot, it takes it as it is written. An errno,
// or 0.
int reserve(int fd, std::size_t bytes) {
  const auto size = static_cast<off_t>(bytes);
  int done = -1;
  do done = bytes == 0 ? 0 : ::fallocate(fd, 0, 0, size);
  while (done != 0 && errno == EINTR);
  if (done != 0 && errno == EOPNOTSUPP) done = ::ftruncate(fd, size);
  return done == 0 ? 0 : errno;
}

}  // namespace

ScratchFile::ScratchFile(std::filesystem::path directory, bool cached, std::size_t bytes,
                         std::size_t grain)
    : directory_(std::move(directory)), grain_(grain) {
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  if (error) fail("cannot make the directory", error.value());
  open(cached);
  if (const int full = reserve(fd_, bytes); full != 0) {
    ::close(fd_);
    fail(fmt::format("cannot take {:.1f} MiB", static_cast<double>(bytes) / (1 << 20)), full);
  }
  checksums_.resize((bytes + grain - 1) / grain);
}

ScratchFile::~ScratchFile() { ::close(fd_); }

void ScratchFile::open(bool cached) {
  fd_ = open_nameless(directory_, cached ? 0 : O_DIRECT);
  if (fd_ >= 0) return;
  if (!cached && errno == EINVAL) {
    throw_usage(
        "the file system of '{}' does not read and write past the page cache (O_DIRECT); legal: a "
        "directory of another one, or disk-cached=DIR, which takes memory of the page cache",
        directory_.string());
  }
  fail("cannot make a file", errno);
}

void ScratchFile::fail(const std::string& what, int error) const {
  throw_error(ErrorCode::kIo, "'{}', for what is offloaded: {}: {}", directory_.string(), what,
              std::generic_category().message(error));
}

template <typename Bytes, typename Each>
void ScratchFile::in_pieces(std::size_t offset, Bytes bytes, const Each& each) {
  for (; !bytes.empty(); offset += std::min(kPiece, bytes.size()),
                         bytes = bytes.subspan(std::min(kPiece, bytes.size()))) {
    each(offset, bytes.first(std::min(kPiece, bytes.size())));
  }
}

void ScratchFile::write(std::size_t offset, std::span<const std::byte> bytes) {
  in_pieces(offset, bytes, [&](std::size_t at, std::span<const std::byte> piece) {
    checksums_[at / grain_] = checksum_64(piece, at);
    const ssize_t moved = move_all(piece.size(), [&](std::size_t done) {
      return ::pwrite(fd_, piece.data() + done, piece.size() - done, static_cast<off_t>(at + done));
    });
    if (moved > 0) return;
    fail(fmt::format("cannot write {} bytes at {}", piece.size(), at), moved < 0 ? errno : ENOSPC);
  });
}

void ScratchFile::read(std::size_t offset, std::span<std::byte> bytes) {
  in_pieces(offset, bytes, [&](std::size_t at, std::span<std::byte> piece) {
    const ssize_t moved = move_all(piece.size(), [&](std::size_t done) {
      return ::pread(fd_, piece.data() + done, piece.size() - done, static_cast<off_t>(at + done));
    });
    if (moved <= 0) {
      fail(fmt::format("cannot read {} bytes at {}", piece.size(), at), moved < 0 ? errno : EIO);
    }
    if (checksum_64(piece, at) == checksums_[at / grain_]) return;
    throw_error(ErrorCode::kIo,
                "'{}', for what is offloaded: {} bytes at {} are not those that were written; the "
                "disk is damaged",
                directory_.string(), piece.size(), at);
  });
}

}  // namespace sluice
