// The random numbers of tensor.hpp.
#include <sluice/tensor.hpp>

#define SLUICE_KERNEL_NAMESPACE scalar
#include "stages/tensor/kernel_lane.hpp"
#include "stages/tensor/kernel_math.hpp"

namespace sluice {

std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                          std::array<std::uint32_t, 2> key) {
  auto [a, b, c, d] = counter;
  scalar::philox_rounds({key[0], key[1]}, a, b, c, d);
  return {a, b, c, d};
}

std::array<std::uint32_t, 2> philox_key(const RandomKey& key) {
  std::uint32_t words[2];  // NOLINT(modernize-avoid-c-arrays): also compiled for devices
  scalar::philox_stream_key<std::uint32_t>(key.seed, key.site, key.step, words);
  return {words[0], words[1]};
}

std::array<std::uint32_t, 4> philox(const RandomKey& key, std::uint64_t hi, std::uint64_t lo) {
  return philox_block({static_cast<std::uint32_t>(lo), static_cast<std::uint32_t>(lo >> 32),
                       static_cast<std::uint32_t>(hi), static_cast<std::uint32_t>(hi >> 32)},
                      philox_key(key));
}

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x00000100000001B3U;
  }
  return hash;
}

}  // namespace sluice
