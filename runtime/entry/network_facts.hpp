// What a host says of its network: interfaces, the TCP connections of this process, and the
// settings of MPI libraries in its environment. Linux, IPv4.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice {

struct NetworkInterface {
  std::string name;       // "eth0"
  std::string address;    // "10.0.0.5"
  std::string network;    // "10.0.0.0/24"
  int speed_megabit = 0;  // per second, as the driver says; 0: unknown
};

// Of a TCP socket; "10.0.0.5:40222".
struct Connection {
  std::string local, peer;
};

struct NetworkFacts {
  bool fast = false;                         // the host has an InfiniBand or RoCE device
  std::vector<NetworkInterface> interfaces;  // up, with an address, loopback left out
  std::vector<Connection> connections;       // of this process when asked
  std::vector<std::pair<std::string, std::string>> settings;  // set variables of MPI and UCX
};

// Without connections.
[[nodiscard]] NetworkFacts network_facts();
// Established now; at most 4096.
[[nodiscard]] std::vector<Connection> tcp_connections();

// Names of the interfaces that the connections use, each once, in the order of `interfaces`; an
// address that no interface has stands for itself. Loopback is left out.
[[nodiscard]] std::vector<std::string> interfaces_used(const NetworkFacts& facts);

// Whether software on the host makes an interface of this name, which leads to containers or
// virtual machines there and not to other hosts: docker0, virbr0, veth..., br-..., cni0 and others.
[[nodiscard]] bool is_virtual_interface(std::string_view name);
// "10.0.0.5" of "10.0.0.5:40222"; the whole text where it has no colon.
[[nodiscard]] std::string_view address_of(std::string_view endpoint);

}  // namespace sluice
