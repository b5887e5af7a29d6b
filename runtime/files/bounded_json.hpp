// JSON of other people's files.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

namespace sluice {

// Discarded where the text is no JSON, is nested deeper than `levels`, or has an object of more
// than `keys` keys: a writer recurses, and an ordered object searches its keys from the front.
[[nodiscard]] nlohmann::ordered_json parse_bounded(std::string_view text, int levels,
                                                   std::size_t keys);

}  // namespace sluice
