// What stages do over a group of ranks within an action: batch statistics, partial results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/stage.hpp>

#include "comm/group/collectives.hpp"

namespace sluice {

// The first message of each collective has one size on all ranks, and says what its sender makes.
// Others follow only where all ranks make the same, since MPI may write more than was asked for.
// Short values travel in the first message.
class GroupCollective final : public Collective {
 public:
  // `group` outlives this. `member` names its ranks: "replica", "tensor rank".
  GroupCollective(Collectives& group, std::string_view member) : group_(group), member_(member) {}
  // Throws Error(kUsage), before any message, for sizes that do not fit the number of ranks, and
  // Error(kMismatch) on the first rank where another one makes another collective.
  void make(const CollectiveCall& call) override;
  // The first of these.
  static void require_legal(const CollectiveCall& call, std::size_t ranks, std::size_t me);

  // Host memory that collectives take beside their values, and is kept: that of the first rank,
  // which takes most.
  struct Memory {
    std::size_t firsts = 0, common = 0, buffer = 0;  // bytes
    std::size_t summed = 0;                          // values of HostSums' calls, at most
    // For one that `ranks` make.
    void raise(const PlannedCollective& collective, std::size_t ranks);
    [[nodiscard]] std::size_t bytes() const { return firsts + common + buffer; }
  };
  [[nodiscard]] std::size_t bytes_held() const {
    return firsts_.size() * sizeof(First) + common_.size() + buffer_->size();
  }

 private:
  struct Made {
    std::uint64_t bytes = 0, segments = 1;
    std::int32_t stage = 0, micro_batch = 0, index = 0;
    CollectiveKind kind = CollectiveKind::kSum;
    DType type = DType::kF32;
    friend bool operator==(const Made&, const Made&) = default;
  };
  struct First {
    static constexpr std::size_t kValues = 2032;
    Made made;
    alignas(8) std::array<std::byte, kValues> values = {};
  };

  [[nodiscard]] bool is_first() const { return group_.communicator().rank() == 0; }
  [[nodiscard]] std::size_t me() const;
  [[nodiscard]] std::size_t ranks() const;
  void require_same() const;
  // piece(rank, byte of its part, byte of all parts, bytes) for the pieces of parts of so many
  // bytes in order of segments, in each of ranks.
  template <typename Piece>
  void for_pieces(const CollectiveCall& call, std::size_t part, const Piece& piece) const;
  void make_short(const CollectiveCall& call);
  void make_long(const CollectiveCall& call);
  // Of the buffer for a long one: bytes of each rank's part, and the number of halves.
  struct Parts {
    std::size_t part = 0, halves = 0;
  };
  [[nodiscard]] static Parts parts_of(CollectiveKind kind, DType type, std::size_t bytes,
                                      std::size_t ranks);
  [[nodiscard]] static std::size_t common_bytes(CollectiveKind kind, std::size_t bytes,
                                                std::size_t ranks);
  void sum_parts(const CollectiveCall& call, std::size_t part);
  // Makes buffer_ one for these parts that no message uses, and ends_ theirs.
  void renew_buffer(const Parts& parts);
  [[nodiscard]] std::span<std::byte> buffer(std::size_t half) const;
  // The first half, as floats.
  [[nodiscard]] std::span<float> floats() const;

  Collectives& group_;
  std::string_view member_;
  std::vector<First> firsts_;      // [rank], on the first rank
  std::vector<std::byte> common_;  // what all ranks get of a short one
  // One or two halves of a part for each rank; the communicator shares it after a throw.
  std::shared_ptr<std::vector<std::byte>> buffer_ = std::make_shared<std::vector<std::byte>>();
  std::size_t half_ = 0;           // bytes
  std::vector<std::size_t> ends_;  // [rank] in floats
};

}  // namespace sluice
