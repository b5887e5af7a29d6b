// Runs one test body over loopback and over MPI. A test is written
//
//   SLUICE_COMM_TEST(TransportTest, RefusesAnotherMicroBatch) { ... comm ... }
//
// Built with SLUICE_UNDER_MPI the body runs once, with a duplicate of the job's communicator; else
// it runs over loopback with 1, 2, 3, 4, 5 and 7 ranks. EXPECT_* may be used on every rank.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"
#include "tests/loopback/loopback.hpp"
#ifdef SLUICE_UNDER_MPI
#include "tests/comm/mpi/mpi_main.hpp"
#endif

namespace sluice::testing {

inline void run_everywhere(const std::function<void(Communicator&)>& body) {
#ifdef SLUICE_UNDER_MPI
  const auto comm = world().duplicate();
  body(*comm);
#else
  for (const int ranks : {1, 2, 3, 4, 5, 7}) {
    SCOPED_TRACE(::testing::Message() << "loopback of " << ranks << " ranks");
    run_loopback(ranks, body);
  }
#endif
}

// Waits for one request.
inline Arrival finish(Communicator& comm, Request& request) {
  Waiter waiter(comm.local_size());
  Arrival arrival;
  while (!comm.test(request, &arrival)) {
    waiter.pause();
  }
  return arrival;
}

// Neighbours in a ring; a lone rank is its own.
inline int next(const Communicator& comm) { return (comm.rank() + 1) % comm.size(); }
inline int previous(const Communicator& comm) {
  return (comm.rank() + comm.size() - 1) % comm.size();
}

}  // namespace sluice::testing

#define SLUICE_COMM_TEST(suite, name)                                             \
  static void suite##_##name##_body(::sluice::Communicator& comm);                \
  TEST(suite, name) { ::sluice::testing::run_everywhere(suite##_##name##_body); } \
  static void suite##_##name##_body([[maybe_unused]] ::sluice::Communicator& comm)
