// Links between watchdogs: who may join, and what a stranger can do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "runtime/watchdog/tcp_link.hpp"

namespace sluice {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(20);

// What one rank hears.
struct Ear : TcpLink::Listener {
  void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) override {
    notes.emplace_back(rank, kind);
    text.assign(reinterpret_cast<const char*>(contents.data()), contents.size());
  }
  void on_end(int rank) override { ends.push_back(rank); }

  std::vector<std::pair<int, NoteKind>> notes;
  std::string text;
  std::vector<int> ends;
};

// Ranks of one host, which share a thread.
struct Ranks {
  explicit Ranks(int count, const std::vector<int>& monitors)
      : ears(static_cast<std::size_t>(count)) {
    for (int rank = 0; rank < count; ++rank) {
      TcpPlan plan{.rank = rank,
                   .hosts = std::vector<std::string>(static_cast<std::size_t>(count), "host"),
                   .monitors = monitors,
                   .addresses = {}};
      links.push_back(std::make_unique<TcpLink>(context, std::move(plan)));
      endpoints.push_back(links.back()->endpoints());
    }
  }
  // What each rank says of its connections. `keys`: [rank].
  std::vector<std::string> connect(const std::vector<SecretKey>& keys, double seconds = 10) {
    std::vector<std::optional<std::string>> results(links.size());
    for (std::size_t rank = 0; rank < links.size(); ++rank) {
      links[rank]->connect(keys[rank], endpoints, ears[rank], seconds,
                           [&results, rank](const std::string& fault) { results[rank] = fault; });
    }
    until([&] {
      return std::all_of(results.begin(), results.end(), [](auto& each) { return each; });
    });
    std::vector<std::string> faults;
    for (const auto& each : results) faults.push_back(each.value_or("never told"));
    return faults;
  }
  template <typename Condition>
  bool until(const Condition& condition) {
    const auto deadline = Clock::now() + kPatience;
    while (!condition() && Clock::now() < deadline) {
      context.restart();
      context.run_one_for(std::chrono::milliseconds(50));
    }
    return condition();
  }

  asio::io_context context;
  std::vector<Ear> ears;
  std::vector<std::string> endpoints;
  std::vector<std::unique_ptr<TcpLink>> links;
};

std::vector<SecretKey> same_key(std::size_t count) {
  return std::vector<SecretKey>(count, random_key());
}

tcp::endpoint endpoint_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  return {asio::ip::make_address(text.substr(0, colon)),
          static_cast<unsigned short>(std::stoi(text.substr(colon + 1)))};
}

TEST(TcpLinkTest, CarriesNotesBetweenMonitorsAndOthers) {
  Ranks ranks(4, {0, 1});
  EXPECT_THAT(ranks.connect(same_key(4)), ElementsAre("", "", "", ""));
  EXPECT_EQ(ranks.links[0]->connections(), 3U);
  EXPECT_EQ(ranks.links[3]->connections(), 2U) << "to the monitors alone";
  ranks.links[3]->send(0, NoteKind::kVerdict, bytes_of("rank 2 is lost"));
  ASSERT_TRUE(ranks.until([&] { return !ranks.ears[0].notes.empty(); }));
  EXPECT_EQ(ranks.ears[0].notes.front(), std::pair(3, NoteKind::kVerdict));
  EXPECT_EQ(ranks.ears[0].text, "rank 2 is lost");
  ranks.links[1]->send(2, NoteKind::kStatus, bytes_of("x"));
  ASSERT_TRUE(ranks.until([&] { return !ranks.ears[2].notes.empty(); }));
  EXPECT_EQ(ranks.ears[2].notes.front(), std::pair(1, NoteKind::kStatus));
}

TEST(TcpLinkTest, TellsAGoodbyeFromAnEnd) {
  Ranks ranks(3, {0, 1, 2});
  EXPECT_THAT(ranks.connect(same_key(3)), ElementsAre("", "", ""));
  ranks.links[1]->close();
  ASSERT_TRUE(ranks.until([&] { return !ranks.ears[0].notes.empty(); }));
  EXPECT_EQ(ranks.ears[0].notes.front(), std::pair(1, NoteKind::kBye));
  ranks.links[2].reset();  // as the kernel closes what a dead process had
  ASSERT_TRUE(ranks.until([&] { return !ranks.ears[0].ends.empty(); }));
  EXPECT_THAT(ranks.ears[0].ends, ElementsAre(2));
}

TEST(TcpLinkTest, RefusesARankWithAnotherSecret) {
  Ranks ranks(3, {0});
  std::vector<SecretKey> keys = same_key(3);
  keys[2] = random_key();
  const auto faults = ranks.connect(keys, 1);
  EXPECT_THAT(faults[2], HasSubstr("the answer was no watchdog's of this job"));
  EXPECT_THAT(faults[1], IsEmpty());
  EXPECT_THAT(faults[0], HasSubstr("rank 2 on host has not called"));
  EXPECT_EQ(ranks.links[0]->connections(), 1U);
}

