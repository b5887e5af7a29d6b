#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "runtime/data/batch_loader.hpp"
#include "runtime/data/batch_shape.hpp"
#include "stages/network/parts.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::Ge;
using testing::Le;
using testing::StartsWith;

std::vector<std::int64_t> counts_of(const std::vector<SampleRange>& ranges) {
  std::vector<std::int64_t> counts;
  for (const SampleRange& range : ranges) counts.push_back(range.count);
  return counts;
}

TEST(MicroBatchesTest, LastMicroBatchIsSmallerWhereTheBatchDoesNotDivide) {
  const auto ranges = micro_batches_of(
      {.batch_size = 10, .micro_batch_size = 4, .micro_batches = 3, .replicas = 1}, 0);
  EXPECT_THAT(ranges, ElementsAre(SampleRange{0, 4}, SampleRange{4, 4}, SampleRange{8, 2}));
}

// This source includes the headers of both.
TEST(MicroBatchesTest, ShapeOfABatchIsATypeBesideTheLayersBlockShape) {
  EXPECT_FALSE((std::is_same_v<BatchShape, nn::BlockShape>));
}

TEST(MicroBatchesTest, ReplicasTakeContiguousSharesThatCoverTheBatchLargerOnesFirst) {
  const BatchShape shape{
      .batch_size = 11, .micro_batch_size = 2, .micro_batches = 2, .replicas = 3};
  EXPECT_THAT(counts_of(micro_batches_of(shape, 0)), ElementsAre(2, 2));
  EXPECT_THAT(counts_of(micro_batches_of(shape, 1)), ElementsAre(2, 2));
  EXPECT_THAT(counts_of(micro_batches_of(shape, 2)), ElementsAre(2, 1));
  std::int64_t next = 0;
  for (int replica = 0; replica < 3; ++replica) {
    for (const SampleRange& range : micro_batches_of(shape, replica)) {
      EXPECT_EQ(range.first, next);
      next += range.count;
    }
  }
  EXPECT_EQ(next, 11);
}

// What a replica gets for several virtual replicas, cut again, is what each of them has.
TEST(MicroBatchesTest, AJointShareIsCutIntoTheSharesThatItJoins) {
  for (const int parts : {1, 2, 3, 4, 6, 8}) {
    for (int count = 1; count <= parts; count += 1) {
      if (parts % count != 0) continue;
      for (std::int64_t samples = 0; samples < 30; ++samples) {
        for (int first = 0; first < parts; first += count) {
          const SampleRange joint = share_of(samples, parts, first, count);
          for (int i = 0; i < count; ++i) {
            SampleRange part = share_of(joint.count, count, i);
            part.first += joint.first;
            EXPECT_EQ(part, share_of(samples, parts, first + i)) << samples << " of " << parts;
          }
        }
      }
    }
  }
}

TEST(MicroBatchesTest, EveryShapeIsCutAsAskedOrRefusedWithAShapeThatWorks) {
  for (int replicas = 1; replicas <= 3; ++replicas) {
    for (int micro_batches = 1; micro_batches <= 4; ++micro_batches) {
      for (std::int64_t size = 1; size <= 3; ++size) {
        for (std::int64_t batch = 1; batch <= 40; ++batch) {
          BatchShape shape{batch, size, micro_batches, replicas};
          try {
            for (int replica = 0; replica < replicas; ++replica) {
              const auto counts = counts_of(micro_batches_of(shape, replica));
              ASSERT_EQ(counts.size(), static_cast<std::size_t>(micro_batches));
              EXPECT_THAT(counts, Each(testing::AllOf(Ge(1), Le(size))));
            }
          } catch (const Error& error) {
            const std::string text = error.what();
            const std::string lead = "nearest legal batch size is ";
            ASSERT_NE(text.find(lead), std::string::npos) << text;
            shape.batch_size = std::atoll(text.c_str() + text.find(lead) + lead.size());
            EXPECT_NO_THROW((void)micro_batches_of(shape, 0)) << text;
            const std::string other = ", or ";
            if (const auto at = text.find(other); at != std::string::npos) {
              shape.batch_size = batch;
              shape.micro_batches = std::atoi(text.c_str() + at + other.size());
              EXPECT_NO_THROW((void)micro_batches_of(shape, 0)) << text;
            }
          }
        }
      }
    }
  }
}

