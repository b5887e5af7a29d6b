// SHA-256, plain and keyed, and random numbers, by the crypto library. Throws Error(kInternal)
// where that fails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace sluice {

// 64 hexadecimal digits.
[[nodiscard]] std::string sha256_hex(std::span<const std::byte> bytes);

// A name that no other process chooses: 32 hexadecimal digits of 128 random bits. Not for secrets.
[[nodiscard]] std::string random_id();

// Keyed digests, HMAC-SHA-256: whoever lacks the key can make none.
using SecretKey = std::array<std::uint8_t, 32>;
[[nodiscard]] SecretKey random_key();
[[nodiscard]] SecretKey keyed_digest(const SecretKey& key, std::span<const std::byte> bytes);
// Takes the same time wherever the two differ.
[[nodiscard]] bool same_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

}  // namespace sluice
