#include "runtime/files/mapped_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "comm/base/throw_error.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {

MappedFile::MappedFile(const std::filesystem::path& path, ErrorCode code) {
  const auto refuse = [&](const std::string& problem) {
    throw_error(code, "cannot read file '{}': {}", path.string(), problem);
  };
  try {
    const ReadFile file(path);  // the mapping outlives its descriptor
    if (file.bytes() == 0) return;
    void* data = ::mmap(nullptr, file.bytes(), PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
    if (data == MAP_FAILED) refuse(std::generic_category().message(errno));
    bytes_ = {static_cast<const std::byte*>(data), file.bytes()};
  } catch (const ReadProblem& problem) {
    refuse(problem.what());
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

void MappedFile::release(std::span<const std::byte> part) const {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto first = static_cast<std::size_t>(part.data() - bytes_.data());
  const std::size_t begin = (first + page - 1) / page * page;  // the mapping begins at a page
  const std::size_t end = (first + part.size()) / page * page;
  if (begin >= end) return;
  (void)::madvise(const_cast<std::byte*>(bytes_.data()) + begin, end - begin, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace sluice
