// The GPUs of a whole job: those that any of its processes sees, each counted once.
#pragma once

#include <set>
#include <string>

#include <sluice/device.hpp>

#include "comm/base/host.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/communicator.hpp"

namespace sluice {

// Collective over `comm`. Distinct pairs of machine and GPU, as NCCL tells machines apart: two
// hosts with one GPU each have two, and so has one GPU whose processes have an NCCL_HOSTID each.
inline int gpus_of_job(Communicator& comm) {
  std::string mine;
  for (int i = 0; i < device_count(DeviceKind::kCuda); ++i) {
    mine += nccl_machine_id() + '\t' + properties_of({DeviceKind::kCuda, i}).identity + '\n';
  }
  std::set<std::string> all;
  for (const std::string& lines : Collectives(comm, 0, nullptr).all_gather_strings(mine)) {
    for (std::size_t begin = 0; begin < lines.size();) {
      const std::size_t end = lines.find('\n', begin);
      all.insert(lines.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return static_cast<int>(all.size());
}

}  // namespace sluice
