// The 64-byte header in front of every message of a plan, and its comparison with what is expected.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace sluice {

inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr int kMaxDims = 4;

// On the wire, little-endian, exactly 64 bytes.
struct MessageHeader {
  static constexpr std::uint32_t kMagic = 0x43554c53;  // "SLUC"
  static constexpr std::uint16_t kVersion = 1;

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint8_t phase = 0;  // 0 train, 1 evaluate, 2 generate
  std::uint8_t dtype = 0;  // DType's number
  std::uint64_t step = 0;
  std::int32_t channel = 0;      // index in the plan
  std::int32_t micro_batch = 0;  // which message of the channel
  std::uint16_t tensor = 0;      // index among the edge's tensors
  std::uint16_t tensor_count = 1;
  std::uint32_t rank = 0;  // number of dims in `shape`
  std::array<std::int32_t, kMaxDims> shape = {0, 0, 0, 0};
  std::uint64_t bytes = 0;  // of payload
  std::uint64_t reserved = 0;
};
static_assert(sizeof(MessageHeader) == kHeaderBytes);

// Whether two objects have the same bytes; inline and without branches.
template <typename T>
[[nodiscard]] inline bool same_words(const T& a, const T& b) {
  static_assert(std::has_unique_object_representations_v<T>, "padding may differ");
  static_assert(sizeof(T) % sizeof(std::uint64_t) == 0, "of whole words");
  using Words = std::array<std::uint64_t, sizeof(T) / sizeof(std::uint64_t)>;
  const auto words_of_a = std::bit_cast<Words>(a), words_of_b = std::bit_cast<Words>(b);
  std::uint64_t differs = 0;
  for (std::size_t i = 0; i < words_of_a.size(); ++i) differs |= words_of_a[i] ^ words_of_b[i];
  return differs == 0;
}

// Whether a message with header `got` may arrive where `expected` is due: shape and bytes may be
// smaller, every other field is equal.
[[nodiscard]] bool fits(const MessageHeader& expected, const MessageHeader& got);
// Why it may not, for an error message; empty where it fits.
[[nodiscard]] std::string difference(const MessageHeader& expected, const MessageHeader& got);
// All labels, shape and bytes, in one line.
[[nodiscard]] std::string describe(const MessageHeader& header);

}  // namespace sluice