TEST(MicroBatchesTest, RefusesZeroNegativeAndOverflowingSizesByName) {
  expect_error(ErrorCode::kUsage, {"the batch size is 0"},
               [] { (void)micro_batches_of({.batch_size = 0}, 0); });
  expect_error(ErrorCode::kUsage, {"the micro-batch size is -1"},
               [] { (void)micro_batches_of({.batch_size = -1, .micro_batch_size = -1}, 0); });
  expect_error(ErrorCode::kUsage, {"the number of micro-batches is 0"},
               [] { (void)micro_batches_of({.micro_batches = 0}, 0); });
  expect_error(ErrorCode::kUsage, {"samples a step"}, [] {
    (void)micro_batches_of(
        {.batch_size = 1, .micro_batch_size = INT64_MAX, .micro_batches = 2, .replicas = 2}, 0);
  });
  expect_error(ErrorCode::kUsage, {"replica 1 does not exist"},
               [] { (void)micro_batches_of({}, 1); });
}

// --- token files ---

std::string words16(std::initializer_list<int> tokens) {
  std::string bytes;
  for (const int token : tokens) {
    bytes += static_cast<char>(token & 255);
    bytes += static_cast<char>(token >> 8);
  }
  return bytes;
}

std::string llm_c(std::int32_t version, std::int32_t count, const std::string& tokens) {
  std::string bytes(1024, '\0');
  const std::int32_t words[3] = {20240520, version, count};
  std::memcpy(bytes.data(), words, sizeof(words));
  return bytes + tokens;
}

std::string llm_c_wide(std::int32_t version, std::int32_t count, const std::string& tokens) {
  std::string bytes = llm_c(version, count, tokens);
  const std::int32_t magic = 20240801;
  std::memcpy(bytes.data(), &magic, sizeof(magic));
  return bytes;
}

// The header that <sluice/data.hpp> describes, and the tokens.
struct OwnHeader {
  std::uint32_t version = 1, width = 2;
  std::uint64_t count = 2;
  std::uint32_t vocabulary = 1000, end = 0xFFFFFFFF;
};

std::string own_file(const OwnHeader& header, const std::string& tokens) {
  std::string bytes(256, '\0');
  bytes.replace(0, 8, "\xffSLTOKEN");
  std::memcpy(bytes.data() + 8, &header.version, 4);
  std::memcpy(bytes.data() + 12, &header.width, 4);
  std::memcpy(bytes.data() + 16, &header.count, 8);
  std::memcpy(bytes.data() + 24, &header.vocabulary, 4);
  std::memcpy(bytes.data() + 28, &header.end, 4);
  for (std::size_t i = 32; i < 64; ++i) bytes[i] = static_cast<char>(i);
  return bytes + tokens;
}

std::vector<int> tokens_of(const TokenFile& file) {
  std::vector<int> tokens;
  for (std::int64_t i = 0; i < file.size(); ++i) tokens.push_back(file.token(i));
  return tokens;
}

TEST(TokenFileTest, ReadsTextAsBytes) {
  const TemporaryDirectory dir;
  const TokenFile file(dir.write("a.txt", "ab\xff"), 0);
  EXPECT_EQ(file.format(), TokenFormat::kText);
  EXPECT_THAT(tokens_of(file), ElementsAre('a', 'b', 255));
  EXPECT_EQ(file.largest_token(), 255);
}

TEST(TokenFileTest, RefusesJsonAsText) {
  const TemporaryDirectory dir;
  for (const char* name : {"a.jsonl", "a.json"}) {
    expect_error(ErrorCode::kData, {name, "is JSON", "jq -r .text", ".txt"},
                 [&] { TokenFile(dir.write(name, "{\"text\": \"a\"}\n"), 0); });
  }
}

TEST(TokenFileTest, ReadsNanoGptBinAsLittleEndianWords) {
  const TemporaryDirectory dir;
  const TokenFile file(dir.write("a.bin", words16({1, 50256, 300})), 0);
  EXPECT_EQ(file.format(), TokenFormat::kNanoGpt);
  EXPECT_THAT(tokens_of(file), ElementsAre(1, 50256, 300));
  EXPECT_EQ(file.largest_token(), 50256);
}

TEST(TokenFileTest, ReadsLlmCFilesPastTheirHeader) {
  const TemporaryDirectory dir;
  const TokenFile file(dir.write("a.bin", llm_c(1, 2, words16({7, 300}))), 0);
  EXPECT_EQ(file.format(), TokenFormat::kLlmC);
  EXPECT_THAT(tokens_of(file), ElementsAre(7, 300));
}

