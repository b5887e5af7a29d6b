// A program for cli_test: failing_rank <how>, where <how> is
//   one         rank 1 throws while the others wait for a message that never comes
//   all         every rank throws the same usage error
//   foreign     rank 1 throws something that is no Error
//   filesystem  rank 1 throws what std::filesystem does
//   none        every rank returns
#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"

namespace {

// Blocks for good, without looking at anything but this message.
void wait_for_nothing(sluice::Communicator& world) {
  std::byte note{};
  sluice::Request request =
      world.post_recv(sluice::Communicator::kAnyPeer, world.max_tag(), std::span(&note, 1));
  sluice::Waiter waiter(world.local_size());
  while (!world.test(request)) waiter.pause();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "none";
  return sluice::run_main(argc, argv, [&](sluice::World& ranks) {
    sluice::Communicator& world = sluice::communicator_of(ranks);
    if (how == "none") return;
    if (how == "all") throw sluice::Error(sluice::ErrorCode::kUsage, "refused by all");
    if (world.rank() != 1) wait_for_nothing(world);
    if (how == "filesystem") {
      throw std::filesystem::filesystem_error("cannot remove", "a/file",
                                              std::make_error_code(std::errc::not_a_directory));
    }
    if (how == "foreign") throw std::runtime_error("not one of ours");
    throw sluice::Error(sluice::ErrorCode::kNumeric, "stage 1 lost a number");
  });
}
