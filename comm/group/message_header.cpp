#include "comm/group/message_header.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

namespace sluice {

namespace {

// Fields before `shape` are equal at both ends; shape and bytes are upper bounds.
constexpr std::size_t kComparedBytes = offsetof(MessageHeader, shape);
static_assert(kComparedBytes == 32);

}  // namespace

std::string describe(const MessageHeader& header) {
  constexpr std::array kPhases = {"train", "evaluate", "generate"};
  constexpr std::array kDtypes = {"f32", "bf16", "i32", "u8", "f64"};
  std::string shape;
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(header.rank, kMaxDims); ++i) {
    shape += fmt::format("{}{}", i == 0 ? "" : ", ", header.shape[i]);
  }
  return fmt::format(
      "channel {} micro-batch {} tensor {} of {} step {} ({}) {} [{}], {} bytes", header.channel,
      header.micro_batch, header.tensor, header.tensor_count, header.step,
      header.phase < kPhases.size() ? kPhases[header.phase] : "unknown phase",
      header.dtype < kDtypes.size() ? kDtypes[header.dtype] : "unknown type", shape, header.bytes);
}

std::string difference(const MessageHeader& expected, const MessageHeader& got) {
  if (got.magic != expected.magic) return "not a header of Sluice";
  if (got.version != expected.version) {
    return fmt::format("header version {} instead of {}", got.version, expected.version);
  }
  if (got.channel != expected.channel) return "another channel";
  if (got.phase != expected.phase) return "another phase";
  if (got.step != expected.step) return "another step";
  if (got.micro_batch != expected.micro_batch) return "another micro-batch";
  if (got.tensor != expected.tensor) return "another tensor";
  if (got.tensor_count != expected.tensor_count) return "another number of tensors";
  if (got.dtype != expected.dtype) return "another type of element";
  if (got.rank != expected.rank) return "another number of dimensions";
  if (got.bytes > expected.bytes) return "too many bytes";
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(expected.rank, kMaxDims); ++i) {
    if (got.shape[i] < 0 || got.shape[i] > expected.shape[i]) return "too large a shape";
  }
  return {};
}

bool fits(const MessageHeader& expected, const MessageHeader& got) {
  if (same_words(expected, got)) return true;
  bool smaller = got.bytes <= expected.bytes;
  for (std::size_t i = 0; i < std::min<std::size_t>(expected.rank, kMaxDims); ++i) {
    smaller = smaller && got.shape[i] >= 0 && got.shape[i] <= expected.shape[i];
  }
  return smaller && std::memcmp(&expected, &got, kComparedBytes) == 0;
}

}  // namespace sluice
