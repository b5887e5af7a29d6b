#include "runtime/models/tokenizer_file.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {
namespace {

using TokenizerJson = nlohmann::json;
using Kind = DecodeStep::Kind;

constexpr int kMostNested = 20, kMostSteps = 16, kMostStripped = 1000;
constexpr std::size_t kMostQuoted = 60;
constexpr const char* kLegalSteps =
    "ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, and a Sequence of them";

// Text of a file within a message of one line.
std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char letter : text.substr(0, kMostQuoted)) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte < ' ' || byte >= 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += letter;
    }
  }
  return result + (text.size() > kMostQuoted ? "...'" : "'");
}

// Throws for one file.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    throw_error(ErrorCode::kWeights, "tokenizer '{}' {}", path_.string(),
                fmt::format(text, std::forward<Args>(args)...));
  }

  // The JSON without the model's merges, which nothing here needs.
  [[nodiscard]] TokenizerJson json(std::string_view text) const {
    using Event = TokenizerJson::parse_event_t;
    std::string top, second;
    std::size_t keys = 0;
    bool deep = false, merges_left = false;
    const auto keep = [&](int depth, Event event, const TokenizerJson& value) {
      const bool starts = event == Event::object_start || event == Event::array_start;
      if (starts && depth >= kMostNested) deep = true;
      if (deep) return false;
      if (event != Event::key) return true;
      if (depth == 1) top = value.get<std::string>();
      if (depth == 2) second = value.get<std::string>();
      merges_left = depth == 2 && top == "model" && second == "merges";
      if (depth == 3 && top == "model" && second == "vocab") ++keys;
      return !merges_left;
    };
    TokenizerJson result = TokenizerJson::parse(text, keep, false);
    if (deep) refuse("is nested deeper than {} levels", kMostNested);
    if (result.is_discarded() || !result.is_object()) {
      refuse("is no object of JSON in UTF-8; a tokenizer.json of Hugging Face is needed");
    }
    const TokenizerJson& vocabulary = member(member(result, "model", ""), "vocab", "model.");
    if (vocabulary.is_object() && vocabulary.size() != keys) {
      refuse("has a token twice in model.vocab ({} entries, {} of them different)", keys,
             vocabulary.size());
    }
    return result;
  }

  // `where`: the path of the object, such as "model.".
  [[nodiscard]] const TokenizerJson& member(const TokenizerJson& object, const char* name,
                                            const std::string& where) const {
    if (!object.is_object() || !object.contains(name)) refuse("has no {}{}", where, name);
    return object[name];
  }
  [[nodiscard]] std::string string(const TokenizerJson& object, const char* name,
                                   const std::string& where) const {
    const TokenizerJson& value = member(object, name, where);
    if (!value.is_string()) refuse("has a {}{} that is no text", where, name);
    return value.get<std::string>();
  }
  [[nodiscard]] std::int64_t integer(const TokenizerJson& value, const std::string& what,
                                     std::int64_t low, std::int64_t high) const {
    const bool fits = value.is_number_unsigned()
                          ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(high)
                          : value.is_number_integer() && value.get<std::int64_t>() <= high;
    if (!fits || value.get<std::int64_t>() < low) {
      refuse("has {} {}; legal are whole numbers from {} to {}", what,
             value.is_number() ? value.dump() : std::string("that is no number"), low, high);
    }
    return value.get<std::int64_t>();
  }
  [[nodiscard]] int id(const TokenizerJson& value, const std::string& token) const {
    return static_cast<int>(integer(value, fmt::format("for token {} the id", in_quotes(token)), 0,
                                    std::numeric_limits<std::int32_t>::max() - 1));
  }

 private:
  std::filesystem::path path_;
};

