#include "runtime/models/parameter_digest.hpp"

#include <fmt/format.h>

#include "runtime/files/sha256.hpp"

namespace sluice {

std::string digest_all(std::span<const ParameterDigest> parameters) {
  std::string lines;
  for (const ParameterDigest& parameter : parameters) {
    lines += fmt::format("{}  {}\n", parameter.sha256, parameter.name);
  }
  return sha256_hex(std::as_bytes(std::span<const char>(lines)));
}

}  // namespace sluice
