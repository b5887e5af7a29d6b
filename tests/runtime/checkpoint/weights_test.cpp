#include "runtime/weights/weights.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include <sluice/error.hpp>

#include "runtime/files/sha256.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/models/model_tensors.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/named_tensors.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using testing::ElementsAre;
using ::testing::Pair;

// Tensors of every type, a scalar, an empty one, with names that need escapes.
struct Sample {
  std::array<float, 6> f32 = {0, -0.0f, 1.5f, -2.25f, 3e-40f, 1e38f};
  std::array<Bf16, 3> bf16 = {Bf16{0x3f80}, Bf16{0x8000}, Bf16{0x7fc0}};
  std::array<std::int32_t, 4> i32 = {1, -1, 1 << 30, 0};
  std::array<std::uint8_t, 5> u8 = {0, 1, 127, 128, 255};
  double f64 = 0.1;

  [[nodiscard]] std::vector<NamedTensor> tensors() {
    return {{"bytes", {u8.data(), {DType::kU8, {5}}}},
            {"block.0.weight", {f32.data(), {DType::kF32, {2, 3}}}},
            {"half \"quoted\" \xc3\xa4", {bf16.data(), {DType::kBf16, {1, 3, 1}}}},
            {"numbers", {i32.data(), {DType::kI32, {2, 1, 1, 2}}}},
            {"scalar", {&f64, {DType::kF64, {}}}},
            {"empty", {nullptr, {DType::kF32, {0, 7}}}}};
  }
};

// A file of these bytes with its header length in front.
std::string framed(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

// The only promise for arbitrary bytes: opened and readable to the last byte, or refused.
bool opens(const std::filesystem::path& path) {
  try {
    const SafetensorsFile file(path);
    unsigned sum = 0;
    for (const auto& entry : file.entries()) {
      EXPECT_EQ(entry.bytes.size(), entry.spec.bytes());
      for (const std::byte byte : entry.bytes) sum += std::to_integer<unsigned>(byte);
    }
    return sum < ~0u;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kWeights) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(path.string()));
    return false;
  }
}

TEST(SafetensorsTest, ReadsBackEveryByteNameTypeAndShape) {
  const TemporaryDirectory dir;
  Sample sample;
  const auto path = dir.path() / "a.safetensors";
  write_safetensors(path, sample.tensors(), {{"step", "12"}, {"note", "\n\"x\""}});
  const SafetensorsFile file(path);
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("note", "\n\"x\""), Pair("step", "12")));
  ASSERT_EQ(file.entries().size(), sample.tensors().size());
  for (const NamedTensor& named : sample.tensors()) {
    const SafetensorsFile::Entry* found = nullptr;
    for (const auto& entry : file.entries()) {
      if (entry.name == named.name) found = &entry;
    }
    ASSERT_NE(found, nullptr) << named.name;
    EXPECT_EQ(found->spec, named.tensor.spec) << named.name;
    ASSERT_EQ(found->bytes.size(), named.tensor.spec.bytes());
    if (!found->bytes.empty()) {
      EXPECT_EQ(std::memcmp(found->bytes.data(), named.tensor.data, found->bytes.size()), 0);
    }
  }
}

TEST(SafetensorsTest, AlignsTheDataAndEveryTensorToItsType) {
  const TemporaryDirectory dir;
  Sample sample;
  const auto path = dir.path() / "a.safetensors";
  write_safetensors(path, sample.tensors(), {});
  std::uint64_t length = 0;
  std::memcpy(&length, dir.read("a.safetensors").data(), sizeof(length));
  EXPECT_EQ(length % 8, 0u);
  const SafetensorsFile file(path);
  for (const auto& entry : file.entries()) {
    const auto address = reinterpret_cast<std::uintptr_t>(entry.bytes.data());
    EXPECT_EQ(address % size_of(entry.spec.dtype), 0u) << entry.name;
  }
}

