// Optimizer state that replicas divide: ranges of elements in saves, and layouts that follow each
// other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/save_files.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "runtime/checkpoint/state_parts.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

// --- files with ranges ---

// Of the state "m.w" f32 [10, 10], whose element i is i.
class SavedRangesTest : public ::testing::Test {
 protected:
  SavedRangesTest() { std::iota(values_.begin(), values_.end(), 0.0F); }

  [[nodiscard]] SaveTensor range(std::int64_t first, std::int64_t end) {
    SaveTensor tensor = save_tensor({"m.w[" + std::to_string(first) + ":" + std::to_string(end),
                                     {values_.data() + first, {DType::kF32, {end - first}}}});
    tensor.listed.range = SavedRange{"m.w", {10, 10}, first};
    return tensor;
  }
  // Each in a file of its own.
  [[nodiscard]] SaveState save(const std::vector<SaveTensor>& tensors) {
    SaveState state;
    const int count = static_cast<int>(tensors.size());
    for (int i = 0; i < count; ++i) {
      write_save_file(directory_.path(), weights_file_name("optimizer", i, count),
                      std::span(tensors).subspan(at(i), 1), {}, state);
    }
    return state;
  }
  void expect_refused(const std::vector<SaveTensor>& tensors,
                      std::initializer_list<std::string> parts) {
    const SaveState state = save(tensors);
    expect_error(ErrorCode::kWeights, parts,
                 [&] { const SavedTensors saved(directory_.path(), state); });
  }

  TemporaryDirectory directory_;
  std::vector<float> values_ = std::vector<float>(100);
};

TEST_F(SavedRangesTest, AnyElementsAreReadFromTheTensorsThatHoldThem) {
  const SaveState state = save({range(70, 100), range(0, 40), range(40, 70)});
  SavedTensors saved(directory_.path(), state);
  EXPECT_EQ(saved.find("m.w"), (TensorSpec{DType::kF32, {10, 10}}));
  for (const auto& [first, end] :
       std::vector<std::pair<int, int>>{{0, 100}, {0, 40}, {39, 41}, {45, 46}, {40, 100}, {5, 5}}) {
    std::vector<float> read(at(end - first));
    saved.read("m.w", read, first);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), values_.begin() + first)) << first;
  }
  std::vector<std::string> names;
  for (const SavedTensor& tensor : saved.tensors_of("m.w", 39, 2)) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("m.w[0:40", "m.w[40:70"));
}

TEST_F(SavedRangesTest, WhatDoesNotHoldEachElementOnceIsNamed) {
  const std::string whole = "of 'm.w' f32 [10, 10] are ";
  expect_refused({range(0, 40), range(50, 100)}, {"elements 40 to 49 " + whole + "missing"});
  expect_refused({range(1, 100)}, {"elements 0 to 0 " + whole + "missing"});
  expect_refused({range(0, 50), range(50, 99)}, {"elements 99 to 99 " + whole + "missing"});
  expect_refused({range(0, 60), range(50, 100)}, {"elements 50 to 59 " + whole + "there twice"});
  expect_refused({range(0, 60), range(10, 20), range(60, 100)},
                 {"elements 10 to 19 " + whole + "there twice"});
  // The whole beside a range of it.
  const SaveTensor all = save_tensor({"m.w", {values_.data(), {DType::kF32, {10, 10}}}});
  expect_refused({all, range(0, 50)}, {"there twice"});
}

TEST_F(SavedRangesTest, RangesOfOtherWholesAndFilesAreNamed) {
  SaveTensor other = range(50, 100);
  other.listed.range->shape = {100};
  expect_refused({range(0, 50), other}, {"'m.w[50:100'", "'m.w' f32 [100]", "f32 [10, 10]"});
  other = range(50, 100);
  other.listed.spec = {DType::kBf16, {50}};
  std::vector<Bf16> rounded(50);
  other.bytes = [&](std::vector<std::byte>&) { return std::as_bytes(std::span(rounded)); };
  expect_refused({range(0, 50), other}, {"'m.w[50:100'", "bf16 [10, 10]", "one f32, bf16 or f16"});
  SaveState state;
  const std::vector<SaveTensor> model = {range(0, 100)};
  write_save_file(directory_.path(), "model.safetensors", model, {}, state);
  expect_error(ErrorCode::kWeights, {"in 'model.safetensors'", "of an optimizer"},
               [&] { const SavedTensors saved(directory_.path(), state); });
}

