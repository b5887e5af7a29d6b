#include <filesystem>

#include <sluice/error.hpp>

namespace sluice {

const char* name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
      return "usage";
    case ErrorCode::kData:
      return "data";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kWeights:
      return "weights";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kNumeric:
      return "numeric";
    case ErrorCode::kPlan:
      return "plan";
    case ErrorCode::kMpi:
      return "mpi";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kPeer:
      return "peer";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
      return 2;
    case ErrorCode::kData:
      return 3;
    case ErrorCode::kIo:
      return 4;
    case ErrorCode::kWeights:
      return 5;
    case ErrorCode::kMismatch:
      return 6;
    case ErrorCode::kNumeric:
      return 7;
    case ErrorCode::kPlan:
      return 8;
    case ErrorCode::kMpi:
      return 9;
    case ErrorCode::kDevice:
      return 10;
    case ErrorCode::kPeer:
      return 11;
    case ErrorCode::kInternal:
      return 70;
  }
  return 70;
}

Error::Error(ErrorCode code, const std::string& message, int rank, std::source_location location)
    : std::runtime_error(message), code_(code), rank_(rank), location_(location) {}

ErrorCode code_of_foreign(const std::exception& error) {
  const bool files = dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr;
  return files ? ErrorCode::kIo : ErrorCode::kInternal;
}

}  // namespace sluice
