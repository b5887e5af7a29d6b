// state.json, the directory of saves, its lock, and the comparison of files with their hashes.
#include "runtime/checkpoint/save_directory.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include <sluice/error.hpp>

#include "runtime/checkpoint/save_lock.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/checksum.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/named_tensors.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr const char* kRun = "0123456789abcdef0123456789abcdef";
constexpr const char* kOtherRun = "ffffffffffffffffffffffffffffffff";

std::string hash_of(const std::string& text) {
  return checksum_hex(std::as_bytes(std::span(text)));
}

SaveState state_of(std::uint64_t step, std::uint64_t sequence, const std::string& run = kRun) {
  SaveState state;
  state.save = hash_of(fmt::format("{} {} {}", run, sequence, step));
  state.run = run;
  state.sequence = sequence;
  state.step = step;
  state.time = "2026-01-31T12:00:00Z";
  state.layout = {{"ranks", 2}};
  state.arithmetic = {"avx2 kernels", "avx512 kernels"};
  state.options = {{"heads", "4"}, {"data", "a \"text\".txt"}};
  state.model = R"({"layers":2})";
  state.data = {{"tokens", "4000"}};
  state.skipped = {3, 5};
  state.user = {{"loader", R"({"epoch":3})"}};
  return state;
}

// A save of one weights file of two tensors in `directory`, as begin_save() and publish_save()
// leave it. Its blocks are those of kHashBlock bytes.
class SaveDirectoryTest : public ::testing::Test {
 protected:
  SaveState publish(std::uint64_t step, std::uint64_t sequence, const std::string& run = kRun,
                    std::size_t floats = 100, bool weights_only = false) {
    const fs::path partial = begin_save(saves(), step, lines_);
    SaveState state = state_of(step, sequence, run);
    std::vector<float> values(floats, static_cast<float>(sequence));
    std::vector<float> more(10, 1);
    const auto count = static_cast<std::int64_t>(floats);
    const std::vector<NamedTensor> tensors = {{"a", {values.data(), {DType::kF32, {count}}}},
                                              {"b", {more.data(), {DType::kF32, {2, 5}}}}};
    std::string bytes;
    write_safetensors(partial / "model.safetensors", tensors, {},
                      [&](std::span<const std::byte> piece) {
                        bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
                      });
    SavedFile file{"model.safetensors", bytes.size(), hash_of(bytes), {}};
    for (std::size_t at = 0; at < bytes.size(); at += kHashBlock) {
      file.blocks.push_back(hash_of(bytes.substr(at, kHashBlock)));
    }
    state.files = {file};
    for (const NamedTensor& named : tensors) {
      state.tensors.push_back({.name = named.name, .file = file.name, .spec = named.tensor.spec});
    }
    state.weights_only = weights_only;
    publish_save(saves(), partial, state, lines_);
    return state;
  }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  [[nodiscard]] std::string text(const fs::path& path) const {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  [[nodiscard]] std::vector<std::string> names(const fs::path& path) const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(path)) {
      found.push_back(entry.path().filename().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  [[nodiscard]] fs::path saves() const { return directory_.path() / "saves"; }
  [[nodiscard]] fs::path step(std::uint64_t number) const {
    return saves() / step_directory_name(number);
  }

  // The lines that it has for people.
  std::vector<std::string> prune(Retention retention) {
    if (retention.run.empty()) retention.run = kRun;
    std::vector<std::string> lines;
    prune_saves(saves(), retention, lines);
    return lines;
  }

  void SetUp() override { (void)open_save_directory(saves()); }

  TemporaryDirectory directory_;
  std::vector<std::string> lines_;  // of publish()
};

// --- state.json ---

TEST_F(SaveDirectoryTest, AStateComesBackAsItWas) {
  const SaveState written = publish(7, 1);
  const SaveState read = read_save_state(step(7));
  EXPECT_EQ(to_json_text(read), to_json_text(written));
  EXPECT_EQ(read.options, written.options);
  EXPECT_EQ(read.model, written.model);
  EXPECT_EQ(read.user, written.user);
  EXPECT_EQ(read.skipped, written.skipped);
  EXPECT_EQ(read.arithmetic, written.arithmetic);
  ASSERT_THAT(read.tensors, SizeIs(2));
  EXPECT_EQ(read.tensors[1].spec, (TensorSpec{DType::kF32, {2, 5}}));
}

TEST_F(SaveDirectoryTest, EveryChangedByteOfAStateIsRefused) {
  publish(7, 1);
  const std::string whole = text(step(7) / "state.json");
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_THROW((void)parse_save_state(changed, "state.json"), Error) << at;
  }
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW((void)parse_save_state(whole.substr(0, size), "state.json"), Error) << size;
  }
}

