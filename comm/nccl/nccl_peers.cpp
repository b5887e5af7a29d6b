#include "comm/nccl/nccl_peers.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "comm/base/host.hpp"
#include "comm/base/index.hpp"
#include "comm/group/collectives.hpp"
#include "comm/nccl/nccl_api.hpp"

namespace sluice::nccl {

namespace {

template <std::size_t size>
void assign(std::array<char, size>& field, const std::string& text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::memcpy(field.data(), text.data(), length);
  field[length] = '\0';
}

template <std::size_t size>
bool equal(const std::array<char, size>& a, const std::array<char, size>& b) {
  return std::strcmp(a.data(), b.data()) == 0;
}

}  // namespace

Peer describe_rank(Device device, int version, const std::string& problem) {
  Peer member;
  member.version = version;
  member.device = device;
  assign(member.host, host_name());
  assign(member.machine, nccl_machine_id());
  if (device.kind == DeviceKind::kCuda) assign(member.gpu, properties_of(device).identity);
  assign(member.problem, problem);
  return member;
}

std::vector<Peer> gather_peer_table(Collectives& bootstrap, const Peer& mine) {
  std::vector<Peer> peer_table(at(bootstrap.communicator().size()));
  bootstrap.all_gather(mine, peer_table);
  return peer_table;
}

int most_blocks_of(std::span<const Peer> peer_table) {
  int most = 0;
  for (const Peer& peer : peer_table) {
    if (peer.most_blocks > 0 && (most == 0 || peer.most_blocks < most)) most = peer.most_blocks;
  }
  return most;
}

std::string name_of(const Peer& peer) {
  return fmt::format("rank {} on {} ({})", peer.rank, peer.host.data(), to_string(peer.device));
}

std::optional<Error> refusal(std::span<const Peer> peer_table, const std::string& label) {
  const auto name = [&](std::size_t rank) { return name_of(peer_table[rank]); };
  const auto refuse = [&](ErrorCode code, const std::string& why) {
    return Error(code, fmt::format("NCCL cannot serve {}: {}", label, why));
  };
  for (std::size_t i = 0; i < peer_table.size(); ++i) {
    if (peer_table[i].device.kind != DeviceKind::kCuda) {
      return refuse(ErrorCode::kUsage, fmt::format("{} has no GPU; use --transport mpi", name(i)));
    }
  }
  for (std::size_t i = 0; i < peer_table.size(); ++i) {
    if (peer_table[i].version == 0) {
      return refuse(ErrorCode::kDevice,
                    fmt::format("{}: {}", name(i), peer_table[i].problem.data()));
    }
  }
  for (std::size_t i = 0; i < peer_table.size(); ++i) {
    if (peer_table[i].version != peer_table[0].version) {
      return refuse(ErrorCode::kMismatch,
                    fmt::format("{} has NCCL {}, {} has NCCL {}; all ranks need one version",
                                name(0), version_text(peer_table[0].version), name(i),
                                version_text(peer_table[i].version)));
    }
  }
  for (std::size_t i = 0; i < peer_table.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      const Peer &a = peer_table[k], &b = peer_table[i];
      if (equal(a.gpu, b.gpu) && equal(a.machine, b.machine)) {
        return refuse(ErrorCode::kUsage,
                      fmt::format("{} and {} share the GPU at {}; give each rank its own, or "
                                  "--transport mpi",
                                  name(k), name(i), a.gpu.data()));
      }
    }
  }
  return std::nullopt;
}

}  // namespace sluice::nccl
