// A large message needs MPI calls at both ends. Here progress() makes the only ones.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "comm/group/collectives.hpp"
#include "comm/group/transport.hpp"
#include "tests/comm/mpi/mpi_main.hpp"

namespace sluice {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;  // beyond every eager limit

MessageHeader header() {
  MessageHeader header;
  header.rank = 1;
  header.shape = {static_cast<std::int32_t>(kBytes / sizeof(float)), 0, 0, 0};
  header.bytes = kBytes;
  return header;
}

// Calls progress() alone until `done()`; false after 20 s.
template <typename Done>
bool progress_until(Transport& transport, const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    transport.progress();
  }
  return true;
}

TEST(TransportProgressTest, MovesALargeMessageWithoutAnyTest) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) GTEST_SKIP() << "takes two ranks";
  const std::filesystem::path arrived = others.broadcast_string(
      std::filesystem::temp_directory_path() / ("sluice-progress-" + std::to_string(::getpid())),
      0);
  {
    const auto transport = make_message_transport(*comm, 1);
    std::vector<std::byte> memory(kHeaderBytes + kBytes);
    const volatile std::byte& last = memory.back();
    const MessageBuffer buffer{memory.data(), kBytes};
    Ticket ticket = kDoneTicket;
    if (comm->rank() == 0) {
      memory.back() = std::byte{7};
      buffer.header() = header();
      ticket = transport->start_send(1, 0, buffer);
      // A file tells that it is there: a message would move the large one too.
      EXPECT_TRUE(progress_until(*transport, [&] { return std::filesystem::exists(arrived); }));
      std::filesystem::remove(arrived);
    } else if (comm->rank() == 1) {
      ticket = transport->post_recv(0, 0, buffer, header());
      EXPECT_TRUE(progress_until(*transport, [&] { return last == std::byte{7}; }));
      std::ofstream(arrived) << "arrived";
    }
    while (ticket != kDoneTicket && !transport->test(ticket)) {
    }
  }
  others.barrier();
}

}  // namespace
}  // namespace sluice