TEST(TokenFileTest, ReadsLlmCFilesOf32Bits) {
  const TemporaryDirectory dir;
  const std::string tokens("\1\0\0\0\1\2\3\0", 8);
  const TokenFile file(dir.write("a.bin", llm_c_wide(7, 2, tokens)), 0);
  EXPECT_EQ(file.format(), TokenFormat::kLlmC);
  EXPECT_EQ(file.token_bytes(), 4);
  EXPECT_THAT(tokens_of(file), ElementsAre(1, 0x30201));
  EXPECT_EQ(file.vocabulary(), 0);
  EXPECT_EQ(file.end_of_text(), -1);
  EXPECT_EQ(file.tokenizer_sha256(), "");
}

TEST(TokenFileTest, ReadsItsOwnFilesWhateverTheirName) {
  const TemporaryDirectory dir;
  const TokenFile narrow(dir.write("a.txt", own_file({.end = 0}, words16({7, 300}))), 0);
  EXPECT_EQ(narrow.format(), TokenFormat::kSluice);
  EXPECT_THAT(tokens_of(narrow), ElementsAre(7, 300));
  EXPECT_EQ(narrow.vocabulary(), 1000);
  EXPECT_EQ(narrow.end_of_text(), 0);
  EXPECT_EQ(narrow.tokenizer_sha256(),
            "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f");
  const std::string tokens("\1\0\0\0\1\2\3\0", 8);
  const TokenFile wide(dir.write("b.bin", own_file({.width = 4, .vocabulary = 300000}, tokens)), 0);
  EXPECT_EQ(wide.token_bytes(), 4);
  EXPECT_EQ(wide.end_of_text(), -1);
  EXPECT_THAT(tokens_of(wide), ElementsAre(1, 0x30201));
}

TEST(TokenFileTest, SplitsTheLastShareForValidation) {
  const TemporaryDirectory dir;
  const auto path = dir.write("a.txt", std::string(95, 'x'));
  EXPECT_EQ(TokenFile(path, 0.1).train_size(), 85);  // 9.5 rounds to 10
  EXPECT_EQ(TokenFile(path, 0).train_size(), 95);
  expect_error(ErrorCode::kUsage, {"validation share is 1"}, [&] { TokenFile(path, 1); });
  expect_error(ErrorCode::kUsage, {"validation share is -0.1"}, [&] { TokenFile(path, -0.1); });
}

TEST(TokenFileTest, IsIdentifiedByItsTokensWhateverHeaderIsBeforeThem) {
  const TemporaryDirectory dir;
  const auto path = dir.write("a.bin", words16({7, 300}));
  const auto identity = TokenFile(path).identity("--data");
  const std::string name = "--data " + path.string();
  // As of sha256sum.
  const std::string digest = "c599d1635030823d09fdbd90cf80907cb22777393e32c80c37f52fe5682c04f2";
  EXPECT_THAT(identity, ElementsAre(std::pair("tokens in " + name, std::string("2")),
                                    std::pair("SHA-256 of " + name, digest)));
  dir.write("a.bin", llm_c(1, 2, words16({7, 300})));
  EXPECT_EQ(TokenFile(path).identity("--data"), identity);
}

TEST(TokenFileTest, IsIdentifiedByEveryTokenUpToAMebibyte) {
  const TemporaryDirectory dir;
  std::string text(std::size_t{1} << 20, 'a');
  const auto path = dir.write("a.txt", text);
  const auto identity = TokenFile(path).identity("--data");
  for (const std::size_t place : {std::size_t{0}, std::size_t{5000}, text.size() - 1}) {
    text[place] = 'b';
    dir.write("a.txt", text);
    const auto other = TokenFile(path).identity("--data");
    EXPECT_EQ(other[0], identity[0]);
    EXPECT_EQ(other[1].first, identity[1].first);
    EXPECT_NE(other[1].second, identity[1].second) << place;
    text[place] = 'a';
  }
}

TEST(TokenFileTest, IsIdentifiedBeyondAMebibyteByASampleOfItsFirstItsLastAndOthers) {
  const TemporaryDirectory dir;
  constexpr std::size_t kBytes = (std::size_t{2} << 20) + 1, kStride = (kBytes - 4096) / 65 + 1;
  std::string text(kBytes, 'a');
  const auto path = dir.write("a.txt", text);
  const auto identity = TokenFile(path).identity("--data");
  EXPECT_THAT(identity[1].first, StartsWith("SHA-256 of a sample of --data "));
  const auto differs_from = [&](std::size_t first, std::size_t count) {
    std::string changed = text;
    changed.replace(first, count, count, 'b');
    dir.write("a.txt", changed);
    return TokenFile(path).identity("--data") != identity;
  };
  EXPECT_TRUE(differs_from(0, 1));
  EXPECT_TRUE(differs_from(4095, 1));
  EXPECT_FALSE(differs_from(4096, 4096));  // between the samples
  EXPECT_TRUE(differs_from(kBytes - 4096, 1));
  EXPECT_TRUE(differs_from(kBytes - 1, 1));
  for (std::size_t first = 4096; first + kStride <= kBytes; first += kStride) {
    EXPECT_TRUE(differs_from(first, kStride)) << first;
  }
}

