#include <algorithm>
#include <cstdlib>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/device/cuda_calls.hpp"

namespace sluice {

// Parts of the arena in ascending order; no two free ones are neighbours. take() may allocate host
// memory, give_back() never does.
class MemoryArena {
 public:
  explicit MemoryArena(Device device) : device_(device) {}

  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] const DeviceMemory::Figures& figures() const { return figures_; }

  void reserve(std::size_t bytes) {
    if (device_.kind == DeviceKind::kCpu) return;
    if (figures_.arena > 0) {
      throw Error(ErrorCode::kInternal,
                  "the arena of " + to_string(device_) + " is reserved twice");
    }
    bytes = round_up(bytes, kBufferAlignment);
    memory_ = Buffer(device_, bytes);
    figures_.arena = bytes;
    if (bytes > 0) pieces_.push_back({0, bytes, true});
  }

  // Null where there is no room.
  std::byte* take(std::size_t bytes, DeviceMemory::Use use) {
    const auto fits = [bytes](const Piece& piece) { return piece.free && piece.bytes >= bytes; };
    std::size_t index = pieces_.size();
    if (use == DeviceMemory::Use::kPersistent) {
      index = static_cast<std::size_t>(std::find_if(pieces_.begin(), pieces_.end(), fits) -
                                       pieces_.begin());
    } else {
      while (index > 0 && !fits(pieces_[index - 1])) --index;
      index = index == 0 ? pieces_.size() : index - 1;
    }
    if (index == pieces_.size()) return nullptr;
    const Piece whole = pieces_[index];
    if (whole.bytes > bytes) {
      const bool low = use == DeviceMemory::Use::kPersistent;
      const std::size_t border = whole.begin + (low ? bytes : whole.bytes - bytes);
      pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(index) + 1,
                     {border, whole.begin + whole.bytes - border, low});
      pieces_[index] = {whole.begin, border - whole.begin, !low};
      if (!low) ++index;
    }
    pieces_[index].free = false;
    figures_.used += bytes;
    figures_.peak = std::max(figures_.peak, figures_.used);
    return memory_.data() + pieces_[index].begin;
  }

  void give_back(const std::byte* data) noexcept {
    const auto begin = static_cast<std::size_t>(data - memory_.data());
    auto piece =
        std::lower_bound(pieces_.begin(), pieces_.end(), begin,
                         [](const Piece& each, std::size_t offset) { return each.begin < offset; });
    figures_.used -= piece->bytes;
    piece->free = true;
    if (const auto next = piece + 1; next != pieces_.end() && next->free) {
      piece->bytes += next->bytes;
      piece = pieces_.erase(next) - 1;
    }
    if (piece != pieces_.begin() && (piece - 1)->free) {
      (piece - 1)->bytes += piece->bytes;
      pieces_.erase(piece);
    }
  }

  void count_outside_arena(std::size_t bytes) {
    if (figures_.arena == 0) return;  // no arena
    ++figures_.outside_arena;
    figures_.outside_arena_bytes += bytes;
  }

 private:
  struct Piece {
    std::size_t begin, bytes;
    bool free;
  };

  Device device_;
  Buffer memory_;
  std::vector<Piece> pieces_;
  DeviceMemory::Figures figures_;
};

DeviceMemory::DeviceMemory() : DeviceMemory(Device{}) {}

DeviceMemory::DeviceMemory(Device device) : arena_(std::make_shared<MemoryArena>(device)) {}

Device DeviceMemory::device() const { return arena_->device(); }

void DeviceMemory::reserve(std::size_t bytes) const { arena_->reserve(bytes); }

Buffer DeviceMemory::allocate(std::size_t bytes, Use use) const {
  if (bytes > 0) {
    std::byte* const place = arena_->take(round_up(bytes, kBufferAlignment), use);
    if (place != nullptr) return {arena_, device(), place, bytes};
  }
  Buffer own(device(), bytes);
  if (bytes > 0) arena_->count_outside_arena(bytes);
  return own;
}

DeviceMemory::Figures DeviceMemory::figures() const { return arena_->figures(); }

void Buffer::Free::operator()(std::byte* data) const noexcept {
  if (arena != nullptr) {
    arena->give_back(data);
  } else if (device.kind == DeviceKind::kCuda) {
    cuda::release(data);
  } else {
    std::free(data);
  }
}

}  // namespace sluice
