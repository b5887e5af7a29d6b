// Digests of parameters, by which two runs or two directories are compared.
#pragma once

#include <span>
#include <string>

namespace sluice {

struct ParameterDigest {
  std::string name, sha256;  // hex; of the little-endian bytes of the f32 values
};
// Of the lines "<sha256>  <name>\n". The parameters are sorted by name.
[[nodiscard]] std::string digest_all(std::span<const ParameterDigest> parameters);

}  // namespace sluice