TEST(SafetensorsTest, ReadsAFileWithoutTensors) {
  const TemporaryDirectory dir;
  const auto path = dir.path() / "none.safetensors";
  write_safetensors(path, std::span<const NamedTensor>(), {});
  EXPECT_TRUE(SafetensorsFile(path).entries().empty());
}

// As a model of experts has. A search for each among all before it would take seconds.
TEST(SafetensorsTest, TakesTensorsByTheTensOfThousands) {
  const TemporaryDirectory dir;
  float value = 1;
  std::vector<NamedTensor> tensors(20'000, {"", {&value, {DType::kF32, {1}}}});
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].name = std::to_string(i);
  const auto path = dir.path() / "a.safetensors";
  write_safetensors(path, tensors, {});
  EXPECT_EQ(SafetensorsFile(path).entries().size(), tensors.size());
}

TEST(SafetensorsTest, RefusesToWriteWhatNobodyCouldRead) {
  const TemporaryDirectory dir;
  Sample sample;
  const Tensor tensor = {sample.f32.data(), {DType::kF32, {6}}};
  const auto refused = [&](const std::vector<NamedTensor>& tensors, const std::string& why) {
    expect_error(ErrorCode::kIo, {"a.safetensors", why},
                 [&] { write_safetensors(dir.path() / "a.safetensors", tensors, {}); });
    EXPECT_EQ(dir.file_count(), 0);
  };
  refused({{"x", tensor}, {"x", tensor}}, "'x' of a tensor is taken twice");
  refused({{"__metadata__", tensor}}, "__metadata__");
  refused({{"\xff", tensor}}, "UTF-8");
}

TEST(SafetensorsTest, AFailedWriteNamesThePathAndLeavesNothing) {
  const TemporaryDirectory dir;
  Sample sample;
  const auto tensors = sample.tensors();
  expect_error(ErrorCode::kIo, {"none/a.safetensors", "No such file"},
               [&] { write_safetensors(dir.path() / "none" / "a.safetensors", tensors, {}); });
  expect_error(ErrorCode::kIo, {dir.path().string(), "directory"},
               [&] { write_safetensors(dir.path(), tensors, {}); });
  if (std::filesystem::exists("/dev/full")) {
    expect_error(ErrorCode::kIo, {"/dev/full", "No space left"},
                 [&] { write_safetensors("/dev/full", tensors, {}); });
  }
  EXPECT_EQ(dir.file_count(), 0);
}

TEST(SafetensorsTest, AWriteOverALinkReplacesWhatItPointsTo) {
  const TemporaryDirectory dir;
  Sample sample;
  std::filesystem::create_symlink(dir.write("real", "old"), dir.path() / "link");
  write_safetensors(dir.path() / "link", sample.tensors(), {});
  EXPECT_TRUE(std::filesystem::is_symlink(dir.path() / "link"));
  EXPECT_EQ(SafetensorsFile(dir.path() / "real").entries().size(), 6u);
  EXPECT_EQ(dir.file_count(), 2);
}

TEST(SafetensorsCorruptionTest, EveryTruncationIsRefused) {
  const TemporaryDirectory dir;
  Sample sample;
  write_safetensors(dir.path() / "whole", sample.tensors(), {{"step", "1"}});
  const std::string whole = dir.read("whole");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(opens(dir.write("cut", whole.substr(0, size)))) << size << " bytes";
  }
  EXPECT_TRUE(opens(dir.write("cut", whole)));
  EXPECT_FALSE(opens(dir.write("cut", whole + '\0')));
}

