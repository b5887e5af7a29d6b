// Commands that look at models in files, and need no MPI. `arguments` exclude the program's name
// and the command. Each returns the exit code.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace sluice {

int digest_command(const std::vector<std::string>& arguments);
int verify_command(const std::vector<std::string>& arguments);
int inspect_command(const std::vector<std::string>& arguments);
int export_command(const std::vector<std::string>& arguments);

// SHA256SUMS of an export: a line "<sha256>  <file>" for each of its files, as sha256sum writes and
// checks them.
inline constexpr const char* kSumsName = "SHA256SUMS";

[[nodiscard]] std::string sum_line(std::span<const std::byte> bytes, const std::string& name);
// The lines of `files`. Throws Error(kIo) for one that cannot be read.
[[nodiscard]] std::string sums_of(const std::vector<std::filesystem::path>& files);

// Compares the files of `directory` with its SHA256SUMS; returns how many. Throws Error(kWeights)
// for the first that is missing or differs, and for a line that is not as above.
[[nodiscard]] std::size_t require_sums(const std::filesystem::path& directory);

}  // namespace sluice
