// Which host this process runs on.
#pragma once

#include <string>

namespace sluice {

// The name that users know the host by; "unknown host" where the system gives none. Containers of
// one machine may have a name each.
[[nodiscard]] std::string host_name();

// The same in all processes of one machine until it starts again, in containers too; empty where
// the kernel does not say.
[[nodiscard]] std::string boot_id();

// Whether two processes run on one machine, and so may share memory, process ids or a GPU: they do
// where these are equal. The boot id, or the name where there is none. Never empty.
[[nodiscard]] std::string machine_id();

// The same as NCCL is told: NCCL_HOSTID where it is set, else machine_id(). NCCL joins two
// processes on one GPU where it takes them to be on two machines.
[[nodiscard]] std::string nccl_machine_id();

}  // namespace sluice