TEST(RangeNamesTest, NothingElseOfASaveHasSuchAName) {
  const SavedRange range{"m.w", {100}, 5};
  const std::vector<std::string> plain = {"w", "v"};
  EXPECT_EQ(RangeNames(plain, {}).of(range, 10), "m.w[5:15]");
  // Whatever the kinds of states are, "m.w[5:15]" and "[5:15]" of a kind "m.w" end with one
  // bracket.
  for (const char* wicked : {"w[5:15]", "[5:15]", "]"}) {
    const std::vector<std::string> names = {"w", wicked};
    EXPECT_EQ(RangeNames(names, {}).of(range, 10), "m.w[[5:15]]") << wicked;
  }
  EXPECT_EQ(RangeNames(plain, {{"v", {{"m.w[5:15]]", 1}}}}).of(range, 10), "m.w[[[5:15]]]");
}

// --- trainings whose replicas divide the state ---

float first_value(const std::string& parameter, std::int64_t element) {
  return static_cast<float>((element * 40'503 + std::ssize(parameter) * 977) % 16'777'213);
}
// Exact in bf16.
float second_value(const std::string& parameter, std::int64_t element) {
  return static_cast<float>((element * 7 + std::ssize(parameter)) % 251);
}

// State "first" in f32 and "second" in bf16, which it never changes. It has the elements that its
// rank updates, but for the last `lost` ones once its pipeline is made.
class Still : public Optimizer {
 public:
  Still(std::span<const ParameterSlice> slices, std::shared_ptr<const JobLayout*> layout,
        std::string second, std::int64_t lost)
      : layout_(std::move(layout)), second_(std::move(second)), lost_(lost) {
    for (const ParameterSlice& slice : slices) {
      const auto count = static_cast<std::size_t>(slice.count);
      held_.push_back({slice, std::vector<float>(count, -1), std::vector<Bf16>(count)});
    }
  }
  void update(ComputeContext&, std::uint64_t, float, float) override {}
  std::vector<OptimizerState> state() override {
    std::vector<OptimizerState> states;
    for (Held& held : held_) {
      const std::string& name = held.slice.parameter->name;
      const ElementRange own = part(held.slice);
      if (own.count == 0) continue;
      const bool whole = own.count == held.slice.parameter->shape.elements();
      const Shape shape = whole ? held.slice.parameter->shape : Shape{own.count};
      const auto skip = own.first - held.slice.first;
      states.push_back(
          {name, "first", {held.first.data() + skip, {DType::kF32, shape}}, own.first});
      states.push_back(
          {name, second_, {held.second.data() + skip, {DType::kBf16, shape}}, own.first});
    }
    return states;
  }

 private:
  struct Held {
    ParameterSlice slice;
    std::vector<float> first;
    std::vector<Bf16> second;
  };

  [[nodiscard]] ElementRange part(const ParameterSlice& slice) const {
    if (*layout_ == nullptr) return {slice.first, slice.count};
    for (const StageEntry& stage : (*layout_)->parameters.stages) {
      for (const ParameterEntry& entry : stage.parameters) {
        if (entry.name == slice.parameter->name) {
          const ElementRange own = entry.part((*layout_)->place.here.replica);
          return {own.first, std::max<std::int64_t>(own.count - lost_, 0)};
        }
      }
    }
    return {};
  }

  std::shared_ptr<const JobLayout*> layout_;  // null while the pipeline is made
  std::string second_;
  std::int64_t lost_;
  std::vector<Held> held_;
};

struct Grid {
  int pipeline = 1, replicas = 1;
  ShardLevel shard = ShardLevel::kNone;
  int shard_group = 0;
};
constexpr ShardLevel kDivided = ShardLevel::kOptimizer, kAll = ShardLevel::kParameters;

class StateRangesTest : public ::testing::Test {
 protected:
  using Body = std::function<void(Pipeline&, Communicator&)>;

  void run(const Grid& grid, const Body& body) {
    const auto source = synthetic_tokens(model_);
    const StageFactory factory = Transformer(model_);
    run_loopback(grid.pipeline * grid.replicas, [&](Communicator& comm) {
      PipelineOptions options;
      options.shape = {.pipeline = grid.pipeline,
                       .replicas = grid.replicas,
                       .micro_batches = 12 / grid.replicas,
                       .shard = grid.shard,
                       .shard_group = grid.shard_group};
      options.training.learning_rate = {.peak = 1e-2, .steps = 20};
      options.training.groups = groups_;
      options.expert.save_copy = true;
      const auto layout = std::make_shared<const JobLayout*>();
      options.training.make_optimizer = [&](std::span<const ParameterSlice> slices,
                                            const DeviceMemory&) {
        return std::make_unique<Still>(slices, layout, second_, lost_);
      };
      Pipeline pipeline(comm, factory, *source, options);
      *layout = &PipelineAccess::layout(pipeline);
      body(pipeline, comm);
    });
  }

  static void set_states(Pipeline& pipeline) {
    for (const OptimizerState& state : pipeline.optimizer_state()) {
      for (std::int64_t i = 0; i < state.tensor.elements(); ++i) {
        const std::int64_t element = state.first + i;
        if (state.kind == "first") {
          state.tensor.as<float>()[i] = first_value(state.parameter, element);
        } else {
          state.tensor.as<Bf16>()[i] = to_bf16(second_value(state.parameter, element));
        }
      }
    }
  }
  static void expect_states(Pipeline& pipeline) {
    for (const OptimizerState& state : pipeline.optimizer_state()) {
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < state.tensor.elements(); ++i) {
        const std::int64_t element = state.first + i;
        wrong +=
            state.kind == "first"
                ? state.tensor.as<float>()[i] != first_value(state.parameter, element)
                : to_float(state.tensor.as<Bf16>()[i]) != second_value(state.parameter, element);
      }
      EXPECT_EQ(wrong, 0) << state.kind << "." << state.parameter << " from " << state.first;
    }
  }
  // Of a training on `grid`, whose states are the functions above.
  void save_on(const Grid& grid, const CheckpointOptions& options) {
    run(grid, [&](Pipeline& pipeline, Communicator&) {
      set_states(pipeline);
      save_checkpoint(pipeline, options);
    });
  }
  [[nodiscard]] fs::path saves() const { return directory_.path() / "saves"; }
  [[nodiscard]] static SaveState state_in(const fs::path& path) {
    return scan_saves(path).saves.at(0).state;
  }

  TemporaryDirectory directory_;
  // The embedding has 5 blocks of kSumBlock elements and a part of one.
  TransformerConfig model_ = {
      .layers = 2, .heads = 2, .width = 32, .context = 16, .vocabulary = 2900};
  std::string second_ = "second";
  std::int64_t lost_ = 0;
  std::vector<ParameterGroup> groups_;
};

constexpr const char* kEmbedding = "token_embedding.weight";

TEST_F(StateRangesTest, EachLayoutGoesOnFromEachOther) {
  const std::vector<Grid> chain = {
      {1, 1},       {1, 2, kDivided}, {2, 4, kDivided}, {1, 2, kDivided}, {2, 3, kDivided},
      {2, 1},       {3, 2},           {1, 4, kDivided}, {1, 1, kDivided}, {1, 4, kAll, 2},
      {2, 4, kAll}, {1, 6, kAll, 3},  {1, 6, kAll, 2},  {1, 3, kAll},     {1, 4, kAll, 2}};
  std::string digest;  // of values that bf16 does not hold
  run(chain.front(), [&](Pipeline& pipeline, Communicator&) {
    set_states(pipeline);
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      for (float& value : owned.parameter->value.floats()) value += 1.0F / 3;
    }
    pipeline.values_changed();
    digest = digest_of(pipeline);
    save_checkpoint(pipeline, {.directory = saves() / "0"});
  });
  for (std::size_t i = 1; i < chain.size(); ++i) {
    SCOPED_TRACE(i);
    run(chain[i], [&](Pipeline& pipeline, Communicator&) {
      for (const Verify verify : {Verify::kRead, Verify::kFull}) {
        (void)load_checkpoint(pipeline, saves() / std::to_string(i - 1), verify);
        expect_states(pipeline);
        EXPECT_EQ(digest_of(pipeline), digest);
      }
      save_checkpoint(pipeline, {.directory = saves() / std::to_string(i),
                                 .precision = i % 3 == 0 ? DType::kF32 : DType::kBf16});
    });
  }
}

