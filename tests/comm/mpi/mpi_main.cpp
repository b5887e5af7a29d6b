#include "tests/comm/mpi/mpi_main.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "comm/mpi/mpi_session.hpp"

namespace sluice::testing {

namespace {

std::unique_ptr<Communicator>& world_slot() {
  static std::unique_ptr<Communicator> slot;
  return slot;
}

// Prints failures only, at once, so that they are seen even if the job then hangs.
class FailurePrinter : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

  void OnTestStart(const ::testing::TestInfo& info) override {
    test_ = std::string(info.test_suite_name()) + "." + info.name();
  }

  // GoogleTest holds its lock here: nothing of UnitTest may be asked.
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) {
      return;
    }
    std::ostringstream text;
    text << test_ << " ";
    text << (result.file_name() != nullptr ? result.file_name() : "unknown file") << ":"
         << result.line_number() << ": Failure\n"
         << result.message();
    std::istringstream lines(text.str());
    for (std::string line; std::getline(lines, line);) {
      std::fprintf(stderr, "[rank %d] %s\n", rank_, line.c_str());
    }
    std::fflush(stderr);
  }

 private:
  int rank_;
  std::string test_;
};

// What a rank ends with: 1 where a case failed; where SLUICE_TEST_SKIP_CODE is set, that code where
// a case was skipped; else 0.
int run_all() {
  if (RUN_ALL_TESTS() != 0) return 1;
  const char* code = std::getenv("SLUICE_TEST_SKIP_CODE");
  if (code == nullptr || ::testing::UnitTest::GetInstance()->skipped_test_count() == 0) return 0;
  return std::atoi(code);
}

// 1 where any rank's is 1, else the first that is not 0.
int merge(Communicator& comm, int result) {
  std::vector<int> results(static_cast<std::size_t>(comm.size()));
  Collectives collectives(comm, 0, nullptr);
  collectives.all_gather(std::as_bytes(std::span(&result, 1)),
                         std::as_writable_bytes(std::span(results)));
  int merged = 0;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const int other = results[static_cast<std::size_t>(rank)];
    if (other == 1 && comm.rank() == 0) std::fprintf(stderr, "tests failed on rank %d\n", rank);
    if (other == 1 || merged == 0) merged = other;
  }
  return merged;
}

int run(int argc, char** argv) {
  const MpiSession session(&argc, &argv);
  ::testing::InitGoogleTest(&argc, argv);
  const auto world = session.world();
  world_slot() = world->duplicate();
  if (world->rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter(world->rank()));
  }
  const int merged = merge(*world, run_all());
  world_slot().reset();
  return merged;
}

}  // namespace

Communicator& world() { return *world_slot(); }

}  // namespace sluice::testing

int main(int argc, char** argv) {
  try {
    return sluice::testing::run(argc, argv);
  } catch (const sluice::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return sluice::exit_code(error.code());
  }
}