// What a state may say is checked where its hash is right as well.
TEST_F(SaveDirectoryTest, NamesWhatIsWrongInAState) {
  const SaveState sound = publish(7, 1);
  const auto refused = [](const SaveState& state, std::initializer_list<std::string> parts) {
    const std::string json = to_json_text(state);
    expect_error(ErrorCode::kWeights, parts, [&] { (void)parse_save_state(json, "x/state.json"); });
  };
  SaveState state = sound;
  state.files[0].name = "../model.safetensors";
  state.tensors.clear();
  refused(state, {"x/state.json", "'../model.safetensors'"});
  state = sound;
  state.files.push_back(state.files[0]);
  refused(state, {"'model.safetensors' comes twice"});
  state = sound;
  state.tensors[0].file = "optimizer.safetensors";
  refused(state, {"'a'", "'optimizer.safetensors', which is not listed"});
  state = sound;
  state.tensors[1].name = "a";
  refused(state, {"'a' comes twice"});
  state = sound;
  state.tensors[1].parameter = "w";
  state.tensors[1].rows = 3;
  refused(state, {"'b'", "[2, 5]", "no part of 3 rows of 'w'"});
  state.tensors[1].transposed = true;
  state.tensors[1].rows = 2;
  refused(state, {"'b'", "no part of 2 rows of 'w'"});
  state.tensors[1].rows = 5;
  EXPECT_EQ(parse_save_state(to_json_text(state), "x").tensors[1].parameter, "w");
  state = sound;
  for (const SavedRange& range :
       {SavedRange{"m.w", {10, 10}, 1}, SavedRange{"", {10, 10}, 0}, SavedRange{"m.w", {99}, 0}}) {
    state.tensors[0].range = range;
    refused(state, {"'a'", "[100]", "no part of '" + range.whole + "'", to_string(range.shape)});
  }
  state.tensors[0].range = SavedRange{"m.w", {11, 10}, 10};
  EXPECT_EQ(parse_save_state(to_json_text(state), "x").tensors[0].range, state.tensors[0].range);
  state.tensors[0].range->first = -1;
  refused(state, {"'first'"});
  state.tensors[0].range.reset();
  state.tensors[1].range = SavedRange{"m.w", {2, 5}, 0};
  refused(state, {"'b'", "[2, 5]", "no part of 'm.w'"});
  state = sound;
  state.files[0].blocks.push_back(kRun);
  refused(state, {"2 blocks, not 1"});
  state = sound;
  state.files[0].hash = "short";
  refused(state, {"32 hexadecimal digits"});
}

