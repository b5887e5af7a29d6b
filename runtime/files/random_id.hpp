// Names that no other process chooses.
#pragma once

#include <string>

namespace sluice {

// 32 hexadecimal digits of 128 random bits. Not for secrets.
[[nodiscard]] std::string random_id();

}  // namespace sluice
