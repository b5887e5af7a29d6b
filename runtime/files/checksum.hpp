// XXH3-128 of bytes, streaming: it finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace sluice {

class Checksum {
 public:
  Checksum();
  ~Checksum();

  void add(std::span<const std::byte> bytes);
  // 32 hexadecimal digits, as `xxhsum -H2` prints them. Starts anew.
  [[nodiscard]] std::string finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

[[nodiscard]] std::string checksum_hex(std::span<const std::byte> bytes);

// XXH3-64; `seed`: that of what comes before. Allocates nothing.
[[nodiscard]] std::uint64_t checksum_64(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace sluice