TEST_F(SaveDirectoryTest, AStateWhoseRanksCannotDivideTheirPartsIsRefused) {
  SaveState state = state_of(7, 1);
  const auto refused = [&](const std::map<std::string, int>& layout, const std::string& text) {
    state.layout = layout;
    expect_error(ErrorCode::kWeights, {"x/state.json' is damaged: " + text},
                 [&] { (void)parse_save_state(to_json_text(state), "x/state.json"); });
  };
  const std::string of_two = "legal is the number of replicas times a power of two, here ";
  refused({{"replicas", 2}, {"virtual_replicas", 0}},
          "'virtual_replicas' of 'layout' is 0, with 2 replicas; " + of_two + "2");
  refused({{"replicas", 1}, {"virtual_replicas", 0}},
          "'virtual_replicas' of 'layout' is 0, with 1 replica; legal are numbers from 1");
  refused({{"replicas", 2}, {"virtual_replicas", 6}},
          "'virtual_replicas' of 'layout' is 6, with 2 replicas; " + of_two + "4 or 8");
  refused({{"replicas", 4}, {"virtual_replicas", 2}},
          "'virtual_replicas' of 'layout' is 2, with 4 replicas; " + of_two + "4");
  refused({{"virtual_replicas", 2}}, "'layout' has 'virtual_replicas', but no 'replicas'");
  refused({{"replicas", 0}}, "'replicas' of 'layout' is 0; legal are numbers from 1");
  for (const int parts : {2, 4, 64}) {
    state.layout = {{"replicas", 2}, {"virtual_replicas", parts}};
    EXPECT_EQ(parse_save_state(to_json_text(state), "x").virtual_replicas(), parts);
  }
  // The same of shards; one tensor rank is not recorded.
  refused({{"tensor", 4}, {"tensor_shards", 6}},
          "'tensor_shards' of 'layout' is 6, with 4 tensor ranks; legal is the number of tensor "
          "ranks times a power of two, here 4 or 8");
  refused({{"tensor_shards", 0}},
          "'tensor_shards' of 'layout' is 0, with 1 tensor rank; legal are numbers from 1");
  refused({{"tensor", 0}}, "'tensor' of 'layout' is 0; legal are numbers from 1");
  for (const auto& [layout, shards] : {std::pair(std::map<std::string, int>(), 1),
                                       {{{"tensor_shards", 6}}, 6},
                                       {{{"tensor", 2}, {"tensor_shards", 8}}, 8}}) {
    state.layout = layout;
    EXPECT_EQ(parse_save_state(to_json_text(state), "x").tensor_shards(), shards);
  }
}