TEST(TokenFileTest, RefusesFilesThatCannotBeTokens) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::filesystem::path& path, const std::string& why) {
    expect_error(ErrorCode::kData, {path.string(), why}, [&] { TokenFile{path}; });
  };
  refused(dir.path() / "none.txt", "No such file");
  refused(dir.path(), "directory");
  refused("/dev/null", "not a regular file");
  refused(dir.write("empty.txt", ""), "is empty");
  refused(dir.write("odd.bin", "abc"), "has 3 bytes");
  refused(dir.write("short.bin", llm_c(1, 0, "").substr(0, 500)), "ends within llm.c's header");
  refused(dir.write("version.bin", llm_c(2, 1, words16({1}))), "version 2; legal: 1");
  refused(dir.write("count.bin", llm_c(1, 3, words16({1}))), "says 3 tokens");
  refused(dir.write("negative.bin", llm_c(1, -1, "")), "says -1 tokens");
  refused(dir.write("none.bin", llm_c(1, 0, "")), "holds no tokens");
  refused(dir.write("wide.bin", llm_c_wide(1, 1, "abcd")), "version 1; legal: 7");
  refused(dir.write("wide.bin", llm_c_wide(7, 2, "abcd")), "says 2 tokens");
}

TEST(TokenFileTest, RefusesEachFieldOfItsOwnHeaderThatTheFileBelies) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    const auto path = dir.write("own.bin", bytes);
    expect_error(ErrorCode::kData, {path.string(), why}, [&] { TokenFile{path}; });
  };
  const std::string good = own_file({}, words16({7, 300}));
  (void)TokenFile(dir.write("own.bin", good));
  refused(good.substr(0, 8), "ends within its header: 8 bytes");
  refused(good.substr(0, 255), "ends within its header");
  refused(own_file({.version = 2}, words16({7, 300})), "version 2 in its header; legal: 1");
  refused(own_file({.width = 3}, words16({7, 300})),
          "bytes per token 3 in its header; legal: 2 and 4");
  refused(own_file({.width = 0}, words16({7, 300})), "bytes per token 0");
  refused(good.substr(0, good.size() - 1), "number of tokens 2 in its header; legal: 1");
  refused(good + "a", "number of tokens 2");
  refused(own_file({.count = 3}, words16({7, 300})), "number of tokens 3");
  refused(own_file({.count = ~std::uint64_t{0}}, words16({7, 300})), "number of tokens 184467");
  refused(own_file({.count = (std::uint64_t{1} << 63) + 2}, words16({7, 300})), "number of tokens");
  refused(own_file({.count = 0}, ""), "holds no tokens");
  refused(own_file({.vocabulary = 0}, words16({7, 300})),
          "vocabulary 0 in its header; legal: 1 to 65536");
  refused(own_file({.vocabulary = 65537}, words16({7, 300})), "vocabulary 65537");
  refused(own_file({.width = 4, .count = 1, .vocabulary = 0x80000000}, words16({7, 300})),
          "legal: 1 to 2147483647");
  refused(own_file({.end = 1000}, words16({7, 300})),
          "end-of-text token 1000 in its header; legal: 0 to 999");
  std::string later = good;
  later[64] = 9;
  refused(later, "byte 9 at 64");
  later = good;
  later[255] = '\xff';
  refused(later, "byte 255 at 255");
}

TEST(TokenFileTest, RefusesTokensBeyondTheVocabularyOfItsHeader) {
  const TemporaryDirectory dir;
  const auto source = [&](const std::string& bytes, int vocabulary) {
    (void)make_token_source(std::make_shared<TokenFile>(dir.write("own.bin", bytes), 0), 1,
                            vocabulary, 1);
  };
  source(own_file({.vocabulary = 301}, words16({7, 300})), 100000);
  expect_error(ErrorCode::kData, {"own.bin", "token 300 at index 1", "header has vocabulary 300"},
               [&] {
                 source(own_file({.vocabulary = 300}, words16({7, 300})), 100000);
               });
  expect_error(ErrorCode::kData, {"own.bin", "token 300 at index 1", "--vocabulary 300"}, [&] {
    source(own_file({}, words16({7, 300})), 300);
  });
  expect_error(ErrorCode::kData, {"own.bin", "token 2147483647 at index 1"}, [&] {
    source(own_file({.width = 4, .vocabulary = 0x7fffffff}, std::string("\1\0\0\0\0\0\0\xff", 8)),
           0x7fffffff);
  });
  expect_error(
      ErrorCode::kData, {"wide.bin", "token 2147483647 at index 1", "--vocabulary 70000"}, [&] {
        const std::string tokens("\1\0\0\0\xff\xff\xff\xff", 8);
        (void)make_token_source(
            std::make_shared<TokenFile>(dir.write("wide.bin", llm_c_wide(7, 2, tokens)), 0), 1,
            70000, 1);
      });
}

