// What makes renames and new files last through a crash of the host.
#pragma once

#include <filesystem>

namespace sluice {

// Syncs a directory's entries to its disk. Throws Error(kIo) naming it. File systems that cannot
// sync a directory are no error.
void sync_directory(const std::filesystem::path& directory);

// Renames within one directory or between two, and syncs them. Throws Error(kIo).
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace sluice