// Deep text would overflow the stack, wide objects take time quadratic in their keys.
TEST_F(SaveDirectoryTest, AStateThatIsDeepOrWideIsRefused) {
  const auto deep = [](int levels) {
    return fmt::format("{:[>{}}{:]>{}}", "", levels, "", levels);
  };
  const auto wide = [](int keys) {
    std::string text = "{\"\":0";
    for (int i = 1; i < keys; ++i) text += fmt::format(",\"{}\":0", i);
    return text + "}";
  };
  SaveState state = state_of(7, 1);
  for (const std::string& legal : {deep(100), wide(4'000)}) {
    EXPECT_TRUE(is_state_json(legal));
    state.user["loader"] = legal;
    EXPECT_EQ(parse_save_state(to_json_text(state), "state.json").user, state.user);
  }
  for (const std::string& text : {deep(101), wide(4'001)}) EXPECT_FALSE(is_state_json(text));
  for (const std::string& text : {deep(1'000'000), wide(1'000'000)}) {
    expect_error(ErrorCode::kWeights, {"x/state.json", "at most 102 levels and 4000 keys"},
                 [&] { (void)parse_save_state(text, "x/state.json"); });
    EXPECT_FALSE(is_state_json(text));
  }
}

TEST_F(SaveDirectoryTest, ARangeInAFormatThatHasNoneIsNamed) {
  SaveState state = publish(7, 1);
  state.tensors[0].range = SavedRange{"m.w", {10, 10}, 0};
  const std::string text = to_json_text(state), check = ",\n \"check\": \"";
  for (const int format : {2, 3}) {
    std::string older = text.substr(0, text.rfind(check));
    older.replace(older.find("\"format\": 4"), 11, fmt::format("\"format\": {}", format));
    older += check + hash_of(older) + "\"\n}\n";
    expect_error(
        ErrorCode::kWeights,
        {"x/state.json", "tensor 'a' has a 'range', which format " + std::to_string(format),
         "legal from format 4 on"},
        [&] { (void)parse_save_state(older, "x/state.json"); });
  }
}

TEST_F(SaveDirectoryTest, AnotherFormatIsNamed) {
  expect_error(ErrorCode::kWeights, {"format 5", "reads formats 2 to 4", "newer version"},
               [] { (void)parse_save_state(R"({"format": 5})", "state.json"); });
  expect_error(ErrorCode::kWeights, {"'format' is missing"},
               [] { (void)parse_save_state("{}", "state.json"); });
  expect_error(ErrorCode::kWeights, {"no JSON object"},
               [] { (void)parse_save_state("[1", "state.json"); });
}

TEST(SaveNameTest, OnlyNamesThatSluiceGivesAreItsOwn) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors",
                           "model.safetensors.index.json", "model-00001-of-00002.safetensors",
                           "optimizer-00010-of-100000.safetensors", "user.safetensors"}) {
    EXPECT_TRUE(is_save_file_name(name)) << name;
  }
  for (const char* name :
       {"", "model", "model-mine.safetensors", "model-1-of-2.safetensors", "state.json",
        "model-00001-of-00002.safetensors.bak", "optimizer-notes.safetensors",
        "model-0000a-of-00002.safetensors", "../model.safetensors", "xmodel.safetensors",
        "model-00001-of-00002-of-00003.safetensors"}) {
    EXPECT_FALSE(is_save_file_name(name)) << name;
  }
}

// --- publishing, retention, leftovers ---

TEST_F(SaveDirectoryTest, APublishedSaveHasItsNameAndIsTheLatest) {
  publish(7, 1);
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000007"));
  EXPECT_EQ(text(saves() / "latest"), "step-00000007\n");
  EXPECT_THAT(names(step(7)), ElementsAre("model.safetensors", "state.json"));
}

TEST_F(SaveDirectoryTest, WhatIsNotPublishedIsNoSave) {
  publish(7, 1);
  const fs::path partial = begin_save(saves(), 9, lines_);
  write(partial / "model.safetensors", "half");
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(1));
  EXPECT_THAT(open_save_directory(saves()), ElementsAre(HasSubstr(".step-00000009.partial")));
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000007"));
}

TEST_F(SaveDirectoryTest, WhatAKilledStartLeftGoes) {
  const std::vector<std::string> left = {".visible-0123", ".writable-aBcDeF", "latest.partial",
                                         "options.conf.partial"};
  for (const std::string& name : left) write(saves() / name, "");
  write(saves() / "lock", "mine");
  EXPECT_THAT(open_save_directory(saves()), SizeIs(left.size()));
  EXPECT_THAT(names(saves()), ElementsAre("lock"));
}

TEST_F(SaveDirectoryTest, AnEqualStepIsReplaced) {
  publish(7, 1, kOtherRun);
  publish(7, 2);
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000007"));
  EXPECT_EQ(read_save_state(step(7)).run, kRun);
}

TEST_F(SaveDirectoryTest, TheNewestIsTheOneSavedLast) {
  publish(9, 1);
  publish(4, 3);
  publish(7, 2);
  const SaveScan scan = scan_saves(saves());
  ASSERT_THAT(scan.saves, SizeIs(3));
  EXPECT_EQ(scan.saves[0].state.step, 4U);
  EXPECT_EQ(newest_save(saves()), step(4));
}

TEST_F(SaveDirectoryTest, RetentionKeepsTheNewestAndMilestones) {
  for (std::uint64_t i = 1; i <= 6; ++i) publish(10 * i, i);
  EXPECT_THAT(prune({.keep = 2, .keep_every = 20}), IsEmpty());
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000020", "step-00000040",
                                          "step-00000050", "step-00000060"));
}

TEST_F(SaveDirectoryTest, SavesOfOtherRunsGoOnlyWhereTheyAreOverwritten) {
  publish(10, 1, kOtherRun);
  publish(20, 2, kOtherRun);
  publish(5, 3);
  EXPECT_THAT(prune({.keep = 9}), IsEmpty());
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(3));
  EXPECT_THAT(prune({.keep = 9, .remove_other_runs = true}), IsEmpty());
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000005"));
}

TEST_F(SaveDirectoryTest, FilesOfOthersAreNeverDeleted) {
  publish(1, 1);
  publish(2, 2);
  publish(3, 3);
  write(step(1) / "notes.txt", "mine");
  write(step(2) / "model-mine.safetensors", "mine");
  write(saves() / "model-mine.safetensors", "mine");
  write(saves() / ".step-00000009.partial" / "thesis.tex", "mine");
  write(saves() / "step-of-mine" / "state.json", "mine");
  EXPECT_THAT(prune({.keep = 1}), ElementsAre(HasSubstr("'step-00000002.kept-1'"),
                                              HasSubstr("'step-00000001.kept-1'")));
  EXPECT_THAT(open_save_directory(saves()), ElementsAre(HasSubstr("'step-00000009.kept-1'")));
  EXPECT_EQ(text(saves() / "step-00000001.kept-1" / "notes.txt"), "mine");
  EXPECT_EQ(text(saves() / "step-00000002.kept-1" / "model-mine.safetensors"), "mine");
  EXPECT_EQ(text(saves() / "model-mine.safetensors"), "mine");
  EXPECT_EQ(text(saves() / "step-00000009.kept-1" / "thesis.tex"), "mine");
  EXPECT_EQ(text(saves() / "step-of-mine" / "state.json"), "mine");
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(1));
}