TEST(SafetensorsCorruptionTest, EveryChangedByteOfTheHeaderIsReadOrRefusedNeverWorse) {
  const TemporaryDirectory dir;
  Sample sample;
  write_safetensors(dir.path() / "whole", sample.tensors(), {{"step", "1"}});
  const std::string whole = dir.read("whole");
  std::uint64_t length = 0;
  std::memcpy(&length, whole.data(), sizeof(length));
  int refused = 0;
  for (std::size_t at = sizeof(length); at < sizeof(length) + length; ++at) {
    // Every 17th value, others at the next place.
    for (std::size_t value = at % 17; value < 256; value += 17) {
      std::string changed = whole;
      changed[at] = static_cast<char>(value);
      refused += opens(dir.write("changed", changed)) ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(SafetensorsCorruptionTest, ThousandsOfMutationsAreReadOrRefusedNeverWorse) {
  const TemporaryDirectory dir;
  Sample sample;
  write_safetensors(dir.path() / "whole", sample.tensors(), {{"a", "b"}});
  const std::string whole = dir.read("whole");
  std::mt19937 random(17);
  const auto below = [&](std::size_t bound) { return random() % bound; };
  int opened = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string bytes = whole;
    for (std::size_t edits = 1 + below(4); edits > 0 && !bytes.empty(); --edits) {
      const std::size_t at = below(bytes.size());
      const std::size_t from = below(bytes.size());
      switch (below(4)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
          break;
        case 1:
          bytes.erase(at, 1 + below(20));
          break;
        case 2:
          bytes.insert(at, bytes.substr(from, 1 + below(30)));
          break;
        default:
          bytes[at] = bytes[from];
      }
    }
    opened += opens(dir.write("mutant", bytes)) ? 1 : 0;
  }
  EXPECT_GT(opened, 0);  // changes within the data alone
  EXPECT_LT(opened, 500);
}

// One tensor entry; every field can be replaced.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST(SafetensorsCorruptionTest, NamesWhatIsWrongInTheHeader) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& header, std::size_t data_bytes,
                           const std::string& why) {
    const auto path = dir.write("bad.safetensors", framed(header, std::string(data_bytes, 'x')));
    expect_error(ErrorCode::kWeights, {path.string(), why}, [&] { SafetensorsFile{path}; });
  };
  const std::string good = entry("a", "F32", "[1]", "[0,4]");
  refused("", 0, "does not begin with '{'");
  refused(" {}", 0, "does not begin with '{'");
  refused("{", 0, "is no JSON: wrong at byte");
  refused("{}{}", 0, "is no JSON: wrong at byte");
  refused("{\"[[[[\":" + std::string(1 << 20, '['), 0, "is nested too deeply at byte 11");
  refused("{\"\xff\":1}", 0, "is no JSON: wrong at byte");
  refused("{" + good + "," + good + "}", 4, "the key 'a' comes twice");
  refused("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 4, "the key 'dtype' comes twice");
  refused("{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0, "the key 'k' comes twice");
  refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "the key '__metadata__' comes twice");
  refused("{\"__metadata__\":{\"k\":1}}", 0, "metadata key 'k' is no string");
  refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor 'a' lacks one of");
  refused("{\"a\":{\"color\":\"red\"}}", 4, "'color' of tensor 'a' is unknown");
  refused("{\"a\":[]}", 4, "tensor 'a' is no object");
  refused("{\"a\":null}", 4, "tensor 'a' is no object");
  refused("{\"__metadata__\":null}", 0, "__metadata__ is no object");
  refused("{\"a\":{\"dtype\":[],\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
          "dtype of tensor 'a' is no string");
  refused("{" + entry("a", "F32", "[[1]]", "[0,4]") + "}", 4, "is no list of whole numbers");
  refused("{\"a\":{\"dtype\":\"F32\",\"shape\":true}}", 4,
          "shape of tensor 'a' is no list of whole numbers");
  refused("{" + entry("a", "I16", "[1]", "[0,2]") + "}", 2, "dtype 'I16' of tensor 'a'");
  refused("{" + entry("a", "F32", "[-1]", "[0,4]") + "}", 4, "is no list of whole numbers");
  refused("{" + entry("a", "F32", "[1.0]", "[0,4]") + "}", 4, "is no list of whole numbers");
  refused("{" + entry("a", "F32", "[99999999999999999999]", "[0,4]") + "}", 4,
          "is no list of whole numbers");
  refused("{" + entry("a", "F32", "[1,1,1,1,1,1,1]", "[0,4]") + "}", 4, "7 dimensions");
  refused("{" + entry("a", "F32", "[4294967296,4294967296]", "[0,4]") + "}", 4,
          "the shape of tensor 'a': a shape of more than 2^60");
  refused("{" + entry("a", "F32", "[4294967296,4294967296,0]", "[0,0]") + "}", 0, "2^60");
  refused("{" + entry("a", "F32", "[18446744073709551615]", "[0,4]") + "}", 4, "at least 0");
  refused("{" + entry("a", "U8", "[2305843009213693952]", "[0,4]") + "}", 4, "2^60");
  refused("{" + entry("a", "F32", "[2]", "[0,4]") + "}", 4, "hold 4 bytes, but f32 [2] takes 8");
  refused("{" + entry("a", "F32", "[1]", "[4,0]") + "}", 4, "are no begin and end");
  refused("{" + entry("a", "F32", "[1]", "[0]") + "}", 4, "are no begin and end");
  refused("{" + entry("a", "F32", "[1]", "[0,0,4]") + "}", 4, "are no begin and end");
  refused("{\"a\\nb\":null}", 0, "tensor 'a?b' is no object");
  refused("{" + entry("a", "F32", "[1]", "[4,8]") + "}", 8, "a gap at byte 0");
  refused("{" + good + "," + entry("b", "F32", "[1]", "[8,12]") + "}", 12, "a gap at byte 4");
  refused("{" + good + "," + entry("b", "F32", "[1]", "[0,4]") + "}", 8,
          "an overlap before byte 4");
  refused("{" + good + "," + entry("b", "F32", "[1]", "[2,6]") + "}", 6,
          "an overlap before byte 4");
  refused("{" + good + "}", 3, "truncated");
  refused("{" + good + "}", 5, "too long");
  refused("{" + entry("a", "F32", "[1]", "[18446744073709551612,18446744073709551615]") + "}", 4,
          "hold 3 bytes");
}

TEST(SafetensorsCorruptionTest, RefusesLengthsBeyondTheFileOrTheLimit) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    const auto path = dir.write("bad", bytes);
    expect_error(ErrorCode::kWeights, {path.string(), why}, [&] { SafetensorsFile{path}; });
  };
  refused("", "too few");
  refused("1234567", "too few");
  refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "3 exceeds the 2 bytes that follow");
  refused(std::string(8, '\xff') + "{}", "exceeds the most that is legal, 100000000");
  expect_error(ErrorCode::kWeights, {"directory"}, [&] { SafetensorsFile{dir.path()}; });
  expect_error(ErrorCode::kWeights, {"none", "No such file"},
               [&] { SafetensorsFile{dir.path() / "none"}; });
}