TEST_F(StateRangesTest, EachReplicaSavesTheStateOfItsPart) {
  for (const int replicas : {2, 4}) {
    const fs::path path = saves() / std::to_string(replicas);
    save_on({1, replicas, kDivided}, {.directory = path});
    std::map<std::string, std::size_t> bytes;
    std::size_t all = 0, ranges = 0;
    for (const SavedTensor& tensor : state_in(path).tensors) {
      if (!tensor.file.starts_with("optimizer")) continue;
      bytes[tensor.file] += tensor.spec.bytes();
      all += tensor.spec.bytes();
      if (tensor.range) ++ranges;
    }
    EXPECT_EQ(bytes.size(), at(replicas));
    EXPECT_GE(ranges, 2 * at(replicas) - 2);
    for (const auto& [file, size] : bytes) {
      EXPECT_LE(size, all / at(replicas) + 16'384 * 6 * 2) << file;  // two blocks of both states
    }
  }
}

TEST_F(StateRangesTest, FilesOfTheOptimizerAreNumberedByTheRanksThatHaveState) {
  groups_ = {{.names = "final_norm.*"}, {.names = "*", .frozen = true}};
  for (const DType precision : {DType::kF32, DType::kBf16}) {  // with the f32 values: more ranks
    const fs::path path = saves() / name_of(precision);
    save_on({1, 4, kDivided}, {.directory = path, .precision = precision});
    std::vector<std::string> names, expected;
    for (const SavedFile& file : state_in(path).files) {
      if (file.name.starts_with("optimizer-")) names.push_back(file.name);
    }
    for (int i = 0; i < std::ssize(names); ++i) {
      expected.push_back(weights_file_name("optimizer", i, static_cast<int>(std::ssize(names))));
    }
    EXPECT_THAT(names, UnorderedElementsAreArray(expected));
    EXPECT_GT(names.size(), 0U);
    if (precision == DType::kF32) {
      EXPECT_LT(names.size(), 4U);
    }
  }
}

TEST_F(StateRangesTest, OnlyASaveWithRangesNeedsItsFormat) {
  save_on({1, 2}, {.directory = saves() / "whole"});
  save_on({1, 2, kDivided}, {.directory = saves() / "divided"});
  const auto format_in = [](const fs::path& path) {
    std::ifstream file(scan_saves(path).saves.front().directory / "state.json");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return text.substr(0, text.find(','));
  };
  EXPECT_THAT(format_in(saves() / "whole"), HasSubstr("\"format\": 3"));
  EXPECT_THAT(format_in(saves() / "divided"), HasSubstr("\"format\": 4"));
}

TEST_F(StateRangesTest, CommandsReadASaveWithRangesLikeOneWithout) {
  const auto digest_in = [](const fs::path& path) {
    SavedTensors tensors = open_model_tensors(path);  // compares all hashes
    std::vector<ParameterDigest> digests;
    for (const std::string& name : tensors.parameters()) {
      std::vector<float> values(static_cast<std::size_t>(tensors.find(name)->shape.elements()));
      tensors.read(name, values);
      digests.push_back({name, sha256_hex(std::as_bytes(std::span<const float>(values)))});
    }
    return digest_all(digests);
  };
  std::vector<std::string> digests;
  std::vector<std::size_t> bytes;
  for (const Grid& grid : {Grid{1, 1}, Grid{2, 4, kDivided}}) {
    const fs::path path = saves() / std::to_string(grid.replicas);
    save_on(grid, {.directory = path});
    digests.push_back(digest_in(path));
    const WeightsDirectory optimizer(scan_saves(path).saves.front().directory, "optimizer");
    std::size_t size = 0;
    for (const std::string& name : optimizer.names()) size += optimizer.find(name)->spec.bytes();
    bytes.push_back(size);
  }
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST_F(StateRangesTest, ATensorOfTheModelMayHaveTheNameOfARange) {
  std::int64_t end = 0;
  run({1, 2, kDivided}, [&](Pipeline& pipeline, Communicator& comm) {
    for (const ParameterEntry& entry :
         PipelineAccess::layout(pipeline).parameters.stages[0].parameters) {
      if (comm.rank() == 0 && entry.name == kEmbedding) end = entry.part(0).end();
    }
  });
  const std::string name = std::string("first.") + kEmbedding + "[0:" + std::to_string(end) + "]";
  save_on({1, 2, kDivided},
          {.directory = saves(), .layout = {{kEmbedding, {{name, model_.vocabulary}}}}});
  std::map<std::string, std::size_t> named;
  for (const SavedTensor& tensor : state_in(saves()).tensors) ++named[tensor.name];
  EXPECT_EQ(named[name], 1U);
  EXPECT_EQ(
      std::count_if(named.begin(), named.end(),
                    [](const auto& each) {
                      return each.first.starts_with(std::string("first.") + kEmbedding + "[[");
                    }),
      2);
  run({1, 1}, [&](Pipeline& pipeline, Communicator&) {
    (void)load_checkpoint(pipeline, saves());
    expect_states(pipeline);
  });
}

TEST_F(StateRangesTest, ARangeThatIsMissingIsRefusedOnAllRanksBeforeAnythingChanges) {
  save_on({1, 4, kDivided}, {.directory = saves()});
  const fs::path step = scan_saves(saves()).saves.front().directory;
  SaveState state = read_save_state(step);
  const auto lost = std::find_if(
      state.tensors.begin(), state.tensors.end(),
      [](const SavedTensor& tensor) { return tensor.range && tensor.range->first > 0; });
  ASSERT_NE(lost, state.tensors.end());
  const std::string elements = "elements " + std::to_string(lost->range->first) + " to ";
  const std::string whole = "of '" + lost->range->whole + "'";
  state.tensors.erase(lost);
  std::ofstream(step / "state.json") << to_json_text(state);
  for (const Grid& grid : {Grid{2, 1}, Grid{1, 2, kDivided}}) {
    run(grid, [&](Pipeline& pipeline, Communicator&) {
      set_states(pipeline);
      const std::string untouched = digest_of(pipeline);
      expect_error(ErrorCode::kWeights, {elements, whole, "are missing"},
                   [&] { (void)load_checkpoint(pipeline, saves()); });
      EXPECT_TRUE(pipeline.usable());
      EXPECT_EQ(digest_of(pipeline), untouched);
      expect_states(pipeline);
    });
  }
}

TEST_F(StateRangesTest, AStateThatLosesElementsIsRefusedOnAllRanks) {
  lost_ = 1;
  run({1, 2, kDivided}, [&](Pipeline& pipeline, Communicator&) {
    expect_error(ErrorCode::kUsage,
                 {"the optimizer's state 'first' of '", "legal: all of elements"},
                 [&] { save_checkpoint(pipeline, {.directory = saves()}); });
    EXPECT_TRUE(pipeline.usable());
  });
  EXPECT_THAT(scan_saves(saves()).saves, ::testing::IsEmpty());
}

TEST_F(StateRangesTest, AStateThatWasNotSavedIsRefusedOnAllRanks) {
  save_on({1, 2, kDivided}, {.directory = saves()});
  second_ = "third";
  run({1, 3, kDivided}, [&](Pipeline& pipeline, Communicator&) {
    expect_error(ErrorCode::kWeights, {"tensor 'third.", "is missing", "bf16 ["},
                 [&] { (void)load_checkpoint(pipeline, saves()); });
    EXPECT_TRUE(pipeline.usable());
  });
}

TEST_F(StateRangesTest, ThePlanCountsTheHostCopyOfTheParts) {
  for (const Grid& grid : {Grid{1, 2}, Grid{1, 2, kDivided}, Grid{1, 4, kDivided}}) {
    run(grid, [&](Pipeline& pipeline, Communicator& comm) {
      const JobLayout& layout = PipelineAccess::layout(pipeline);
      const auto shares = share_saves(layout);
      std::map<std::string, std::int64_t> mine;  // elements of this rank's values
      for (const SavedParameter& share : shares) {
        if (share.replica == comm.rank()) mine[share.name] = share.elements;
      }
      std::int64_t elements = 0;  // of values, and of two states as the plan takes them: AdamW's
      for (const auto& [name, count] : mine) elements += count;
      for (const StatePart& part : state_parts(pipeline)) {
        if (part.divided || mine.contains(part.parameter)) elements += part.tensor.elements();
      }
      std::size_t most = 0;
      for (const std::string& theirs :
           PipelineAccess::world(pipeline).all_gather_strings(std::to_string(elements))) {
        most = std::max<std::size_t>(most, std::stoull(theirs));
      }
      EXPECT_EQ(layout.memory.ranks[0].save_copy, 4 * most);
    });
  }
}

}  // namespace
}  // namespace sluice::testing
