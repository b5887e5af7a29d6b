#include "runtime/files/checksum.hpp"

#include <fmt/core.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <utility>

#include <sluice/error.hpp>

namespace sluice {

struct Checksum::Impl {
  Impl() { XXH3_128bits_reset(&state); }
  XXH3_state_t state = {};
};

Checksum::Checksum() : impl_(std::make_unique<Impl>()) {}
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&impl_->state, bytes.data(), bytes.size());
}

std::string Checksum::finish() {
  const XXH128_hash_t hash = XXH3_128bits_digest(&impl_->state);
  XXH3_128bits_reset(&impl_->state);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string checksum_hex(std::span<const std::byte> bytes) {
  Checksum checksum;
  checksum.add(bytes);
  return checksum.finish();
}

std::uint64_t checksum_64(std::span<const std::byte> bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace sluice