TEST_F(SaveDirectoryTest, ALinkInAPartialSaveIsNotFollowed) {
  write(directory_.path() / "precious", "mine");
  fs::create_directories(saves() / ".step-00000009.partial");
  fs::create_symlink(directory_.path() / "precious",
                     saves() / ".step-00000009.partial" / "model.safetensors");
  (void)open_save_directory(saves());
  EXPECT_EQ(text(directory_.path() / "precious"), "mine");
}

TEST_F(SaveDirectoryTest, ALinkInPlaceOfASaveIsNeverEmptied) {
  publish(1, 1);
  publish(2, 2);
  fs::rename(step(1), directory_.path() / "archive");
  fs::create_directory_symlink(directory_.path() / "archive", step(1));
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(2));  // it can be resumed
  EXPECT_THAT(prune({.keep = 1}), ElementsAre(HasSubstr("'step-00000001.kept-1'")));
  fs::create_directory_symlink(directory_.path() / "archive", saves() / ".step-00000003.partial");
  (void)begin_save(saves(), 3, lines_);
  fs::create_directory_symlink(directory_.path() / "archive", step(4));
  publish(4, 3);
  fs::create_directory_symlink(directory_.path() / "archive", saves() / ".step-00000009.deleted");
  (void)open_save_directory(saves());
  EXPECT_THAT(names(directory_.path() / "archive"), ElementsAre("model.safetensors", "state.json"));
  EXPECT_EQ(newest_save(saves()), step(4));
}

TEST_F(SaveDirectoryTest, WhatHasTheNameOfAStepIsSetAsideWhole) {
  write(step(7) / "model.safetensors", "mine");
  publish(7, 1);
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("'step-00000007.kept-1'")));
  EXPECT_EQ(text(saves() / "step-00000007.kept-1" / "model.safetensors"), "mine");
  write(step(8), "a file");
  publish(8, 2);
  EXPECT_EQ(text(saves() / "step-00000008.kept-1"), "a file");
  write(step(7) / "notes.txt", "mine");
  publish(7, 3);
  EXPECT_EQ(text(saves() / "step-00000007.kept-2" / "notes.txt"), "mine");
  EXPECT_TRUE(fs::exists(saves() / "step-00000007.kept-2" / "state.json"));
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(2));
}

TEST_F(SaveDirectoryTest, ACompleteSaveWithoutItsNameGetsItBack) {
  publish(5, 1);
  publish(7, 2);
  publish(9, 3);
  fs::rename(step(5), saves() / ".step-00000005.deleted");
  fs::rename(step(9), saves() / ".step-00000009.partial");
  // Whoever reads finds it already: a run goes on from it before it opens the directory.
  EXPECT_EQ(newest_save(saves()).filename(), ".step-00000009.partial");
  EXPECT_EQ(save_name(newest_save(saves())), "step-00000009");
  EXPECT_EQ(scan_saves(saves()).saves.size(), 2U);
  EXPECT_THAT(open_save_directory(saves()),
              ElementsAre(HasSubstr("it is 'step-00000009' now"), HasSubstr("removed '.step-")));
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000007", "step-00000009"));
  // Between two renames, where the file system cannot exchange names.
  publish(9, 4, kOtherRun);
  fs::remove_all(step(7));
  fs::rename(step(9), saves() / ".step-00000009.deleted");
  fs::remove(saves() / ".step-00000009.deleted" / "model.safetensors");  // cut: no save
  (void)open_save_directory(saves());
  EXPECT_THAT(names(saves()), ElementsAre("latest"));
}

