#include "runtime/files/mapped_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "comm/base/throw_error.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {
namespace {

struct Mapping {
  std::atomic<const std::byte*> first = nullptr;
  std::atomic<std::size_t> size = 0;  // 0: `path` is not there
  std::array<char, 256> path = {};
};
constinit std::array<Mapping, 64> mappings = {};

std::size_t add_mapping(std::span<const std::byte> bytes, const std::string& path) {
  for (std::size_t place = 0; place < mappings.size(); ++place) {
    Mapping& each = mappings[place];
    const std::byte* none = nullptr;
    if (!each.first.compare_exchange_strong(none, bytes.data())) continue;
    each.path[path.copy(each.path.data(), each.path.size() - 1)] = '\0';
    each.size = bytes.size();
    return place;
  }
  return mappings.size();
}

void remove_mapping(std::size_t place) {
  if (place == mappings.size()) return;
  mappings[place].size = 0;
  mappings[place].first = nullptr;
}

}  // namespace

std::string_view MappedFile::path_at(const void* address) noexcept {
  for (const Mapping& each : mappings) {
    const auto offset = reinterpret_cast<std::uintptr_t>(address) -
                        reinterpret_cast<std::uintptr_t>(each.first.load());
    if (offset < each.size) return each.path.data();
  }
  return {};
}

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
    place_ = add_mapping(bytes_, path.string());
  } catch (const ReadProblem& problem) {
    refuse(problem.what());
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), place_(other.place_) {}

void MappedFile::release(std::span<const std::byte> part) const {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto first = static_cast<std::size_t>(part.data() - bytes_.data());
  const std::size_t begin = (first + page - 1) / page * page;  // the mapping begins at a page
  const std::size_t end = (first + part.size()) / page * page;
  if (begin >= end) return;
  (void)::madvise(const_cast<std::byte*>(bytes_.data()) + begin, end - begin, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  remove_mapping(place_);
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace sluice
