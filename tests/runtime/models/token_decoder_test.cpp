#include "runtime/models/token_decoder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <sluice/data.hpp>

#include "tests/golden.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

using Json = nlohmann::json;

std::string decoded(TokenDecoder& decoder, const std::vector<int>& ids) {
  std::string text;
  for (const int id : ids) text += decoder.add(id);
  return text + decoder.finish();
}

// --- the package's texts: token_golden.py ---

TEST(TokenDecoderTest, GivesThePackagesTextsOfEveryBlockAndOfRandomIds) {
  const std::string data = SLUICE_TOKENIZER_DATA;
  const Json cases = testing::read_golden(data + "/golden.json");
  EXPECT_GT(cases.size(), 100U);
  for (const Json& golden : cases) {
    const auto file =
        read_tokenizer_file(data + "/" + golden["tokenizer"].get<std::string>() + ".json");
    const auto ids = golden["ids"].get<std::vector<int>>();
    const auto shown = golden["text"].get<std::string>();
    TokenDecoder shows(file, SpecialTokens::kShow), skips(file);
    EXPECT_EQ(decoded(shows, ids), shown) << golden["tokenizer"];
    EXPECT_EQ(decoded(shows, ids), shown) << "again, " << golden["tokenizer"];
    EXPECT_EQ(decoded(skips, ids), golden.value("without_special", shown)) << golden["tokenizer"];
  }
}

// --- pieces ---

TEST(Utf8PiecesTest, HoldsALetterBackUntilItIsComplete) {
  Utf8Pieces pieces;
  EXPECT_EQ(pieces.add("a\xE6"), "a");
  EXPECT_EQ(pieces.add("\x97"), "");
  EXPECT_EQ(pieces.add("\xA5z"), "\xE6\x97\xA5z");
  EXPECT_EQ(pieces.add("\xF0\x9F\x98"), "");
  EXPECT_EQ(pieces.finish(), kReplacement);
  EXPECT_EQ(pieces.finish(), "");
}

TEST(Utf8PiecesTest, ReplacesEachMaximalPartOfALetter) {
  const std::string r = kReplacement;
  const auto text = [](const std::string& bytes) {
    Utf8Pieces pieces;
    const std::string complete = pieces.add(bytes);
    return complete + pieces.finish();
  };
  EXPECT_EQ(text("\x80"), r);
  EXPECT_EQ(text("\xC0\xAF"), r + r);                  // overlong
  EXPECT_EQ(text("\xE0\x9F\x80"), r + r + r);          // overlong
  EXPECT_EQ(text("\xED\xA0\x80"), r + r + r);          // a surrogate
  EXPECT_EQ(text("\xF4\x90\x80\x80"), r + r + r + r);  // beyond U+10FFFF
  EXPECT_EQ(text("\xF1\x80\x80"
                 "a"),
            r + "a");
  EXPECT_EQ(text("\xE2\x82\xE2\x82\xAC"), r + "\xE2\x82\xAC");
  EXPECT_TRUE(is_utf8("\xF4\x8F\xBF\xBF"));
  EXPECT_FALSE(is_utf8("\xF5"));
  EXPECT_FALSE(is_utf8("\xE2\x82"));
}

// --- files ---

constexpr const char* kDecoder = R"("decoder": {"type": "ByteLevel"})";

TokenizerFile parsed(const TemporaryDirectory& dir, const std::string& text) {
  return read_tokenizer_file(dir.write("tokenizer.json", text));
}

std::string with_vocabulary(const std::string& entries, const std::string& more = kDecoder) {
  return R"({"model": {"vocab": {)" + entries + R"(}, "merges": [["a", "b"]]}, )" + more + "}";
}

TEST(TokenizerFileTest, ReadsFilesWithoutTypeOfTheirModelAndWithHoles) {
  const TemporaryDirectory dir;
  TokenDecoder decoder(parsed(dir, with_vocabulary(R"("a": 0, "\u0120b": 2147483646)")));
  EXPECT_EQ(decoded(decoder, {0, 1, 2147483646, -1}), "a b");
}

TEST(TokenDecoderTest, HoldsBackALetterThatTwoTokensMake) {
  const TemporaryDirectory dir;
  // é is C3 A9: the letters Ã and ©.
  TokenDecoder decoder(parsed(dir, with_vocabulary(R"("\u00c3": 0, "\u00a9": 1, "x": 2)")));
  EXPECT_EQ(decoder.add(0), "");
  EXPECT_EQ(decoder.add(1), "\xC3\xA9");
  EXPECT_EQ(decoder.add(0), "");
  EXPECT_EQ(decoder.add(2), std::string(kReplacement) + "x");
  EXPECT_EQ(decoder.add(0), "");
  EXPECT_EQ(decoder.finish(), kReplacement);
}

