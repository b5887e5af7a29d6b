#include <cstddef>
#include <filesystem>
#include <iterator>

#include <sluice/error.hpp>

namespace sluice {

namespace {

struct CodeFacts {
  const char* name;
  int exit_code;
};

// [code]
constexpr CodeFacts kFacts[] = {
    {"usage", 2}, {"data", 3}, {"io", 4},      {"weights", 5}, {"mismatch", 6}, {"numeric", 7},
    {"plan", 8},  {"mpi", 9},  {"device", 10}, {"peer", 11},   {"user", 13},    {"internal", 70},
};
static_assert(std::size(kFacts) == static_cast<std::size_t>(ErrorCode::kInternal) + 1);

// Messages quote files and arguments, which may hold line ends and codes that terminals obey.
std::string one_line(std::string message) {
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  return message;
}

}  // namespace

const char* name_of(ErrorCode code) { return kFacts[static_cast<std::size_t>(code)].name; }

int exit_code(ErrorCode code) { return kFacts[static_cast<std::size_t>(code)].exit_code; }

Error::Error(ErrorCode code, const std::string& message, int rank, std::source_location location)
    : std::runtime_error(one_line(message)), code_(code), rank_(rank), location_(location) {}

ErrorCode code_of_foreign(const std::exception& error) {
  const bool files = dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr;
  return files ? ErrorCode::kIo : ErrorCode::kUser;
}

}  // namespace sluice
