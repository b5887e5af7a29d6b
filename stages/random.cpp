#include "stages/random.hpp"

namespace sluice {

std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                          std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p = static_cast<std::uint64_t>(counter[0]) * 0xD2511F53U;
    const std::uint64_t q = static_cast<std::uint64_t>(counter[2]) * 0xCD9E8D57U;
    counter = {
        static_cast<std::uint32_t>(q >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(q),
        static_cast<std::uint32_t>(p >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

std::array<std::uint32_t, 2> philox_key(const RandomKey& key) {
  const std::array<std::uint32_t, 4> words = philox_block(
      {key.site, static_cast<std::uint32_t>(key.step), static_cast<std::uint32_t>(key.step >> 32),
       0x536C7563U},
      {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
  return {words[0], words[1]};
}

std::array<std::uint32_t, 4> philox(const RandomKey& key, std::uint64_t hi, std::uint64_t lo) {
  return philox_block({static_cast<std::uint32_t>(lo), static_cast<std::uint32_t>(lo >> 32),
                       static_cast<std::uint32_t>(hi), static_cast<std::uint32_t>(hi >> 32)},
                      philox_key(key));
}

std::uint32_t hash_name(std::string_view name) {
  std::uint32_t hash = 0x811C9DC5U;
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x01000193U;
  }
  return hash;
}

}  // namespace sluice
