// The first messages of a job: rank 0 learns that every rank is there and runs the same software.
#pragma once

#include <chrono>
#include <string>

namespace sluice {

// Collective over MPI_COMM_WORLD, with point-to-point messages of the largest tag alone. Requires
// that MPI is up. `build` names this process's build of Sluice. Every rank sends it to rank 0 with
// the MPI library's version and its host, and waits for the verdict.
//
// Throws Error(kMismatch) on every rank where builds or MPI versions differ; it names two ranks,
// their hosts and both versions. Throws Error(kPeer) on every rank that is reached where ranks stay
// silent for `limit`, naming them, and on a rank that hears nothing from rank 0 for twice as long,
// naming its host. Error::rank() is the rank that has to print. After Error(kPeer) messages may be
// in flight, so the job has to be aborted.
void make_first_contact(const std::string& build, std::chrono::milliseconds limit);

}  // namespace sluice
