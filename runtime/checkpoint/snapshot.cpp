#include "runtime/checkpoint/snapshot.hpp"

#include <algorithm>
#include <cstring>

namespace sluice {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{32} << 20;

}  // namespace

void Snapshot::take(std::span<const NamedTensor> tensors) {
  std::size_t bytes = 0;
  for (const NamedTensor& named : tensors) bytes += round_up(named.tensor.spec.bytes(), 64);
  if (memory_.size() < bytes) memory_.resize(bytes);
  copies_.clear();
  std::byte* to = memory_.data();
  for (const NamedTensor& named : tensors) {
    const auto size = named.tensor.spec.bytes();
    auto* from = static_cast<std::byte*>(named.tensor.data);
    for (std::size_t done = 0; done < size; done += kPieceBytes) {
      const std::size_t piece = std::min(kPieceBytes, size - done);
      const std::span<std::byte> host = mirror_.read_back(std::span(from + done, piece));
      std::memcpy(to + done, host.data(), piece);
    }
    copies_.push_back({named.name, {to, named.tensor.spec}});
    to += round_up(size, 64);
  }
}

}  // namespace sluice
