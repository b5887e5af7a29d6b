// SHA-256, by the crypto library.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace sluice {

// 64 hexadecimal digits.
[[nodiscard]] std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace sluice
