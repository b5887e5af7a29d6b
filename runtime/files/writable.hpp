// Checks before a run that its outputs can be written.
#pragma once

#include <filesystem>
#include <string_view>

namespace sluice {

// Begins the name of the empty file that the check of a directory makes and removes.
inline constexpr std::string_view kWritablePrefix = ".writable-";

// The directory, or the one above that is there; or the file that is there in place of one.
[[nodiscard]] std::filesystem::path nearest_existing(const std::filesystem::path& directory);
// Throws Error(kIo) naming the directory where no file can be written to it, or to the one above
// that is there and in which it would be made.
void require_writable_directory(const std::filesystem::path& directory);
// The same for a file. An existing file keeps its bytes.
void require_writable_file(const std::filesystem::path& file);
// The same for a file that is replaced as a whole: one that is there, and is not empty, begins with
// `begin`. `what`: "timeline".
void require_replaceable_file(const std::filesystem::path& file, std::string_view begin,
                              std::string_view what);

}  // namespace sluice