// --- batches ---

// 1000 tokens whose value tells their place: token(i) == i.
std::shared_ptr<TokenFile> counting_file(const TemporaryDirectory& dir, double share = 0.2) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += words16({i});
  return std::make_shared<TokenFile>(dir.write("counting.bin", bytes), share);
}

constexpr int kContext = 7;

std::vector<std::int32_t> read(const DataSource& source, Phase phase, std::uint64_t step,
                               SampleRange range, bool targets = false) {
  const auto specs = targets ? source.target_specs(range.count) : source.input_specs(range.count);
  std::vector<std::int32_t> values(static_cast<std::size_t>(specs[0].shape.elements()));
  const std::vector<Tensor> into = {{values.data(), specs[0]}};
  if (targets) {
    source.targets(phase, step, range, into);
  } else {
    source.inputs(phase, step, range, into);
  }
  return values;
}

TEST(TokenSourceTest, SamplesDependOnSeedAndStepAloneNotOnTheCut) {
  const TemporaryDirectory dir;
  const auto file = counting_file(dir);
  const auto source = make_token_source(file, kContext, 1000, 5);
  const auto whole = read(*source, Phase::kTrain, 3, {0, 12});
  for (const std::int64_t size : {1, 2, 5, 12}) {
    std::vector<std::int32_t> pieces;
    for (std::int64_t first = 0; first < 12; first += size) {
      const SampleRange range{first, std::min<std::int64_t>(size, 12 - first)};
      const auto piece = read(*source, Phase::kTrain, 3, range);
      pieces.insert(pieces.end(), piece.begin(), piece.end());
    }
    EXPECT_EQ(pieces, whole) << "in micro-batches of " << size;
  }
  EXPECT_NE(read(*source, Phase::kTrain, 4, {0, 12}), whole);
  EXPECT_NE(read(*make_token_source(file, kContext, 1000, 6), Phase::kTrain, 3, {0, 12}), whole);
}

TEST(TokenSourceTest, TargetsAreTheNextTokens) {
  const TemporaryDirectory dir;
  const auto source = make_token_source(counting_file(dir), kContext, 1000, 1);
  for (const Phase phase : {Phase::kTrain, Phase::kEvaluate}) {
    auto inputs = read(*source, phase, 2, {3, 9});
    for (std::int32_t& token : inputs) ++token;
    EXPECT_EQ(read(*source, phase, 2, {3, 9}, true), inputs);
  }
}

TEST(TokenSourceTest, TrainingCoversItsSplitAndNeverTouchesValidation) {
  const TemporaryDirectory dir;
  const auto source = make_token_source(counting_file(dir), kContext, 1000, 1);  // 800 train
  std::set<std::int32_t> starts;
  for (std::uint64_t step = 0; step < 200; ++step) {
    const auto inputs = read(*source, Phase::kTrain, step, {0, 100});
    const auto targets = read(*source, Phase::kTrain, step, {0, 100}, true);
    for (std::size_t i = 0; i < inputs.size(); i += kContext) starts.insert(inputs[i]);
    ASSERT_LT(*std::max_element(targets.begin(), targets.end()), 800);
  }
  // 20,000 draws of 793 offsets miss one with probability 1e-8 at most.
  EXPECT_EQ(starts.size(), 793u);
  EXPECT_EQ(*starts.begin(), 0);
  EXPECT_EQ(*starts.rbegin(), 792);
}

