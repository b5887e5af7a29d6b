// What the fuzzers of files share: how a reader may refuse, and a file for the fuzzer's bytes.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

#include <sluice/error.hpp>

namespace sluice {

inline void require(bool holds) {
  if (!holds) std::abort();
}

// Runs `read`. False where it throws an Error of one of `codes` with a message of one line; nothing
// else may be thrown.
template <class Read>
bool accepts(std::initializer_list<ErrorCode> codes, const Read& read) {
  try {
    read();
    return true;
  } catch (const Error& refusal) {
    bool legal = false;
    for (const ErrorCode code : codes) legal = legal || code == refusal.code();
    const std::string_view message = refusal.what();
    require(legal && !message.empty());
    for (const char c : message) require(static_cast<unsigned char>(c) >= ' ' && c != '\x7f');
    return false;
  }
}

// A directory in memory, removed when the program ends.
class MemoryDirectory {
 public:
  MemoryDirectory() {
    std::string name = "/dev/shm/sluice-fuzz-XXXXXX";
    require(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  MemoryDirectory(const MemoryDirectory&) = delete;
  MemoryDirectory& operator=(const MemoryDirectory&) = delete;
  ~MemoryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  // Replaces the file's contents by `bytes` and `zeros` zeros, of which the disk holds none.
  std::filesystem::path write(const std::string& name, std::string_view bytes,
                              std::size_t zeros = 0) const {
    const std::filesystem::path file = path_ / name;
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    require(fd >= 0);
    require(::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    if (zeros != 0) require(::ftruncate(fd, static_cast<off_t>(bytes.size() + zeros)) == 0);
    require(::close(fd) == 0);
    return file;
  }

 private:
  std::filesystem::path path_;
};

inline std::string_view as_text(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace sluice