TEST(SafetensorsCorruptionTest, DeeplyNestedJsonIsRefusedWithoutRecursion) {
  const TemporaryDirectory dir;
  std::string nested;
  for (int i = 0; i < 1'000'000; ++i) nested += "{\"a\":";
  EXPECT_FALSE(opens(dir.write("nested", framed(nested, ""))));
  EXPECT_FALSE(opens(dir.write("arrays", framed("{\"a\":" + std::string(1'000'000, '['), ""))));
}

// --- directories ---

void write_part(const TemporaryDirectory& dir, const std::string& file, const std::string& tensor,
                float value, const std::string& step = "1") {
  const std::vector<NamedTensor> tensors = {{tensor, {&value, {DType::kF32, {1}}}}};
  write_safetensors(dir.path() / file, tensors, {{"step", step}});
}

// Two parts with their index.
void write_split(const TemporaryDirectory& dir) {
  write_part(dir, weights_file_name("model", 0, 2), "a", 1);
  write_part(dir, weights_file_name("model", 1, 2), "b", 2);
  write_weights_index(
      dir.path(), "model",
      {{"a", weights_file_name("model", 0, 2)}, {"b", weights_file_name("model", 1, 2)}}, 8);
}

float value_of(const WeightsDirectory& weights, const std::string& name) {
  const SafetensorsFile::Entry* const entry = weights.find(name);
  float value = -1;
  if (entry != nullptr) std::memcpy(&value, entry->bytes.data(), sizeof value);
  return value;
}