TEST_F(SaveDirectoryTest, ExportsAndDamagedSavesDoNotCountAsKept) {
  publish(1, 1);
  publish(2, 2);
  publish(3, 3, kRun, 100, /*weights_only=*/true);
  publish(4, 4, kRun, 100, /*weights_only=*/true);
  EXPECT_THAT(prune({.keep = 1}), IsEmpty());
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000002", "step-00000004"));
  EXPECT_EQ(newest_resumable(select_saves(saves())).state.step, 2U);
  publish(5, 5);
  publish(6, 6);
  EXPECT_THAT(prune({.keep = 2, .damaged = {step(5)}}), IsEmpty());
  EXPECT_THAT(names(saves()), ElementsAre("latest", "step-00000002", "step-00000004",
                                          "step-00000005", "step-00000006"));
}

TEST_F(SaveDirectoryTest, WhatIsForPeopleIsWrittenOnlyOverItsOwn) {
  fs::create_directory_symlink("step-00000001", saves() / "latest");
  publish(1, 1);
  EXPECT_TRUE(fs::is_symlink(saves() / "latest"));
  fs::remove(saves() / "latest");
  write(saves() / "latest", "my own list");
  publish(2, 2);
  EXPECT_EQ(text(saves() / "latest"), "my own list");
  fs::remove(saves() / "latest");
  ASSERT_EQ(::mkfifo((saves() / "latest").c_str(), 0600), 0);
  publish(3, 3);
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(3));
}

// --- which save a path means ---

TEST_F(SaveDirectoryTest, APathIsADirectoryOfSavesOrOneStep) {
  publish(1, 1);
  publish(2, 2);
  EXPECT_THAT(select_saves(saves()).candidates, SizeIs(2));
  const SaveSelection one = select_saves(step(1));
  EXPECT_TRUE(one.one_step);
  ASSERT_THAT(one.candidates, SizeIs(1));
  EXPECT_EQ(one.candidates[0].state.step, 1U);
  EXPECT_THAT(select_saves(directory_.path() / "none").candidates, IsEmpty());
  expect_error(ErrorCode::kWeights, {"none' does not exist"},
               [&] { (void)newest_save(directory_.path() / "none"); });
  expect_error(ErrorCode::kWeights, {"holds no save"},
               [&] { (void)newest_save(directory_.path()); });
}

TEST_F(SaveDirectoryTest, ADamagedStateIsReported) {
  publish(1, 1);
  write(step(1) / "state.json", "{}");
  EXPECT_THAT(scan_saves(saves()).broken, ElementsAre(HasSubstr("step-00000001/state.json")));
  EXPECT_THAT(select_saves(step(1)).broken, SizeIs(1));
  fs::rename(step(1), saves() / "export");
  EXPECT_THAT(select_saves(saves() / "export").broken, SizeIs(1));
}

TEST_F(SaveDirectoryTest, AStepWithoutStateIsDamaged) {
  publish(1, 1);
  fs::remove(step(1) / "state.json");
  EXPECT_THAT(select_saves(step(1)).broken, ElementsAre(HasSubstr("step-00000001/state.json")));
  EXPECT_THAT(scan_saves(saves()).broken, SizeIs(1));
}

