#include <fmt/format.h>

#include <span>

#include "runtime/checkpoint/weights.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {

std::vector<ParameterDigest> digest_parameters(const WeightsDirectory& weights) {
  std::vector<ParameterDigest> digests;
  for (const std::string& name : weights.names()) {
    digests.push_back({name, sha256_hex(weights.find(name)->bytes)});
  }
  return digests;
}

std::string digest_all(std::span<const ParameterDigest> parameters) {
  std::string lines;
  for (const ParameterDigest& parameter : parameters) {
    lines += fmt::format("{}  {}\n", parameter.sha256, parameter.name);
  }
  return sha256_hex(std::as_bytes(std::span<const char>(lines)));
}

}  // namespace sluice
