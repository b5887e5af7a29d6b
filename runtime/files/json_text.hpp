// JSON as text and as CBOR. The JSON library's parser and writers are templates of hundreds of
// kilobytes: they are compiled here, once.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sluice {

// What to do with a text that is no JSON: throw nlohmann::json::parse_error, or give a value that
// is_discarded().
enum class NoJson { kThrow, kDiscard };

[[nodiscard]] nlohmann::json parse_json(std::string_view text, NoJson otherwise = NoJson::kThrow);
[[nodiscard]] nlohmann::ordered_json parse_ordered_json(std::string_view text,
                                                        NoJson otherwise = NoJson::kThrow);

// Of other people's files. Discarded where the text is no JSON, is nested deeper than `levels`, or
// has an object of more than `keys` keys: a writer recurses, and an ordered object searches its
// keys from the front.
[[nodiscard]] nlohmann::ordered_json parse_bounded(std::string_view text, int levels,
                                                   std::size_t keys);

// As basic_json::dump(): one line without an indent; `invalid`: what becomes of bytes that are not
// UTF-8, by default nlohmann::json::type_error; ascii: no other characters.
using InvalidUtf8 = nlohmann::json::error_handler_t;
[[nodiscard]] std::string dump_json(const nlohmann::json& json, int indent = -1,
                                    InvalidUtf8 invalid = InvalidUtf8::strict);
[[nodiscard]] std::string dump_json(const nlohmann::ordered_json& json, int indent = -1,
                                    InvalidUtf8 invalid = InvalidUtf8::strict, bool ascii = false);

// With strings of any bytes.
[[nodiscard]] std::string to_cbor(const nlohmann::json& json);
[[nodiscard]] nlohmann::json from_cbor(std::string_view bytes);

}  // namespace sluice
