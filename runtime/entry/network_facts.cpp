#include "runtime/entry/network_facts.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

namespace sluice {
namespace {

constexpr std::size_t kMostConnections = 4096;

// Variables by which a user or a launcher chooses how messages travel.
constexpr const char* kSettings[] = {
    "OMPI_MCA_pml",
    "OMPI_MCA_mtl",
    "OMPI_MCA_btl",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_btl_tcp_if_exclude",
    "OMPI_MCA_btl_tcp_port_min_v4",
    "OMPI_MCA_btl_tcp_port_range_v4",
    "OMPI_MCA_oob_tcp_if_include",
    "OMPI_MCA_oob_tcp_dynamic_ipv4_ports",
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "UCX_TCP_PORT_RANGE",
    "MPICH_PORT_RANGE",
    "MPIR_CVAR_CH4_NETMOD",
    "FI_PROVIDER",
};

std::string text_of(in_addr address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  return ::inet_ntop(AF_INET, &address, text.data(), text.size()) == nullptr ? "" : text.data();
}

std::optional<in_addr> address_in(const sockaddr* address) {
  if (address == nullptr || address->sa_family != AF_INET) return std::nullopt;
  return reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
}

int speed_of(const std::string& name) {
  std::ifstream file("/sys/class/net/" + name + "/speed");
  int speed = 0;
  return file >> speed && speed > 0 ? speed : 0;
}

std::vector<NetworkInterface> interfaces_up() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<NetworkInterface> interfaces;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    const auto address = address_in(each->ifa_addr);
    const auto mask = address_in(each->ifa_netmask);
    const bool up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_LOOPBACK) == 0;
    if (!up || !address || !mask) continue;
    const in_addr network = {address->s_addr & mask->s_addr};
    interfaces.push_back({each->ifa_name, text_of(*address),
                          fmt::format("{}/{}", text_of(network), std::popcount(mask->s_addr)),
                          speed_of(each->ifa_name)});
  }
  return interfaces;
}

bool has_fast_network() {
  std::error_code ignored;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", ignored);
  return !ignored && devices != std::filesystem::directory_iterator();
}

// One end of a TCP socket over IPv4, also where it is an IPv6 socket; else empty.
template <typename Name>
std::string endpoint(int socket, Name name) {
  sockaddr_storage storage = {};
  socklen_t length = sizeof(storage);
  if (name(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return "";
  if (storage.ss_family == AF_INET) {
    const auto& ip = reinterpret_cast<const sockaddr_in&>(storage);
    return fmt::format("{}:{}", text_of(ip.sin_addr), ntohs(ip.sin_port));
  }
  if (storage.ss_family != AF_INET6) return "";
  const auto& ip = reinterpret_cast<const sockaddr_in6&>(storage);
  if (!IN6_IS_ADDR_V4MAPPED(&ip.sin6_addr)) return "";
  in_addr mapped = {};
  std::copy_n(&ip.sin6_addr.s6_addr[12], sizeof(mapped), reinterpret_cast<std::uint8_t*>(&mapped));
  return fmt::format("{}:{}", text_of(mapped), ntohs(ip.sin6_port));
}

bool is_stream(int socket) {
  int type = 0;
  socklen_t length = sizeof(type);
  return ::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM;
}

}  // namespace

NetworkFacts network_facts() {
  NetworkFacts facts;
  facts.fast = has_fast_network();
  facts.interfaces = interfaces_up();
  for (const char* name : kSettings) {
    if (const char* value = std::getenv(name); value != nullptr) {
      facts.settings.emplace_back(name, value);
    }
  }
  return facts;
}

std::vector<Connection> tcp_connections() {
  std::vector<Connection> connections;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int socket = -1;
    std::from_chars(name.data(), name.data() + name.size(), socket);
    if (socket < 0 || !is_stream(socket)) continue;
    Connection each = {endpoint(socket, ::getsockname), endpoint(socket, ::getpeername)};
    if (each.local.empty() || each.peer.empty()) continue;
    connections.push_back(std::move(each));
    if (connections.size() == kMostConnections) break;
  }
  return connections;
}

std::vector<std::string> interfaces_used(const NetworkFacts& facts) {
  std::vector<std::string> names;
  std::vector<std::string_view> addresses;
  for (const Connection& each : facts.connections) {
    const std::string_view address = address_of(each.local);
    const bool seen = std::ranges::find(addresses, address) != addresses.end();
    if (!seen && !address.starts_with("127.")) addresses.push_back(address);
  }
  for (const NetworkInterface& known : facts.interfaces) {
    const auto found = std::ranges::find(addresses, known.address);
    if (found == addresses.end()) continue;
    if (std::ranges::find(names, known.name) == names.end()) {
      names.push_back(known.name);
    }
    addresses.erase(found);
  }
  names.insert(names.end(), addresses.begin(), addresses.end());
  return names;
}

bool is_virtual_interface(std::string_view name) {
  constexpr std::array<std::string_view, 16> kBeginnings = {
      "docker", "virbr", "veth",  "br-",  "cni",   "flannel", "cali",  "cilium",
      "podman", "lxcbr", "lxdbr", "vnet", "weave", "kube-",   "vmnet", "vboxnet"};
  return std::ranges::any_of(kBeginnings,
                             [&](std::string_view each) { return name.starts_with(each); });
}

std::string_view address_of(std::string_view endpoint) {
  return endpoint.substr(0, endpoint.find(':'));
}

}  // namespace sluice
