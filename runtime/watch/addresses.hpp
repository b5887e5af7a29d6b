// The addresses of this host that other hosts' watchdogs may reach, chosen as MPI's interfaces are.
#pragma once

#include <string>
#include <vector>

#include "runtime/program/network_facts.hpp"

namespace sluice {

// IPv4 addresses, the likeliest first. Those that OMPI_MCA_btl_tcp_if_include names (interfaces or
// networks such as 10.0.0.0/24), else those of OMPI_MCA_oob_tcp_if_include; without either all but
// those of OMPI_MCA_btl_tcp_if_exclude. Where no such setting leaves one: those that
// is_virtual_interface() does not know, addresses of the connections that MPI has first.
[[nodiscard]] std::vector<std::string> watch_addresses(const NetworkFacts& facts);

// Whether the host has networks, but none is up.
[[nodiscard]] bool networks_are_down(const std::vector<std::string>& addresses);

}  // namespace sluice
