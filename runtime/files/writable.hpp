// Whether an output can be written, asked before hours of work depend on it.
#pragma once

#include <filesystem>

namespace sluice {

// Proves that files can be written to DIR, which is made where it is not there (kIo naming it);
// leaves everything as it was.
void require_writable_directory(const std::filesystem::path& directory);
// The same for a file, whose bytes, if it exists, stay as they are.
void require_writable_file(const std::filesystem::path& file);

}  // namespace sluice
