// The peer table: the ranks of an NCCL communicator to be made, known on every rank, and why it
// cannot be made. Internal to comm/nccl; calls no NCCL function.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"

namespace sluice::nccl {

// One rank, as sent between ranks: texts are truncated to fit and end in a zero.
struct Peer {
  int rank = 0;         // as messages name it
  int version = 0;      // of its library; 0: `problem` says why there is none, or why it is no use
  int most_blocks = 0;  // of a kernel; 0: NCCL chooses
  Device device;
  std::array<char, 64> host{};      // for messages
  std::array<char, 128> machine{};  // as nccl_machine_id()
  std::array<char, 32> gpu{};       // PCI bus address
  std::array<char, 512> problem{};  // one line, or empty
};

// Describes this process, without its rank. `version` and `problem` as in Peer. Throws
// Error(kDevice) where CUDA fails.
[[nodiscard]] Peer describe_rank(Device device, int version, const std::string& problem);

// Collective. The table has one entry per rank of the bootstrap communicator.
[[nodiscard]] std::vector<Peer> gather_peer_table(Collectives& bootstrap, const Peer& mine);

// The bound that all ranks can keep: the smallest that one asks for; 0: none asks.
[[nodiscard]] int most_blocks_of(std::span<const Peer> peer_table);

// Why the ranks of the peer table cannot share a communicator, the same on every rank, or nothing.
// In this order: a rank without GPU (kUsage), without NCCL (kDevice), with another version than the
// first rank's (kMismatch), two ranks on one GPU (kUsage). One line that names rank and host;
// `label` names the communicator.
[[nodiscard]] std::optional<Error> refusal(std::span<const Peer> peer_table,
                                           const std::string& label);

// "rank 3 on host-7 (cuda:1)"
[[nodiscard]] std::string name_of(const Peer& peer);

}  // namespace sluice::nccl
