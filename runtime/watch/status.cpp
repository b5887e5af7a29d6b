#include "runtime/watch/status.hpp"

#include <cstring>
#include <type_traits>

namespace sluice {
namespace {

// Little-endian. All ranks have the same build.
struct Wire {
  std::uint64_t step, bytes, moves, saved_plus_one;
  double still;
  std::int32_t stage, micro_batch, op, peer, tag, needed_op, unheard;
  std::uint32_t run, table_requests, spare;
  std::uint8_t doing, kind, action, phase, waits, group, what, expects_end;
  std::array<std::uint8_t, 32> reserved;
};
static_assert(sizeof(Wire) == kStatusBytes && std::is_trivially_copyable_v<Wire>);

constexpr auto kLastDoing = static_cast<std::uint8_t>(Doing::kFailing);
constexpr auto kLastOp = static_cast<std::uint8_t>(OpKind::kOptimizer);
constexpr auto kLastAction = static_cast<std::uint8_t>(ActionKind::kOptimizer);
constexpr auto kLastPhase = static_cast<std::uint8_t>(RunPhase::kGenerate);
constexpr auto kLastGroup = static_cast<std::uint8_t>(WaitGroup::kReplicas);
constexpr auto kLastWhat = static_cast<std::uint8_t>(WaitSubject::What::kNccl);

}  // namespace

StatusBytes pack(const RankStatus& status) {
  const Activity& now = status.activity;
  const Wire wire = {.step = now.step,
                     .bytes = now.subject.bytes,
                     .moves = now.moves,
                     .saved_plus_one = status.saved_plus_one,
                     .still = status.still,
                     .stage = now.stage,
                     .micro_batch = now.micro_batch,
                     .op = now.op,
                     .peer = now.subject.peer,
                     .tag = now.subject.tag,
                     .needed_op = now.subject.needed_op,
                     .unheard = status.unheard,
                     .run = now.run,
                     .table_requests = status.table_requests,
                     .spare = 0,
                     .doing = static_cast<std::uint8_t>(now.doing),
                     .kind = static_cast<std::uint8_t>(now.kind),
                     .action = static_cast<std::uint8_t>(now.action),
                     .phase = static_cast<std::uint8_t>(now.phase),
                     .waits = static_cast<std::uint8_t>(now.waits),
                     .group = static_cast<std::uint8_t>(now.group),
                     .what = static_cast<std::uint8_t>(now.subject.what),
                     .expects_end = static_cast<std::uint8_t>(status.expects_end),
                     .reserved = {}};
  StatusBytes bytes{};
  std::memcpy(bytes.data(), &wire, sizeof(wire));
  return bytes;
}

std::optional<RankStatus> unpack_status(std::span<const std::byte> bytes) {
  Wire wire{};
  if (bytes.size() != sizeof(wire)) return std::nullopt;
  std::memcpy(&wire, bytes.data(), sizeof(wire));
  if (wire.doing > kLastDoing || wire.kind > kLastOp || wire.action > kLastAction ||
      wire.phase > kLastPhase || wire.group > kLastGroup || wire.what > kLastWhat ||
      !(wire.still >= 0)) {
    return std::nullopt;
  }
  RankStatus status{.activity = {.doing = static_cast<Doing>(wire.doing),
                                 .kind = static_cast<OpKind>(wire.kind),
                                 .action = static_cast<ActionKind>(wire.action),
                                 .stage = wire.stage,
                                 .micro_batch = wire.micro_batch,
                                 .op = wire.op,
                                 .run = wire.run,
                                 .phase = static_cast<RunPhase>(wire.phase),
                                 .step = wire.step,
                                 .waits = wire.waits != 0,
                                 .group = static_cast<WaitGroup>(wire.group),
                                 .subject = {.what = static_cast<WaitSubject::What>(wire.what),
                                             .peer = wire.peer,
                                             .tag = wire.tag,
                                             .bytes = wire.bytes,
                                             .needed_op = wire.needed_op},
                                 .moves = wire.moves},
                    .still = wire.still,
                    .saved_plus_one = wire.saved_plus_one,
                    .table_requests = wire.table_requests,
                    .unheard = wire.unheard,
                    .expects_end = wire.expects_end != 0};
  return status;
}

}  // namespace sluice
