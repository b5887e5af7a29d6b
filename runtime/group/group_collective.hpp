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

 private:
  struct Made {
    std::uint64_t bytes = 0;
    std::int32_t stage = 0, micro_batch = 0, index = 0;
    CollectiveKind kind = CollectiveKind::kSum;
    DType type = DType::kF32;
    friend bool operator==(const Made&, const Made&) = default;
  };
  struct First {
    static constexpr std::size_t kValues = 2040;
    Made made;
    alignas(8) std::array<std::byte, kValues> values = {};
  };

  [[nodiscard]] bool is_first() const { return group_.communicator().rank() == 0; }
  [[nodiscard]] std::size_t me() const;
  [[nodiscard]] std::size_t ranks() const;
  void require_legal(const CollectiveCall& call) const;
  void require_same() const;
  void make_short(const CollectiveCall& call);
  void make_long(const CollectiveCall& call);
  void sum_parts(const CollectiveCall& call, std::size_t part);
  // Makes buffer_ one of at least so many halves that no message uses, and ends_ those of parts.
  void renew_buffer(std::size_t part, std::size_t halves);
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