TEST(TokenSourceTest, ValidationWindowsLieOverThePartAndWrapAround) {
  const TemporaryDirectory dir;
  const auto file = counting_file(dir);
  const auto source = make_token_source(file, kContext, 1000, 1);
  const std::int64_t windows = validation_samples(*file, kContext);
  EXPECT_EQ(windows, 28);  // (200 - 1) / 7
  const auto inputs = read(*source, Phase::kEvaluate, 9, {0, windows + 1});
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i <= windows; ++i) {
    const auto first = inputs.begin() + i * kContext;
    order.push_back((*first - 800) / kContext);
    for (std::int64_t k = 0; k < kContext; ++k)
      ASSERT_EQ(first[k], 800 + order.back() * kContext + k);
  }
  EXPECT_EQ(std::set(order.begin(), order.end()).size(), static_cast<std::size_t>(windows));
  EXPECT_EQ(order.back(), order.front());
  // Of any number of windows no gap is above three times the even one.
  for (std::int64_t n = 2; n < windows; ++n) {
    std::vector<std::int64_t> some(order.begin(), order.begin() + n);
    std::sort(some.begin(), some.end());
    for (std::size_t i = 1; i < some.size(); ++i)
      EXPECT_LE((some[i] - some[i - 1]) * n, 3 * windows);
    EXPECT_LE((windows - some.back()) * n, 3 * windows);
  }
  const auto targets = read(*source, Phase::kEvaluate, 9, {0, windows}, true);
  EXPECT_LE(targets.back(), 999);
}

TEST(TokenSourceTest, RefusesSplitsShorterThanOneWindow) {
  const TemporaryDirectory dir;
  const auto file = std::make_shared<TokenFile>(dir.write("a.txt", std::string(100, 'x')), 0.1);
  EXPECT_NO_THROW((void)make_token_source(file, 9, 256, 1));
  expect_error(ErrorCode::kData, {"validation split", "a.txt", "has 10 of its 100", "least 11"},
               [&] { (void)make_token_source(file, 10, 256, 1); });
  expect_error(ErrorCode::kData, {"training split", "has 90 of its 100", "at least 91"},
               [&] { (void)make_token_source(file, 90, 256, 1); });
  expect_error(ErrorCode::kUsage, {"--context is 0"},
               [&] { (void)make_token_source(file, 0, 256, 1); });
  expect_error(ErrorCode::kData, {"has 90 of its 100", "at least 2147483648"},
               [&] { (void)make_token_source(file, std::numeric_limits<int>::max(), 256, 1); });
}

TEST(HostCopyTest, RefusesNullData) {
  EXPECT_TRUE(host_copy({nullptr, {DType::kF32, {0}}}).bytes.empty());
  expect_error(ErrorCode::kUsage, {"a copy of f32 [4] whose data is null; legal"}, [] {
    (void)host_copy({nullptr, {DType::kF32, {4}}});
  });
}

TEST(TokenSourceTest, RefusesAContextBelowOneAndANullFile) {
  const TemporaryDirectory dir;
  const TokenFile file(dir.write("a.txt", std::string(100, 'x')), 0.1);
  for (const int context : {0, -1}) {
    expect_error(ErrorCode::kUsage, {"--context is " + std::to_string(context)},
                 [&] { (void)validation_samples(file, context); });
  }
  expect_error(ErrorCode::kUsage, {"tokens of a null file; legal: a TokenFile"},
               [] { (void)make_token_source(nullptr, 8, 256, 1); });
  expect_error(ErrorCode::kUsage, {"tokens of a null file"},
               [] { (void)make_token_dataset(nullptr, 8, 256); });
}

TEST(TokenSourceTest, WithoutValidationSplitOnlyEvaluationIsRefused) {
  const TemporaryDirectory dir;
  const auto file = std::make_shared<TokenFile>(dir.write("a.txt", std::string(100, 'x')), 0);
  const auto source = make_token_source(file, 50, 256, 1);
  EXPECT_EQ(validation_samples(*file, 50), 0);
  EXPECT_NO_THROW(read(*source, Phase::kTrain, 0, {0, 1}));
  expect_error(ErrorCode::kData, {"no validation split"}, [&] {
    read(*source, Phase::kEvaluate, 0, {0, 1});
  });
}

TEST(TokenSourceTest, NamesTheFirstTokenBeyondTheVocabulary) {
  const TemporaryDirectory dir;
  expect_error(ErrorCode::kData, {"counting.bin", "token 600 at index 600", "allows 0 to 599"},
               [&] { (void)make_token_source(counting_file(dir), kContext, 600, 1); });
  const auto text = std::make_shared<TokenFile>(dir.write("a.txt", "aaaaaz"), 0);
  EXPECT_NO_THROW((void)make_token_source(text, 2, 'z' + 1, 1));
  expect_error(ErrorCode::kData, {"token 122 at index 5"},
               [&] { (void)make_token_source(text, 2, 'z', 1); });
}

// --- loader ---

// Values tell (step, sample, inputs or targets); a step may throw.
class NumberedSource final : public DataSource {
 public:
  explicit NumberedSource(std::uint64_t failing_step = UINT64_MAX) : failing_(failing_step) {}

