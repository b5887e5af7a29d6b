#include "runtime/watch/addresses.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <boost/asio/ip/address_v4.hpp>
#include <boost/asio/ip/network_v4.hpp>
#include <memory>
#include <string_view>

namespace sluice {
namespace {

namespace ip = boost::asio::ip;

std::string_view setting(const NetworkFacts& facts, std::string_view name) {
  for (const auto& [key, value] : facts.settings) {
    if (key == name) return value;
  }
  return {};
}

// Whether `entry`, an interface's name or a network, names `each`.
bool names(std::string_view entry, const NetworkInterface& each) {
  if (entry.find('/') == std::string_view::npos) return entry == each.name;
  boost::system::error_code no_network, no_address;
  const auto network = ip::make_network_v4(std::string(entry), no_network);
  const auto address = ip::make_address_v4(each.address, no_address);
  return !no_network && !no_address &&
         ip::network_v4(address, network.prefix_length()).canonical() == network.canonical();
}

bool named_by(std::string_view list, const NetworkInterface& each) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (names(list.substr(0, comma), each)) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

}  // namespace

std::vector<std::string> watch_addresses(const NetworkFacts& facts) {
  std::string_view include = setting(facts, "OMPI_MCA_btl_tcp_if_include");
  if (include.empty()) include = setting(facts, "OMPI_MCA_oob_tcp_if_include");
  const std::string_view exclude = setting(facts, "OMPI_MCA_btl_tcp_if_exclude");
  std::vector<std::string> chosen;
  const auto add = [&](const auto& condition) {
    for (const NetworkInterface& each : facts.interfaces) {
      if (condition(each)) chosen.push_back(each.address);
    }
  };
  if (!include.empty()) {
    add([&](const NetworkInterface& each) { return named_by(include, each); });
    if (!chosen.empty()) return chosen;
  }
  add([&](const NetworkInterface& each) {
    return !is_virtual_interface(each.name) && !named_by(exclude, each);
  });
  if (chosen.empty()) {
    add([&](const NetworkInterface& each) { return !named_by(exclude, each); });
  }
  std::stable_partition(chosen.begin(), chosen.end(), [&](const std::string& address) {
    return std::any_of(facts.connections.begin(), facts.connections.end(),
                       [&](const Connection& each) { return address_of(each.local) == address; });
  });
  return chosen;
}

bool networks_are_down(const std::vector<std::string>& addresses) {
  if (addresses.empty()) return false;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    constexpr unsigned int kWorks = IFF_UP | IFF_RUNNING;
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET ||
        (each->ifa_flags & kWorks) != kWorks) {
      continue;
    }
    const auto& address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    const std::string text = ip::address_v4(ntohl(address.s_addr)).to_string();
    if (std::find(addresses.begin(), addresses.end(), text) != addresses.end()) return false;
  }
  return true;
}

}  // namespace sluice