TEST_F(SaveDirectoryTest, AStateOfAnotherStepIsDamage) {
  publish(1, 1);
  publish(2, 2);
  fs::copy_file(step(1) / "state.json", step(2) / "state.json",
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(scan_saves(saves()).broken,
              ElementsAre(AllOf(HasSubstr("step-00000002/state.json"), HasSubstr("of step 1"))));
  EXPECT_THAT(scan_saves(saves()).saves, SizeIs(1));
}

TEST_F(SaveDirectoryTest, FilesOfVersion01AreRefusedByTheirFormat) {
  write(saves() / "state.json", R"({"format": 1, "step": 4})");
  write(saves() / "model.safetensors", "");
  expect_error(ErrorCode::kWeights, {"is of format 1; this version reads formats 2 to 4"},
               [&] { (void)newest_save(saves()); });
  publish(5, 1);  // of this version, into the same directory: it counts
  EXPECT_EQ(newest_save(saves()), step(5));
}

TEST_F(SaveDirectoryTest, ADirectoryThatCannotBeWrittenIsNamed) {
  expect_error(ErrorCode::kIo, {"/dev/null/saves"},
               [] { (void)open_save_directory("/dev/null/saves"); });
  expect_error(ErrorCode::kIo, {"/proc/saves"}, [] { (void)open_save_directory("/proc/saves"); });
  fs::remove_all(saves());
  expect_error(ErrorCode::kIo, {saves().string()}, [&] { (void)begin_save(saves(), 1, lines_); });
}

TEST_F(SaveDirectoryTest, SpaceIsCheckedWithBothNumbers) {
  require_space(saves(), 1);
  expect_error(ErrorCode::kIo,
               {saves().string(), "takes 1099511627776.0 MiB and leaves 1 MiB free, but"},
               [&] { require_space(saves(), std::uint64_t{1} << 60); });
}

// --- hashes ---

TEST_F(SaveDirectoryTest, EveryDamagedByteOfAFileIsFoundAndNamed) {
  const SaveState state = publish(7, 1);
  const fs::path file = step(7) / "model.safetensors";
  const std::string whole = text(file);
  require_complete(step(7), state);
  require_hashes(step(7), state, hash_pieces(state));
  require_headers(step(7), state);
  for (std::size_t at = 0; at < whole.size(); at += 7) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x40);
    write(file, changed);
    expect_error(ErrorCode::kWeights, {"model.safetensors' is damaged", "expected", "found"},
                 [&] { require_hashes(step(7), state, hash_pieces(state)); });
  }
  write(file, whole.substr(0, whole.size() - 1));
  expect_error(ErrorCode::kWeights,
               {fmt::format("expected {} bytes, found {}", whole.size(), whole.size() - 1)},
               [&] { require_complete(step(7), state); });
  fs::remove(file);
  expect_error(ErrorCode::kWeights, {"model.safetensors' is missing"},
               [&] { require_complete(step(7), state); });
}

