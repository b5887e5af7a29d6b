// What a running job says of its ranks in DIR/status.json: `sluice doctor --live DIR`.
#pragma once

#include <filesystem>
#include <string>

namespace sluice {

// A table for people: the step, how old the file is, and a line per rank. `now`: seconds since
// 1970. Throws Error(kData) where the directory has no such file, or one of another form.
[[nodiscard]] std::string live_status(const std::filesystem::path& directory, double now);

}  // namespace sluice
