// XXH3-128 of bytes, streaming: it finds damage, not forgery.
#pragma once

#include <cstddef>
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

}  // namespace sluice