TEST(WeightsDirectoryTest, FileNamesAreThoseOfTheEcosystem) {
  EXPECT_EQ(weights_file_name("model", 0, 1), "model.safetensors");
  EXPECT_EQ(weights_file_name("model", 1, 12), "model-00002-of-00012.safetensors");
}

TEST(WeightsDirectoryTest, ReadsOneFileOrSeveralByName) {
  const TemporaryDirectory single, split;
  write_part(single, "model.safetensors", "a", 3);
  EXPECT_EQ(value_of(WeightsDirectory(single.path(), "model"), "a"), 3);
  write_split(split);
  const WeightsDirectory weights(split.path(), "model");
  EXPECT_THAT(weights.names(), ElementsAre("a", "b"));
  EXPECT_EQ(value_of(weights, "a"), 1);
  EXPECT_EQ(value_of(weights, "b"), 2);
  EXPECT_EQ(weights.find("c"), nullptr);
}

TEST(WeightsDirectoryTest, KindsDoNotMix) {
  const TemporaryDirectory dir;
  write_part(dir, "model.safetensors", "a", 1);
  write_part(dir, "optimizer.safetensors", "m.a", 2);
  EXPECT_THAT(WeightsDirectory(dir.path(), "optimizer").names(), ElementsAre("m.a"));
}

TEST(WeightsDirectoryTest, RefusesDirectoriesThatAreNoWholeSave) {
  const auto refused = [](const TemporaryDirectory& dir, const std::string& why) {
    expect_error(ErrorCode::kWeights, {dir.path().string(), why},
                 [&] { WeightsDirectory(dir.path(), "model"); });
  };
  const TemporaryDirectory empty;
  refused(empty, "neither model.safetensors nor model.safetensors.index.json");
  expect_error(ErrorCode::kWeights, {"neither"},
               [&] { WeightsDirectory(empty.path() / "none", "model"); });
  const TemporaryDirectory both;
  write_split(both);
  write_part(both, "model.safetensors", "a", 3);
  refused(both, "one of them is from another save");
  const TemporaryDirectory missing;
  write_split(missing);
  std::filesystem::remove(missing.path() / weights_file_name("model", 1, 2));
  refused(missing, "model-00002-of-00002.safetensors': No such file");
  const TemporaryDirectory extra;
  write_split(extra);
  write_part(extra, weights_file_name("model", 1, 2), "c", 1);
  refused(extra, "holds tensor 'c', which the index lacks");
  const TemporaryDirectory twice;
  write_split(twice);
  write_part(twice, weights_file_name("model", 1, 2), "a", 1);
  refused(twice, "holds tensor 'a', which the index places in 'model-00001-of-00002");
  const TemporaryDirectory lost;
  write_split(lost);
  write_weights_index(lost.path(), "model",
                      {{"a", weights_file_name("model", 0, 2)},
                       {"b", weights_file_name("model", 1, 2)},
                       {"c", weights_file_name("model", 1, 2)}},
                      8);
  refused(lost, "places tensor 'c' in 'model-00002-of-00002.safetensors', which lacks it");
  const TemporaryDirectory cut;
  write_split(cut);
  write_part(cut, weights_file_name("model", 1, 2), "b", 9, "2");
  refused(cut, "different steps");
}

TEST(WeightsDirectoryTest, AnIndexOfNoTensorsHasNone) {
  const TemporaryDirectory dir;
  dir.write("model.safetensors.index.json", "{\"weight_map\":{}}");
  const WeightsDirectory weights(dir.path(), "model");
  EXPECT_TRUE(weights.names().empty());
}

