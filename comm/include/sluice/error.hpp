// The one error type of Sluice, and where the program's exit codes come from.
#pragma once

#include <exception>
#include <source_location>
#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)
namespace sluice {

enum class ErrorCode : int {
  kUsage,     // an option, shape or layout that cannot work; found before anything runs
  kData,      // an input file that is missing, too short or invalid
  kIo,        // an output that cannot be written
  kWeights,   // saved weights that are damaged or do not fit the model
  kMismatch,  // ranks disagree: configuration, message pairing, replicas
  kNumeric,   // NaN or infinity in loss or gradients; no parameter moved
  kPlan,      // a schedule or plan that breaks a rule
  kMpi,       // a failed MPI call
  kDevice,    // a failed device call; a host without memory or threads
  kPeer,      // a peer died or stopped answering
  kUser,      // an exception that is no Error, of the program's own code: a stage, data, a callback
  kInternal,  // a defect in Sluice
};

// "usage", "data", ...
[[nodiscard]] const char* name_of(ErrorCode code);

// Documented exit codes of the program: kUsage 2, kData 3, kIo 4, kWeights 5, kMismatch 6,
// kNumeric 7, kPlan 8, kMpi 9, kDevice 10, kPeer 11, kUser 13, kInternal 70.
[[nodiscard]] int exit_code(ErrorCode code);

// what() is one line: what was wrong, where, and what would be right. Control characters of the
// message become '?'. `rank` is the job rank on which the error was seen first, or -1 where no job
// exists yet; an error that reached this rank from another carries that rank's number and message.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int rank = -1,
        std::source_location location = std::source_location::current());

  [[nodiscard]] ErrorCode code() const { return code_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] const std::source_location& location() const { return location_; }

 private:
  ErrorCode code_;
  int rank_;
  std::source_location location_;
};

// The code of an exception that is not an Error: kIo for std::filesystem::filesystem_error, whose
// what() names paths and cause, else kUser.
[[nodiscard]] ErrorCode code_of_foreign(const std::exception& error);

}  // namespace sluice
#pragma GCC visibility pop