TEST(TcpLinkTest, StopsListeningOnceAllRanksAreThere) {
  Ranks ranks(2, {0});
  EXPECT_THAT(ranks.connect(same_key(2)), ElementsAre("", ""));
  tcp::socket stranger(ranks.context);
  boost::system::error_code error;
  stranger.connect(endpoint_of(ranks.endpoints[0]), error);
  EXPECT_EQ(error, asio::error::connection_refused);
}

// Strangers that send other bytes, or nothing, neither join nor keep the ranks from each other.
TEST(TcpLinkTest, OutlivesStrangers) {
  Ranks ranks(2, {0});
  std::vector<tcp::socket> strangers;
  for (int i = 0; i < 40; ++i) {
    strangers.emplace_back(ranks.context).connect(endpoint_of(ranks.endpoints[0]));
    if (i % 2 == 0) continue;
    const std::string bytes(100, static_cast<char>(i));
    asio::write(strangers.back(), asio::buffer(bytes));
  }
  EXPECT_THAT(ranks.connect(same_key(2)), ElementsAre("", ""));
  EXPECT_EQ(ranks.links[0]->connections(), 1U);
  // Those that have sent what is no greeting are closed.
  EXPECT_TRUE(ranks.until([&] {
    strangers[1].non_blocking(true);
    std::array<char, 64> got{};
    boost::system::error_code error;
    while (strangers[1].read_some(asio::buffer(got), error) > 0) {
    }
    return error && error != asio::error::would_block;
  }));
  ranks.links[1]->send(0, NoteKind::kStatus, bytes_of("still here"));
  EXPECT_TRUE(ranks.until([&] { return ranks.ears[0].text == "still here"; }));
}

TEST(TcpLinkTest, SaysWhichMonitorCannotBeReached) {
  Ranks ranks(2, {0});
  // A port that nobody listens at.
  tcp::acceptor unused(ranks.context, {asio::ip::address_v4::loopback(), 0});
  const unsigned short port = unused.local_endpoint().port();
  unused.close();
  ranks.endpoints[0] = "127.0.0.1:" + std::to_string(port);
  const auto faults = ranks.connect(same_key(2), 1);
  EXPECT_THAT(faults[1], HasSubstr("rank 1 on host cannot reach rank 0 on host: 127.0.0.1:"));
  EXPECT_THAT(faults[1], HasSubstr("refused"));
}

TEST(TcpLinkTest, TakesAPortOfItsRangeOrSaysThatNoneIsFree) {
  asio::io_context context;
  tcp::acceptor taken(context, {asio::ip::address_v4::loopback(), 0});
  const int port = taken.local_endpoint().port();
  const TcpPlan plan{.rank = 0,
                     .hosts = {"host", "host"},
                     .monitors = {0},
                     .addresses = {},
                     .first_port = port,
                     .last_port = port};
  try {
    const TcpLink link(context, plan);
    FAIL() << "it listens at " << link.endpoints();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("at port " + std::to_string(port)));
  }
  taken.close();
  EXPECT_EQ(TcpLink(context, plan).endpoints(), "127.0.0.1:" + std::to_string(port));
}

NetworkFacts host_with(std::vector<std::pair<std::string, std::string>> settings) {
  NetworkFacts facts;
  facts.interfaces = {{"docker0", "172.17.0.1", "172.17.0.0/16", 0},
                      {"eth0", "10.0.0.5", "10.0.0.0/24", 1000},
                      {"ib0", "192.168.3.5", "192.168.3.0/24", 0}};
  facts.settings = std::move(settings);
  return facts;
}

TEST(WatchAddressesTest, FollowMpisChoice) {
  EXPECT_THAT(watch_addresses(host_with({{"OMPI_MCA_btl_tcp_if_include", "ib0"}})),
              ElementsAre("192.168.3.5"));
  EXPECT_THAT(watch_addresses(host_with({{"OMPI_MCA_btl_tcp_if_include", "10.0.0.0/8,lo"}})),
              ElementsAre("10.0.0.5"));
  EXPECT_THAT(watch_addresses(host_with({{"OMPI_MCA_oob_tcp_if_include", "docker0"}})),
              ElementsAre("172.17.0.1"));
  EXPECT_THAT(watch_addresses(host_with({{"OMPI_MCA_btl_tcp_if_exclude", "eth0,lo"}})),
              ElementsAre("192.168.3.5"));
}

TEST(WatchAddressesTest, LeaveOutVirtualInterfacesAndPreferThoseInUse) {
  NetworkFacts facts = host_with({});
  EXPECT_THAT(watch_addresses(facts), ElementsAre("10.0.0.5", "192.168.3.5"));
  facts.connections = {{"192.168.3.5:4000", "192.168.3.6:4001"}};
  EXPECT_THAT(watch_addresses(facts), ElementsAre("192.168.3.5", "10.0.0.5"));
  facts.interfaces.resize(1);
  EXPECT_THAT(watch_addresses(facts), ElementsAre("172.17.0.1")) << "nothing else is there";
}

}  // namespace
}  // namespace sluice
