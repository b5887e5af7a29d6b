#include "tests/comm/mpi/mpi_main.hpp"

#include <gtest/gtest.h>

#include <cstdio>
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

// 1 where any rank's is not 0.
int merge(Communicator& comm, int result) {
  std::vector<int> results(static_cast<std::size_t>(comm.size()));
  Collectives collectives(comm, 0, nullptr);
  collectives.all_gather(std::as_bytes(std::span(&result, 1)),
                         std::as_writable_bytes(std::span(results)));
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (results[static_cast<std::size_t>(rank)] != 0) {
      if (comm.rank() == 0) {
        std::fprintf(stderr, "tests failed on rank %d\n", rank);
      }
      result = 1;
    }
  }
  return result;
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
  const int result = RUN_ALL_TESTS();
  const int merged = merge(*world, result);
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