void read_vocabulary(const Reader& reader, const TokenizerJson& model, TokenizerFile& file) {
  // Old files leave the type out.
  const std::string type = model.contains("type") ? reader.string(model, "type", "model.") : "BPE";
  if (type != "BPE") reader.refuse("has model.type {}; legal: 'BPE'", in_quotes(type));
  const TokenizerJson& vocabulary = reader.member(model, "vocab", "model.");
  if (!vocabulary.is_object() || vocabulary.empty()) {
    reader.refuse("has a model.vocab that is no object of tokens and their ids, or an empty one");
  }
  file.tokens.reserve(vocabulary.size());
  for (const auto& [text, value] : vocabulary.items()) {
    const int id = reader.id(value, text);
    const auto [place, is_new] = file.tokens.try_emplace(id, TokenizerFile::Token{text, false});
    if (!is_new) {
      reader.refuse("has id {} for {} and for {} in model.vocab; an id has one token", id,
                    in_quotes(place->second.text), in_quotes(text));
    }
  }
}

// An added token may repeat an entry of the vocabulary, with its id.
void read_added(const Reader& reader, const TokenizerJson& json, TokenizerFile& file) {
  const auto found = json.find("added_tokens");
  if (found == json.end() || found->is_null()) return;
  if (!found->is_array()) reader.refuse("has added_tokens that are no list");
  const TokenizerJson& vocabulary = json["model"]["vocab"];
  std::unordered_map<std::string, int> seen;
  for (const TokenizerJson& entry : *found) {
    const std::string text = reader.string(entry, "content", "added_tokens.");
    const int id = reader.id(reader.member(entry, "id", "added_tokens."), text);
    const TokenizerJson& special = reader.member(entry, "special", "added_tokens.");
    if (!special.is_boolean()) {
      reader.refuse("has added token {} with a 'special' that is neither true nor false",
                    in_quotes(text));
    }
    const auto known = vocabulary.find(text);
    if (!seen.try_emplace(text, id).second ||
        (known != vocabulary.end() && known->get<std::int64_t>() != id)) {
      reader.refuse("has token {} twice: added_tokens with id {}, and another id before",
                    in_quotes(text), id);
    }
    const auto [place, is_new] = file.tokens.try_emplace(id, TokenizerFile::Token{text, false});
    if (!is_new && place->second.text != text) {
      reader.refuse("has id {} for {} and for {} in added_tokens; an id has one token", id,
                    in_quotes(place->second.text), in_quotes(text));
    }
    place->second.special = special.get<bool>();
  }
}

std::string one_letter(const Reader& reader, const TokenizerJson& step, const char* name,
                       const std::string& where) {
  std::string text = reader.string(step, name, where);
  std::size_t letters = 0;
  for (const char byte : text) letters += (static_cast<unsigned char>(byte) & 0xC0) != 0x80 ? 1 : 0;
  if (letters != 1) {
    reader.refuse("has {}{} {}; legal is one letter", where, name, in_quotes(text));
  }
  return text;
}

DecodeStep read_replace(const Reader& reader, const TokenizerJson& step, const std::string& where) {
  const TokenizerJson& pattern = reader.member(step, "pattern", where);
  if (!pattern.is_object() || !pattern.contains("String")) {
    reader.refuse("has a {}pattern that is no 'String'; a regular expression is not read", where);
  }
  DecodeStep result = {.kind = Kind::kReplace,
                       .from = reader.string(pattern, "String", where + "pattern."),
                       .to = reader.string(step, "content", where)};
  if (result.from.empty()) reader.refuse("has an empty {}pattern.String", where);
  return result;
}

DecodeStep read_strip(const Reader& reader, const TokenizerJson& step, const std::string& where) {
  (void)reader.integer(reader.member(step, "stop", where), where + "stop", 0, 0);
  const std::int64_t most =
      reader.integer(reader.member(step, "start", where), where + "start", 0, kMostStripped);
  return {.kind = Kind::kStrip,
          .from = one_letter(reader, step, "content", where),
          .most = static_cast<int>(most)};
}

// Newer files say prepend_scheme, older ones add_prefix_space.
DecodeStep read_metaspace(const Reader& reader, const TokenizerJson& step,
                          const std::string& where) {
  bool first = true;
  if (step.contains("prepend_scheme")) {
    first = reader.string(step, "prepend_scheme", where) != "never";
  } else if (step.contains("add_prefix_space")) {
    const TokenizerJson& value = step["add_prefix_space"];
    if (!value.is_boolean()) {
      reader.refuse("has a {}add_prefix_space that is neither true nor false", where);
    }
    first = value.get<bool>();
  }
  return {.kind = Kind::kMetaspace,
          .from = one_letter(reader, step, "replacement", where),
          .most = first ? 1 : 0};
}

