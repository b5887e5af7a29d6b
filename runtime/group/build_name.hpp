// The name of this build of the library, which all ranks of a job must share.
#pragma once

#include <string>

namespace sluice {

// "0.2.0 build 1f0c7a9e2b44 (GNU 12.2.0, Release)": the version, a digest of sources, compiler and
// settings, and the main settings. Equal sources and settings give one name on every machine.
[[nodiscard]] std::string build_name();

}  // namespace sluice
