#include "runtime/entry/network_facts.hpp"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace sluice {
namespace {

using ::testing::Contains;
using ::testing::Pair;

TEST(NetworkFactsTest, FindsTheConnectionsOfThisProcess) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ASSERT_EQ(::connect(socket, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int accepted = ::accept(listener, nullptr, nullptr);
  const std::string port = ":" + std::to_string(ntohs(address.sin_port));
  const auto connections = tcp_connections();
  const auto found =
      std::find_if(connections.begin(), connections.end(),
                   [&](const Connection& each) { return each.peer.ends_with(port); });
  ASSERT_NE(found, connections.end());
  EXPECT_EQ(address_of(found->peer), "127.0.0.1");
  EXPECT_EQ(found->peer, "127.0.0.1" + port);
  const std::string client = found->local;  // whose end the accepted socket has as its peer
  EXPECT_TRUE(std::any_of(connections.begin(), connections.end(), [&](const Connection& each) {
    return each.peer == client && each.local == "127.0.0.1" + port;
  }));
  for (const int each : {accepted, socket, listener}) ::close(each);
}

TEST(NetworkFactsTest, InterfacesHaveAddressesInTheirNetworks) {
  for (const NetworkInterface& each : network_facts().interfaces) {
    EXPECT_NE(each.name, "lo");
    EXPECT_NE(each.network.find('/'), std::string::npos) << each.network;
    in_addr address = {};
    EXPECT_EQ(::inet_pton(AF_INET, each.address.c_str(), &address), 1) << each.address;
  }
}

TEST(NetworkFactsTest, NotesTheSettingsOfMpi) {
  ::setenv("OMPI_MCA_btl_tcp_port_min_v4", "20000", 1);
  EXPECT_THAT(network_facts().settings, Contains(Pair("OMPI_MCA_btl_tcp_port_min_v4", "20000")));
  ::unsetenv("OMPI_MCA_btl_tcp_port_min_v4");
}

TEST(NetworkFactsTest, KnowsTheNamesOfVirtualInterfaces) {
  for (const char* name :
       {"docker0", "virbr0", "veth12ab", "br-0f1e", "cni0", "flannel.1", "podman1", "cali123"}) {
    EXPECT_TRUE(is_virtual_interface(name)) << name;
  }
  for (const char* name : {"eth0", "ens3", "ib0", "bond0", "br0", "enp1s0f0", ""}) {
    EXPECT_FALSE(is_virtual_interface(name)) << name;
  }
}

}  // namespace
}  // namespace sluice