TEST_F(SaveDirectoryTest, ARankComparesOnlyTheBlocksThatItReads) {
  // Tensor a fills two blocks and more; b lies in the last one.
  const SaveState state = publish(7, 1, kRun, 2 * kHashBlock / sizeof(float) + 1000);
  ASSERT_THAT(state.files[0].blocks, SizeIs(3));
  EXPECT_THAT(hash_pieces(state), SizeIs(3));
  const std::vector<HashPiece> of_b = hash_pieces_of(step(7), state, {"b"});
  ASSERT_THAT(of_b, SizeIs(2));  // the header's and its own
  EXPECT_EQ(of_b[0].first, 0U);
  EXPECT_EQ(of_b[1].first, 2 * kHashBlock);
  std::fstream file(step(7) / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(kHashBlock + 5);
  file.put('\x7f');
  file.close();
  require_hashes(step(7), state, of_b);
  expect_error(ErrorCode::kWeights, {"in tensor a", fmt::format("bytes {}", kHashBlock)},
               [&] { require_hashes(step(7), state, hash_pieces(state)); });
}

TEST_F(SaveDirectoryTest, AHeaderThatSaysOtherThanTheStateIsRefused) {
  SaveState state = publish(7, 1);
  state.tensors[1].spec.shape = Shape{5, 2};
  expect_error(ErrorCode::kWeights, {"'b' is f32 [2, 5]", "f32 [5, 2]"},
               [&] { require_headers(step(7), state); });
}

TEST(ChecksumTest, IsXxh3Of128BitsForAnyPieces) {
  // The reference's own value for no bytes.
  EXPECT_EQ(checksum_hex({}), "99aa06d3014798d86001c324468d497f");
  const std::string bytes(100'000, 'x');
  Checksum checksum;
  for (std::size_t at = 0; at < bytes.size(); at += 777) {
    checksum.add(
        std::as_bytes(std::span(bytes)).subspan(at, std::min<std::size_t>(777, bytes.size() - at)));
  }
  EXPECT_EQ(checksum.finish(), hash_of(bytes));
}

TEST(DurableTest, ARenameThatCannotBeIsNamed) {
  expect_error(ErrorCode::kIo, {"/no/such/file"},
               [] { rename_durably("/no/such/file", "/no/such/other"); });
  expect_error(ErrorCode::kIo, {"/no/such"}, [] { sync_directory("/no/such"); });
}

// --- the lock ---

class SaveLockTest : public SaveDirectoryTest {
 protected:
  static constexpr auto kShort = std::chrono::milliseconds(200);
};

TEST_F(SaveLockTest, TheSecondIsRefusedWithHostAndProcess) {
  const SaveLock first(saves());
  first.require_held();
  expect_error(ErrorCode::kIo, {saves().string(), fmt::format("process {}", getpid()), "host '"},
               [&] { const SaveLock second(saves(), kShort); });
}

TEST_F(SaveLockTest, ItGoesWithItsOwner) {
  { const SaveLock first(saves()); }
  EXPECT_THAT(names(saves()), IsEmpty());
  const SaveLock second(saves());
  second.require_held();
}

TEST_F(SaveLockTest, ThatOfAProcessThatIsGoneIsTakenOver) {
  const pid_t child = fork();
  if (child == 0) {
    new SaveLock(saves());  // never destroyed
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(fs::exists(saves() / "lock"));
  const SaveLock mine(saves());
  mine.require_held();
}

TEST_F(SaveLockTest, ThatOfAProcessThatNobodyWaitedForIsTakenOver) {
  const pid_t child = fork();
  if (child == 0) {
    new SaveLock(saves());  // never destroyed
    _exit(0);
  }
  siginfo_t ended = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  {
    const SaveLock mine(saves());
    mine.require_held();
  }
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(SaveLockTest, OneThatNobodyRenewsIsTakenOverAfterWatchingIt) {
  write(saves() / "lock", "not Sluice's text");
  std::vector<std::string> notes;
  const SaveLock mine(saves(), kShort, [&](const std::string& note) { notes.push_back(note); });
  mine.require_held();
  EXPECT_THAT(notes, ElementsAre(AllOf(HasSubstr("lock"), HasSubstr("waiting"))));
}

TEST_F(SaveLockTest, WhatIsNoFileIsNamedAndStays) {
  const auto refuse = [&] {
    expect_error(ErrorCode::kIo, {(saves() / "lock").string(), "is no file"},
                 [&] { const SaveLock mine(saves(), kShort); });
  };
  fs::create_directory(saves() / "lock");
  refuse();
  fs::remove(saves() / "lock");
  ASSERT_EQ(mkfifo((saves() / "lock").c_str(), 0600), 0);
  refuse();
  fs::remove(saves() / "lock");
  fs::create_symlink(directory_.path() / "elsewhere", saves() / "lock");
  refuse();
  EXPECT_TRUE(fs::is_symlink(saves() / "lock"));
}

TEST_F(SaveLockTest, OfJobsThatFindItStaleOneTakesIt) {
  for (int round = 0; round < 20; ++round) {
    write(saves() / "lock", "not Sluice's text");
    std::barrier start(4), end(4);
    std::atomic<int> taken = 0;
    const auto job = [&] {
      std::optional<SaveLock> mine;
      start.arrive_and_wait();
      try {
        mine.emplace(saves(), std::chrono::milliseconds(1));
        ++taken;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("in use by "));
      }
      end.arrive_and_wait();
    };
    {
      std::vector<std::jthread> jobs;
      for (int i = 0; i < 4; ++i) jobs.emplace_back(job);
    }
    EXPECT_EQ(taken, 1);
    EXPECT_THAT(names(saves()), IsEmpty());
  }
}

TEST_F(SaveLockTest, OneOfAnotherHostThatIsRenewedIsNot) {
  write(saves() / "lock",
        R"({"host":"far","place":"b n","process":5,"started":1,"since":-9223372036854775807})");
  std::jthread renews([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      (void)utimensat(AT_FDCWD, (saves() / "lock").c_str(), nullptr, 0);
      std::this_thread::yield();
    }
  });
  expect_error(ErrorCode::kIo, {"process 5 on host 'far' since 1970-01-01 00:00:00 UTC"},
               [&] { const SaveLock mine(saves(), std::chrono::seconds(20)); });
}

TEST_F(SaveLockTest, ItsOwnerNoticesThatItWasTakenOver) {
  const SaveLock mine(saves());
  write(saves() / "lock",
        R"({"host":"far","boot":"b","job":"17","process":5,"started":1,"since":0})");
  expect_error(ErrorCode::kIo, {"process 5 on host 'far'"}, [&] { mine.require_held(); });
  fs::remove(saves() / "lock");
  expect_error(ErrorCode::kIo, {"gone"}, [&] { mine.require_held(); });
}

}  // namespace
}  // namespace sluice::testing
