// Keyed digests, HMAC-SHA-256: whoever lacks the key can make none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice {

using SecretKey = std::array<std::uint8_t, 32>;

// Random, fit for a secret. Throws Error(kInternal) where the system has no random numbers.
[[nodiscard]] SecretKey random_key();

// Throws Error(kInternal) where the crypto library fails.
[[nodiscard]] SecretKey keyed_digest(const SecretKey& key, std::span<const std::byte> bytes);

// Takes the same time wherever the two differ.
[[nodiscard]] bool same_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

}  // namespace sluice
