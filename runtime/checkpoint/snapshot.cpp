#include "runtime/checkpoint/snapshot.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{32} << 20;

// Calls visit(first, count) for pieces of so many bytes.
template <typename Visit>
void for_pieces(std::size_t bytes, const Visit& visit) {
  for (std::size_t first = 0; first < bytes; first += kPieceBytes) {
    visit(first, std::min(kPieceBytes, bytes - first));
  }
}

std::span<std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data), tensor.spec.bytes()};
}

// Copies a piece of what a rank has, from byte `first` of it on, to where it lies in the whole.
void place(const TensorSpec& whole, std::span<const PlacedPart> parts, std::size_t first,
           std::span<const std::byte> piece, std::byte* to) {
  const std::size_t size = size_of(whole.dtype);
  const auto bytes = [&](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * size;
  };
  const auto elements = [&](std::size_t count) { return static_cast<std::int64_t>(count / size); };
  for_part_runs(whole.shape, parts, elements(first), elements(piece.size()),
                [&](std::int64_t here, std::int64_t in_whole, std::int64_t count) {
                  std::memcpy(to + bytes(in_whole), piece.data() + (bytes(here) - first),
                              bytes(count));
                });
}

}  // namespace

void Snapshot::take(std::span<const TakenTensor> tensors,
                    const std::function<void(const TakenTensor&)>& before) {
  std::size_t bytes = 0, largest = 0;
  for (const TakenTensor& taken : tensors) {
    if (taken.holder == rank()) bytes += round_up(taken.whole.bytes(), 64);
    largest = std::max(largest, taken.tensor.spec.bytes());
  }
  mirror_.reserve(std::min(kPieceBytes, largest));  // later, others may wait for this rank in NCCL
  if (memory_.size() < bytes) memory_.resize(bytes);
  copies_.clear();
  std::byte* to = memory_.data();
  for (const TakenTensor& taken : tensors) {
    if (before) before(taken);
    if (taken.holder != rank()) {
      send(taken);
      continue;
    }
    hold(taken, to);
    copies_.push_back({taken.name, {to, taken.whole}});
    to += round_up(taken.whole.bytes(), 64);
  }
}

void Snapshot::hold(const TakenTensor& taken, std::byte* to) {
  const std::vector<PlacedPart> mine = taken.parts.empty()
                                           ? placed_parts({}, {}, taken.whole.shape.elements())
                                           : taken.parts[at(rank())];
  const std::span<std::byte> own = bytes_of(taken.tensor);
  for_pieces(own.size(), [&](std::size_t first, std::size_t count) {
    place(taken.whole, mine, first, mirror_.read_back(own.subspan(first, count)), to);
  });
  std::vector<std::byte> piece;
  for (int other = 0; other < std::ssize(taken.parts); ++other) {
    if (other == rank()) continue;
    const std::vector<PlacedPart>& theirs = taken.parts[at(other)];
    const std::int64_t elements = theirs.empty() ? 0 : theirs.back().end();
    const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(taken.whole.dtype);
    for_pieces(bytes, [&](std::size_t first, std::size_t count) {
      piece.resize(count);
      sharers_.recv(other, piece);
      place(taken.whole, theirs, first, piece, to);
    });
  }
}

void Snapshot::send(const TakenTensor& taken) {
  const std::span<std::byte> own = bytes_of(taken.tensor);
  for_pieces(own.size(), [&](std::size_t first, std::size_t count) {
    sharers_.send(taken.holder, mirror_.read_back(own.subspan(first, count)));
  });
}

}  // namespace sluice