  [[nodiscard]] std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, {samples, 2}}};
  }
  [[nodiscard]] std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return {{DType::kF32, {samples}}, {DType::kF64, {samples}}};
  }
  void inputs(Phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    if (step == failing_ && failures_++ < 1) throw Error(ErrorCode::kData, "no such step");
    ++loads_;
    for (std::int64_t i = 0; i < 2 * range.count; ++i) {
      into[0].as<float>()[i] = value(step, range.first + i / 2);
    }
  }
  void targets(Phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    for (const Tensor& tensor : into) {
      for (std::int64_t i = 0; i < range.count; ++i) {
        if (tensor.spec.dtype == DType::kF32) {
          tensor.as<float>()[i] = -value(step, range.first + i);
        } else {
          tensor.as<double>()[i] = static_cast<double>(range.first + i);
        }
      }
    }
  }
  static float value(std::uint64_t step, std::int64_t sample) {
    return static_cast<float>(step * 100 + static_cast<std::uint64_t>(sample));
  }
  [[nodiscard]] int loads() const { return loads_; }

 private:
  std::uint64_t failing_;
  mutable std::atomic<int> failures_ = 0, loads_ = 0;
};

const std::vector<SampleRange> kRanges = {{4, 3}, {7, 1}};

void expect_step(const BatchLoader::Batch& batch, std::uint64_t step) {
  ASSERT_EQ(batch.inputs.size(), 2u);
  ASSERT_EQ(batch.targets.size(), 2u);
  EXPECT_EQ(batch.inputs[0][0].shape(), (Shape{3, 2}));
  EXPECT_EQ(batch.inputs[1][0].shape(), (Shape{1, 2}));
  EXPECT_EQ(batch.inputs[0][0].floats()[5], NumberedSource::value(step, 6));
  EXPECT_EQ(batch.inputs[1][0].floats()[0], NumberedSource::value(step, 7));
  EXPECT_EQ(batch.targets[0][0].floats()[2], -NumberedSource::value(step, 6));
  EXPECT_EQ(batch.targets[1][1].as<double>()[0], 7);
}

TEST(BatchLoaderTest, GivesEveryStepInAnyOrder) {
  const NumberedSource source;
  BatchLoader loader(source, Phase::kTrain, kRanges, true, true);
  for (const std::uint64_t step : {0u, 1u, 2u, 7u, 3u, 3u, 4u, 0u}) {
    expect_step(loader.load(step), step);
  }
}

TEST(BatchLoaderTest, BatchStaysAsItIsWhileTheNextIsLoaded) {
  const NumberedSource source;
  BatchLoader loader(source, Phase::kTrain, kRanges, true, true);
  for (std::uint64_t step = 0; step < 50; ++step) {
    const BatchLoader::Batch& batch = loader.load(step);
    // Both micro-batches of this step and of the next: the prefetch is over, or soon will be.
    while (source.loads() < 2 * static_cast<int>(step + 2)) std::this_thread::yield();
    expect_step(batch, step);
  }
}

TEST(BatchLoaderTest, KeepsItsMemory) {
  const NumberedSource source;
  BatchLoader loader(source, Phase::kTrain, kRanges, true, true);
  std::set<const void*> places;
  for (std::uint64_t step = 0; step < 20; ++step) {
    for (const auto& tensors : loader.load(step).inputs) places.insert(tensors[0].data);
  }
  EXPECT_EQ(places.size(), 4u);  // two micro-batches, two batches
}

TEST(BatchLoaderTest, TheSameStepAgainIsNotReadAgain) {
  const NumberedSource source;
  BatchLoader loader(source, Phase::kEvaluate, kRanges, true, true);
  for (int again = 0; again < 5; ++again) expect_step(loader.load(0), 0);
  expect_step(loader.load(1), 1);
  EXPECT_LE(source.loads(), 2 * 3);  // steps 0 and 1, and 2 ahead
}

TEST(BatchLoaderTest, LoadsOnlyWhatIsWanted) {
  const NumberedSource source;
  BatchLoader inputs_only(source, Phase::kTrain, kRanges, true, false);
  EXPECT_EQ(inputs_only.load(1).inputs[1].size(), 1u);
  EXPECT_TRUE(inputs_only.load(2).targets[1].empty());
  BatchLoader targets_only(source, Phase::kTrain, kRanges, false, true);
  EXPECT_EQ(targets_only.load(1).targets[1].size(), 2u);
  EXPECT_TRUE(targets_only.load(2).inputs[1].empty());
  BatchLoader nothing(source, Phase::kTrain, kRanges, false, false);
  EXPECT_TRUE(nothing.load(1).inputs[1].empty());
  EXPECT_TRUE(nothing.load(1).targets[1].empty());
}

