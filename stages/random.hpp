// Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). A number is a function of what it is for, never of who draws it or when, so
// results are independent of the pipeline's layout. Host and device code share these functions.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace sluice {

// What a random stream is for. Two streams with different keys are independent.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t site = 0;  // layer and place in it (see random_site), or a hash of a name
  std::uint64_t step = 0;  // training step; 0 for initial values
};

// Philox4x32-10 itself, words in the paper's order.
[[nodiscard]] std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                                        std::array<std::uint32_t, 2> key);
// The 64-bit key that stands for a RandomKey: the first two words of the block whose counter is the
// low word of site, step, and a constant with the high word of site in it, under the seed.
[[nodiscard]] std::array<std::uint32_t, 2> philox_key(const RandomKey& key);
// Four 32-bit words for counter (hi, lo) under `key`: the block at lo, hi (low word first) under
// philox_key(key).
[[nodiscard]] std::array<std::uint32_t, 4> philox(const RandomKey& key, std::uint64_t hi,
                                                  std::uint64_t lo);
// In [0, 1), 24 bits.
[[nodiscard]] inline float to_unit(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1.0p-24f;
}
// layer: global index of the layer in the model; place: which use within the layer (< 256).
[[nodiscard]] constexpr std::uint32_t random_site(std::uint32_t layer, std::uint32_t place) {
  return layer << 8 | place;
}
// FNV-1a of 64 bits, for streams named by a parameter: of a million names two are alike with a
// probability of 3e-8.
[[nodiscard]] std::uint64_t hash_name(std::string_view name);

}  // namespace sluice