TEST(WeightsDirectoryTest, RefusesBadIndexFiles) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& json, const std::string& why) {
    dir.write("model.safetensors.index.json", json);
    expect_error(ErrorCode::kWeights, {"model.safetensors.index.json", why},
                 [&] { WeightsDirectory(dir.path(), "model"); });
  };
  refused("", "is no JSON");
  refused("{", "is no JSON");
  refused("[]", "no object 'weight_map'");
  refused("{}", "no object 'weight_map'");
  refused("{\"weight_map\":[]}", "no object 'weight_map'");
  refused("{\"weight_map\":{\"a\":1}}", "tensor 'a' is no string");
  refused("{\"weight_map\":{\"a\":\"../x\"}}", "no name of a file next to the index");
  refused("{\"weight_map\":{\"a\":\"..\"}}", "no name of a file next to the index");
  refused("{\"weight_map\":{\"a\":\"\"}}", "no name of a file next to the index");
}

TEST(WritableTest, ProvesADirectoryAndLeavesItAsItWas) {
  const TemporaryDirectory dir;
  require_writable_directory(dir.path() / "new" / "deep" / "");
  EXPECT_EQ(dir.file_count(), 0);
  std::filesystem::create_directory(dir.path() / "old");
  require_writable_directory(dir.path() / "old" / "new");
  EXPECT_TRUE(std::filesystem::is_empty(dir.path() / "old"));
  const auto file = dir.write("file", "x");
  expect_error(ErrorCode::kIo, {file.string()}, [&] { require_writable_directory(file); });
  expect_error(ErrorCode::kIo, {(file / "sub").string()},
               [&] { require_writable_directory(file / "sub"); });
  expect_error(ErrorCode::kIo, {"empty"}, [] { require_writable_directory(""); });
  if (std::filesystem::exists("/proc/self")) {
    expect_error(ErrorCode::kIo, {"/proc/sluice"},
                 [] { require_writable_directory("/proc/sluice"); });
  }
}

TEST(WritableTest, ProvesAFileAndLeavesItAsItWas) {
  const TemporaryDirectory dir;
  require_writable_file(dir.path() / "new");
  EXPECT_EQ(dir.file_count(), 0);
  require_writable_file(dir.write("old", "text"));
  EXPECT_EQ(dir.read("old"), "text");
  EXPECT_NO_THROW(require_writable_file("/dev/null"));
  expect_error(ErrorCode::kIo, {dir.path().string(), "directory"},
               [&] { require_writable_file(dir.path()); });
  expect_error(ErrorCode::kIo, {"none/a", "No such file"},
               [&] { require_writable_file(dir.path() / "none" / "a"); });
}

TEST(WritableTest, AFileThatIsReplacedHoldsTheSameKind) {
  const TemporaryDirectory dir;
  const auto require = [](const std::filesystem::path& file) {
    require_replaceable_file(file, "{\"kind\":", "list");
  };
  EXPECT_NO_THROW(require(dir.path() / "new"));
  EXPECT_NO_THROW(require(dir.write("empty", "")));
  EXPECT_NO_THROW(require(dir.write("old", "{\"kind\":1}")));
  EXPECT_NO_THROW(require("/dev/null"));
  for (const char* other : {"{\"kin", "{\"format\":1}"}) {
    expect_error(ErrorCode::kIo, {"other' holds something else than a list"},
                 [&] { require(dir.write("other", other)); });
    EXPECT_EQ(dir.read("other"), other);
  }
}

TEST(DigestTest, IsSha256OfTheBytesThenOfTheSortedLines) {
  const std::string abc = "abc";
  const std::vector<ParameterDigest> digests = {{"a", sha256_hex({})},
                                                {"z", sha256_hex(std::as_bytes(std::span(abc)))}};
  // FIPS 180-4's examples
  EXPECT_EQ(digests[0].sha256, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digests[1].sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  // printf '<sha256>  a\n<sha256>  z\n' | sha256sum
  EXPECT_EQ(digest_all(digests),
            "f314b9e42a070bf983c60ff1270b404d3460da2cbed45b4badaab80474a6debc");
}

}  // namespace
}  // namespace sluice
