// A file without a name, for what need not outlive the process: nothing is left of it after a kill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace sluice {

// Threads may read and write different bytes at a time. Errors are of code kIo unless said
// otherwise, and name the directory.
class ScratchFile {
 public:
  // Memory, sizes and offsets of all calls are multiples of it.
  static constexpr std::size_t kAlignment = 4096;
  // Bytes that have one checksum, and that one call of the system moves, at most.
  static constexpr std::size_t kPiece = std::size_t{4} << 20;

  // In `directory`, which is made where it is not there. Takes the room of `bytes` on the disk at
  // once. `cached`: through the system's page cache; else past it (O_DIRECT), where a file system
  // that cannot is Error(kUsage). Offsets of calls are multiples of `grain`: a checksum for each.
  ScratchFile(std::filesystem::path directory, bool cached, std::size_t bytes,
              std::size_t grain = kAlignment);
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile();

  void write(std::size_t offset, std::span<const std::byte> bytes);
  // What one write() wrote at that offset, as many bytes. Compares checksums.
  void read(std::size_t offset, std::span<std::byte> bytes);

 private:
  // Calls `each(offset, part)` for the parts that one system call moves.
  template <typename Bytes, typename Each>
  static void in_pieces(std::size_t offset, Bytes bytes, const Each& each);
  void open(bool cached);
  [[noreturn]] void fail(const std::string& what, int error) const;

  std::filesystem::path directory_;
  int fd_ = -1;
  std::size_t grain_;
  std::vector<std::uint64_t> checksums_;  // [offset / grain] of the piece that begins there
};

}  // namespace sluice