TEST(TokenizerFileTest, RefusesWhatItCannotReadByFileAndField) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& text, const std::string& why) {
    SCOPED_TRACE(text.substr(0, 200));
    expect_error(ErrorCode::kWeights, {dir.path() / "tokenizer.json", why},
                 [&] { (void)parsed(dir, text); });
  };
  const auto added = [](const std::string& entries) {
    return with_vocabulary(R"("a": 0, "b": 1)",
                           R"("added_tokens": [)" + entries + "], " + kDecoder);
  };
  const auto steps = [](const std::string& decoder) {
    return with_vocabulary(R"("a": 0)", R"("decoder": )" + decoder);
  };
  refused("", "no object of JSON");
  refused("[]", "no object of JSON");
  refused(with_vocabulary("\"\xff\": 0"), "UTF-8");
  refused(std::string(1000, '['), "deeper");
  refused("{}", "no model");
  refused(R"({"model": {}})", "no model.vocab");
  refused(R"({"model": {"type": "Uni\ngram", "vocab": {}}})", "model.type 'Uni\\x0agram'");
  refused(R"({"model": {"vocab": [["a", 1]]}})", "model.vocab");
  refused(with_vocabulary(""), "empty");
  refused(with_vocabulary(R"("a": 0, "a": 1)"), "token twice");
  refused(with_vocabulary(R"("a": 3, "b": 3)"), "id 3 for 'a' and for 'b'");
  for (const char* id : {"-1", "2147483647", "18446744073709551615", "1.5", "\"1\"", "null"}) {
    refused(with_vocabulary(std::string(R"("a": )") + id), "for token 'a' the id");
  }
  refused(added("3"), "added_tokens.content");
  refused(added(R"({"content": 3})"), "added_tokens.content");
  refused(added(R"({"content": "c"})"), "added_tokens.id");
  refused(added(R"({"content": "c", "id": 5})"), "added_tokens.special");
  refused(added(R"({"content": "c", "id": 5, "special": 1})"), "'special'");
  refused(added(R"({"content": "c", "id": 1, "special": true})"), "id 1 for 'b' and for 'c'");
  refused(added(R"({"content": "a", "id": 7, "special": true})"), "token 'a' twice");
  refused(added(R"({"content": "c", "id": 5, "special": true},
                   {"content": "c", "id": 6, "special": true})"),
          "token 'c' twice");
  refused(steps("null"), "no decoder");
  refused(steps(R"({"type": "WordPiece"})"), "decoder.type 'WordPiece'; legal: ByteLevel");
  refused(steps(R"({"type": "Sequence", "decoders": []})"), "decoder.decoders");
  refused(steps(R"({"type": "Sequence", "decoders": [{"type": "CTC"}]})"),
          "decoder.decoders[0].type 'CTC'");
  refused(steps(R"({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]})"),
          "decoder.decoders[1].type 'ByteLevel' after one that joins");
  refused(steps(R"({"type": "Replace", "pattern": {"Regex": "a"}, "content": ""})"), "pattern");
  refused(steps(R"({"type": "Replace", "pattern": {"String": ""}, "content": ""})"), "empty");
  refused(steps(R"({"type": "Strip", "content": " ", "start": 1, "stop": 1})"), "stop");
  refused(steps(R"({"type": "Strip", "content": "ab", "start": 1, "stop": 0})"), "one letter");
  refused(steps(R"({"type": "Metaspace", "replacement": ""})"), "one letter");
}

TEST(TokenizerFileTest, RefusesAHugeFileUnread) {
  const TemporaryDirectory dir;
  const auto path = dir.write("tokenizer.json", "{");
  std::filesystem::resize_file(path, TokenizerFile::kMostBytes + 1);
  expect_error(ErrorCode::kWeights, {path, "268435457 bytes"},
               [&] { (void)read_tokenizer_file(path); });
  expect_error(ErrorCode::kWeights, {"none.json", "No such file"},
               [&] { (void)read_tokenizer_file(dir.path() / "none.json"); });
}

// --- data of the same tokenizer ---

// One token of 2 bytes; the hash is `first` and 31 zeros.
std::string own_file(char first) {
  std::string bytes("\xffSLTOKEN\1\0\0\0\2\0\0\0\1\0\0\0\0\0\0\0\xa\0\0\0\xff\xff\xff\xff", 32);
  bytes += first;
  bytes.resize(256, '\0');
  return bytes + std::string("\3\0", 2);
}

TEST(SameTokenizerTest, ComparesDataThatSaysItsTokenizerWithTheModels) {
  const TemporaryDirectory dir, empty;
  const TokenFile unknown(dir.write("unknown.bin", own_file('\0')));
  const TokenFile other(dir.write("other.bin", own_file('\1')));
  EXPECT_EQ(unknown.tokenizer_sha256(), "");
  EXPECT_EQ(other.tokenizer_sha256(), "01" + std::string(62, '0'));
  // As of sha256sum.
  std::string same = own_file('\0');
  same.replace(32, 32,
               "\xca\x97\x81\x12\xca\x1b\xbd\xca\xfa\xc2\x31\xb3\x9a\x23\xdc\x4d"
               "\xa7\x86\xef\xf8\x14\x7c\x4e\x72\xb9\x80\x77\x85\xaf\xee\x48\xbb",
               32);
  const TokenFile of_a(dir.write("a.bin", same));
  require_same_tokenizer(other, empty.path());
  dir.write("tokenizer.json", "a");
  require_same_tokenizer(unknown, dir.path());
  require_same_tokenizer(of_a, dir.path());
  expect_error(ErrorCode::kData,
               {"other.bin", dir.path() / "tokenizer.json", "0100", "ca978112", "--tokenizer"},
               [&] { require_same_tokenizer(other, dir.path()); });
  std::filesystem::remove(dir.path() / "tokenizer.json");
  std::filesystem::create_symlink("nowhere", dir.path() / "tokenizer.json");
  expect_error(ErrorCode::kData, {"tokenizer.json", "No such file"},
               [&] { require_same_tokenizer(other, dir.path()); });
}

}  // namespace
}  // namespace sluice
