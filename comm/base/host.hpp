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

}  // namespace sluice