DecodeStep read_step(const Reader& reader, const TokenizerJson& step, const std::string& where) {
  const std::string type = reader.string(step, "type", where);
  if (type == "ByteLevel") return {.kind = Kind::kByteLevel};
  if (type == "ByteFallback") return {.kind = Kind::kByteFallback};
  if (type == "Fuse") return {.kind = Kind::kFuse};
  if (type == "Replace") return read_replace(reader, step, where);
  if (type == "Strip") return read_strip(reader, step, where);
  if (type == "Metaspace") return read_metaspace(reader, step, where);
  reader.refuse("has {}type {}; legal: {}", where, in_quotes(type), kLegalSteps);
}

std::vector<DecodeStep> read_steps(const Reader& reader, const TokenizerJson& json) {
  const auto found = json.find("decoder");
  if (found == json.end() || found->is_null()) {
    reader.refuse("has no decoder; legal: {}", kLegalSteps);
  }
  if (reader.string(*found, "type", "decoder.") != "Sequence") {
    return {read_step(reader, *found, "decoder.")};
  }
  const TokenizerJson& list = reader.member(*found, "decoders", "decoder.");
  if (!list.is_array() || list.empty() || list.size() > kMostSteps) {
    reader.refuse("has decoder.decoders that are no list of 1 to {} decoders", kMostSteps);
  }
  std::vector<DecodeStep> steps;
  bool joined = false;
  for (const TokenizerJson& step : list) {
    const std::string where = fmt::format("decoder.decoders[{}].", steps.size());
    steps.push_back(read_step(reader, step, where));
    const Kind kind = steps.back().kind;
    if (joined && kind != Kind::kStrip && kind != Kind::kFuse) {
      reader.refuse("has {}type {} after one that joins all tokens; legal there: Strip, Fuse",
                    where, in_quotes(step["type"].get<std::string>()));
    }
    joined = joined || kind == Kind::kByteLevel || kind == Kind::kFuse;
  }
  return steps;
}

}  // namespace

TokenizerFile read_tokenizer_file(const std::filesystem::path& path) {
  const Reader reader(path);
  const TokenizerJson json =
      reader.json(read_text(path, TokenizerFile::kMostBytes, ErrorCode::kWeights));
  TokenizerFile file;
  read_vocabulary(reader, json["model"], file);
  read_added(reader, json, file);
  file.steps = read_steps(reader, json);
  return file;
}

void require_same_tokenizer(const TokenFile& data, const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "tokenizer.json";
  std::error_code ignored;
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
  if (!there) return;
  if (data.format() == TokenFormat::kText) {
    throw_error(ErrorCode::kData,
                "data file '{0}' is text, whose bytes are no tokens of the model's '{1}'; "
                "examples/prepare_tokens.py --tokenizer {1} {0} --output tokens/{2}.bin makes them",
                data.path().string(), path.string(), data.path().stem().string());
  }
  if (data.tokenizer_sha256().empty()) return;
  const std::string hash = sha256_hex(MappedFile(path, ErrorCode::kData).bytes());
  if (hash == data.tokenizer_sha256()) return;
  throw_error(ErrorCode::kData,
              "data file '{}' was made by a tokenizer.json with SHA-256 {}, but the model's '{}' "
              "has {}; legal is data that prepare_tokens.py made with --tokenizer and the model's "
              "file",
              data.path().string(), data.tokenizer_sha256(), path.string(), hash);
}

std::string tokenizer_beside(const TokenFile& data) {
  const std::filesystem::path path = data.path().parent_path() / "tokenizer.json";
  std::error_code error;
  if (data.tokenizer_sha256().empty() || !std::filesystem::is_regular_file(path, error)) return "";
  const MappedFile file(path, ErrorCode::kData);
  if (sha256_hex(file.bytes()) != data.tokenizer_sha256()) return "";
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace sluice
