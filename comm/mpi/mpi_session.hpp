// MPI for a process: initialises it if it is not initialised, and then also finalises it.
// No MPI type appears here; <sluice/mpi.hpp> takes a caller's MPI_Comm.
#pragma once

#include <memory>
#include <string>

#include "comm/group/communicator.hpp"

namespace sluice {

struct MpiInfo {
  std::string library;       // one line, e.g. "Open MPI v4.1.4"
  std::string standard;      // "3.1"
  std::string thread_level;  // granted: "single" | "funneled" | "serialized" | "multiple"
  std::string host;          // processor name
  std::string components;    // point-to-point layer where it can be known, else empty
  int tag_upper_bound = 0;
  int local_rank = 0, local_size = 1;
  int cores = 1;  // this process may run on, by its affinity mask
};

// Of this process. Requires that MPI is up.
[[nodiscard]] MpiInfo mpi_info();

class MpiSession {
 public:
  // Requests MPI_THREAD_FUNNELED. If the launcher's environment shows more local ranks than cores,
  // first sets Open MPI's mpi_yield_when_idle, unless the user has set it.
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  // False where MPI was up before.
  [[nodiscard]] bool owns() const { return owns_; }
  // All ranks of the job, on a duplicated communicator with MPI_ERRORS_RETURN.
  [[nodiscard]] std::unique_ptr<Communicator> world() const;
  // Ends every rank of the job with `code`; does not return.
  [[noreturn]] void abort(int code) const;

 private:
  bool owns_ = false;
};

}  // namespace sluice
