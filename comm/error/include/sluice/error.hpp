// The one error type of Sluice, and the exit codes of its program. Has no source: every folder may
// use it.
#pragma once

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

namespace detail {
struct CodeFacts {
  const char* name;
  int exit_code;
};
// [code]
inline constexpr CodeFacts kCodeFacts[] = {
    {"usage", 2}, {"data", 3}, {"io", 4},      {"weights", 5}, {"mismatch", 6}, {"numeric", 7},
    {"plan", 8},  {"mpi", 9},  {"device", 10}, {"peer", 11},   {"user", 13},    {"internal", 70},
};
static_assert(sizeof(kCodeFacts) / sizeof(CodeFacts) == static_cast<int>(ErrorCode::kInternal) + 1);

// Messages quote files and arguments, which may hold line ends and codes that terminals obey.
inline std::string one_line(std::string message) {
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  return message;
}
}  // namespace detail

// "usage", "data", ...
[[nodiscard]] inline const char* name_of(ErrorCode code) {
  return detail::kCodeFacts[static_cast<int>(code)].name;
}

// The exit code of a program that ends by such an error: as listed above.
[[nodiscard]] inline int exit_code(ErrorCode code) {
  return detail::kCodeFacts[static_cast<int>(code)].exit_code;
}

// what() is one line: what was wrong, where, and what would be right. Control characters of the
// message become '?'. `rank` is the job rank on which the error was seen first, or -1 where no job
// exists yet; an error that reached this rank from another carries that rank's number and message.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int rank = -1,
        std::source_location location = std::source_location::current())
      : std::runtime_error(detail::one_line(message)),
        code_(code),
        rank_(rank),
        location_(location) {}

  [[nodiscard]] ErrorCode code() const { return code_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] const std::source_location& location() const { return location_; }

 private:
  ErrorCode code_;
  int rank_;
  std::source_location location_;
};

}  // namespace sluice
#pragma GCC visibility pop