TEST(BatchLoaderTest, RethrowsForTheStepThatFailedAndGoesOn) {
  const NumberedSource source(2);
  BatchLoader loader(source, Phase::kTrain, kRanges, true, true);
  expect_step(loader.load(0), 0);
  expect_step(loader.load(1), 1);
  expect_error(ErrorCode::kData, {"no such step"}, [&] { loader.load(2); });
  expect_step(loader.load(2), 2);
  expect_step(loader.load(3), 3);
}

TEST(BatchLoaderTest, APrefetchThatFailsIsSilentUntilAskedFor) {
  const NumberedSource source(1);
  BatchLoader loader(source, Phase::kTrain, kRanges, true, true);
  expect_step(loader.load(0), 0);
  expect_step(loader.load(5), 5);
}

// A stream whose third step comes when the test lets it.
class Stream final : public DataSource {
 public:
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, {samples}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t) const override { return {}; }
  void inputs(Phase, std::uint64_t step, SampleRange, std::span<const Tensor> into) const override {
    into[0].at(0) = static_cast<float>(step);
    if (step < 3) return;
    struct AtEnd {
      ~AtEnd() { left->count_down(); }
      std::latch* left;
    };
    thread_local const AtEnd of_thread{&left_};
    if (late_calls_++ > 0) return;
    asked.count_down();
    more_.wait();
  }
  void targets(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {}
  // Returns when the thread that asked ends.
  void go_on() const {
    more_.count_down();
    left_.wait();
  }
  [[nodiscard]] int late_calls() const { return late_calls_; }

  mutable std::latch asked{1};  // for step 3

 private:
  mutable std::latch more_{1}, left_{1};
  mutable std::atomic<int> late_calls_ = 0;
};

TEST(BatchLoaderTest, DoesNotWaitForASourceThatDoesNotReturn) {
  const Stream source;
  {
    BatchLoader loader(source, Phase::kTrain, {{0, 1}, {1, 1}}, true, false, {},
                       std::chrono::seconds(0));
    EXPECT_EQ(loader.load(2).inputs[0][0].at(0), 2);
    source.asked.wait();
  }
  source.go_on();
  EXPECT_EQ(source.late_calls(), 1);  // none of the second micro-batch
}

// Writes all numbers of the first micro-batch, and leaves out one of the second.
class Leaving final : public DataSource {
 public:
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, {samples, 2}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  void inputs(Phase, std::uint64_t, SampleRange range,
              std::span<const Tensor> into) const override {
    into[0].at(0) = 1;
    if (range.first == 0) into[0].at(1) = 1;
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    inputs(phase, step, range, into);
  }
};

TEST(BatchLoaderTest, NamesWhatASourceLeavesUnwritten) {
  const Leaving source;
  BatchLoader inputs(source, Phase::kTrain, {{0, 1}, {1, 1}}, true, false);
  expect_error(ErrorCode::kUsage,
               {"the source, inputs() of step 3: leaves 1 of the 2 numbers of input 0"},
               [&] { (void)inputs.load(3); });
  BatchLoader targets(source, Phase::kTrain, {{0, 1}, {1, 1}}, false, true);
  expect_error(ErrorCode::kUsage,
               {"the source, targets() of step 3: leaves 1 of the 2 numbers of target 0"},
               [&] { (void)targets.load(3); });
}

TEST(BatchLoaderTest, AnInterruptEndsTheWaitForASource) {
  const Stream source;
  struct Ending final : Interrupt {
    explicit Ending(const Stream& waited_for) : stream(waited_for) {}
    void poll() override {
      stream.asked.wait();
      throw std::runtime_error("a rank is gone");
    }
    const Stream& stream;
  } ending(source);
  {
    BatchLoader loader(source, Phase::kTrain, {{0, 1}}, true, false, {}, std::chrono::seconds(0));
    EXPECT_THROW((void)loader.load(3, &ending), std::runtime_error);
  }
  source.go_on();
}

TEST(BatchLoaderTest, TokensComeThroughAsFromTheSource) {
  const TemporaryDirectory dir;
  const auto source = make_token_source(counting_file(dir), kContext, 1000, 1);
  BatchLoader loader(*source, Phase::kTrain, kRanges, true, true);
  for (std::uint64_t step = 0; step < 5; ++step) {
    const BatchLoader::Batch& batch = loader.load(step);
    for (std::size_t i = 0; i < kRanges.size(); ++i) {
      const auto wanted = read(*source, Phase::kTrain, step, kRanges[i]);
      const auto* got = batch.inputs[i][0].as<std::int32_t>();
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), got));
    }
  }
}

}  // namespace
}  // namespace sluice
