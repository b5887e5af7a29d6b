#include <cstddef>
#include <filesystem>
#include <iterator>

#include <sluice/error.hpp>

namespace sluice {

namespace {

struct CodeFacts {
  ErrorCode code;
  const char* name;
  int exit_code;
};

constexpr CodeFacts kFacts[] = {
    {ErrorCode::kUsage, "usage", 2},
    {ErrorCode::kData, "data", 3},
    {ErrorCode::kIo, "io", 4},
    {ErrorCode::kWeights, "weights", 5},
    {ErrorCode::kMismatch, "mismatch", 6},
    {ErrorCode::kNumeric, "numeric", 7},
    {ErrorCode::kPlan, "plan", 8},
    {ErrorCode::kMpi, "mpi", 9},
    {ErrorCode::kDevice, "device", 10},
    {ErrorCode::kPeer, "peer", 11},
    {ErrorCode::kUser, "user", 13},
    {ErrorCode::kInternal, "internal", 70},
};
static_assert(std::size(kFacts) == static_cast<std::size_t>(ErrorCode::kInternal) + 1);

CodeFacts facts_of(ErrorCode code) {
  for (const CodeFacts& facts : kFacts) {
    if (facts.code == code) return facts;
  }
  return {code, "unknown", 70};
}

// Messages quote files and arguments, which may hold line ends and codes that terminals obey.
std::string one_line(std::string message) {
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  return message;
}

}  // namespace

const char* name_of(ErrorCode code) { return facts_of(code).name; }

int exit_code(ErrorCode code) { return facts_of(code).exit_code; }

Error::Error(ErrorCode code, const std::string& message, int rank, std::source_location location)
    : std::runtime_error(one_line(message)), code_(code), rank_(rank), location_(location) {}

ErrorCode code_of_foreign(const std::exception& error) {
  const bool files = dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr;
  return files ? ErrorCode::kIo : ErrorCode::kUser;
}

}  // namespace sluice
