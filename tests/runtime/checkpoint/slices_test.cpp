// Parameters that tensor ranks divide: slices in saves and snapshots, and who saves them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>
#include <sluice/parameter.hpp>

#include "comm/base/index.hpp"
#include "comm/group/collectives.hpp"
#include "runtime/checkpoint/save_files.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "runtime/checkpoint/snapshot.hpp"
#include "runtime/checkpoint/state_parts.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/layout/save_shares.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;

// A whole of [4, 6, 5] whose element i is i.
constexpr std::int64_t kDims[] = {4, 6, 5}, kElements = 120;
const Shape kShape = {4, 6, 5};

std::vector<float> whole_values() {
  std::vector<float> values(at(kElements));
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

// Those of a slice, by the coordinate of each element.
std::vector<float> values_of(const Slice& slice) {
  if (slice.all()) return whole_values();
  std::vector<float> values;
  for (std::int64_t element = 0; element < kElements; ++element) {
    const std::int64_t coordinates[] = {element / 30, element / 5 % 6, element % 5};
    const std::int64_t row = coordinates[slice.axis];
    if (row >= slice.begin && row < slice.begin + slice.length) {
      values.push_back(static_cast<float>(element));
    }
  }
  return values;
}

// The slices of the whole that end at these rows.
std::vector<Slice> cut(int axis, const std::vector<std::int64_t>& ends) {
  std::vector<Slice> slices;
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    slices.push_back({axis, begin, end - begin, kDims[axis]});
    begin = end;
  }
  return slices;
}

// Uneven, and some without rows.
std::vector<std::vector<Slice>> all_cuts() {
  return {{Slice{}},         cut(0, {1, 4}),         cut(0, {4, 4}),
          cut(1, {2, 6}),    cut(1, {3, 3, 5, 6}),   cut(1, {6}),
          cut(2, {0, 2, 5}), cut(2, {1, 2, 3, 4, 5})};
}

class SlicesTest : public ::testing::Test {
 protected:
  // Elements `first` to `end` of a slice of the state "m.w".
  SaveTensor part(const Slice& slice, std::int64_t first, std::int64_t end) {
    const std::vector<float> values = values_of(slice);
    std::vector<float>& kept = values_.emplace_back(values.begin() + first, values.begin() + end);
    const SavedRange range{"m.w", kShape, first, slice};
    SaveTensor tensor =
        save_tensor({names_.of(range, end - first), {kept.data(), {DType::kF32, {end - first}}}});
    tensor.listed.range = range;
    return tensor;
  }
  SaveTensor part(const Slice& slice) { return part(slice, 0, std::ssize(values_of(slice))); }
  // All slices in ranges of at most so many elements, the last ones first.
  std::vector<SaveTensor> parts(const std::vector<Slice>& slices, std::int64_t most) {
    std::vector<SaveTensor> all;
    for (const Slice& slice : slices) {
      const std::int64_t count = std::ssize(values_of(slice));
      for (std::int64_t first = 0; first < count; first += most) {
        all.push_back(part(slice, first, std::min(first + most, count)));
      }
    }
    std::reverse(all.begin(), all.end());
    return all;
  }
  [[nodiscard]] SaveState save(const std::vector<SaveTensor>& tensors,
                               const std::string& file = "optimizer.safetensors") {
    SaveState state;
    write_save_file(directory_.path(), file, tensors, {}, state);
    return state;
  }
  // At any slices, and of each at some elements.
  void expect_read(SavedTensors& saved, const std::string& name) {
    for (const std::vector<Slice>& slices : all_cuts()) {
      for (const Slice& slice : slices) {
        const std::vector<float> wanted = values_of(slice);
        const std::int64_t count = std::ssize(wanted);
        for (const auto& [first, end] : std::vector<std::pair<std::int64_t, std::int64_t>>{
                 {0, count}, {count / 3, count - count / 4}, {count / 2, count / 2 + count % 2}}) {
          std::vector<float> read(static_cast<std::size_t>(end - first));
          saved.read(name, read, first, slice);
          EXPECT_TRUE(std::equal(read.begin(), read.end(), wanted.begin() + first))
              << slice.axis << " from row " << slice.begin << ", element " << first;
        }
      }
    }
  }
  void expect_refused(const std::vector<SaveTensor>& tensors,
                      std::initializer_list<std::string> parts) {
    const SaveState state = save(tensors);
    expect_error(ErrorCode::kWeights, parts,
                 [&] { const SavedTensors saved(directory_.path(), state); });
  }

  TemporaryDirectory directory_;
  std::deque<std::vector<float>> values_;
  RangeNames names_ = RangeNames({}, {});
};

TEST_F(SlicesTest, AnySlicesAreReadFromAnyOthers) {
  for (const std::vector<Slice>& slices : all_cuts()) {
    for (const std::int64_t most : {kElements, std::int64_t{7}}) {
      SCOPED_TRACE(slices.size());
      const SaveState state = save(parts(slices, most));
      SavedTensors saved(directory_.path(), state);
      EXPECT_EQ(saved.find("m.w"), (TensorSpec{DType::kF32, kShape}));
      expect_read(saved, "m.w");
    }
  }
}

TEST_F(SlicesTest, SlicesOfAParameterAreReadFromItsPartsInAFile) {
  Tensor whole{values_.emplace_back(whole_values()).data(), {DType::kF32, kShape}};
  for (const FileLayout& layout : {FileLayout{}, FileLayout{{"w", {{"a", 1}, {"b", 3}}}}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      std::vector<SaveTensor> tensors;
      add_parts({"w", whole}, layout, dtype, tensors);
      const SaveState state = save(tensors, "model.safetensors");
      SavedTensors saved(directory_.path(), state);
      expect_read(saved, "w");
    }
  }
}

TEST_F(SlicesTest, SlicesOfATransposedParameterAreRead) {
  std::vector<float>& values = values_.emplace_back(whole_values());
  std::vector<SaveTensor> tensors;
  add_parts({"w", {values.data(), {DType::kF32, {12, 10}}}},
            {{"w", {{"a", 5, true}, {"b", 7, true}}}}, DType::kF32, tensors);
  const SaveState state = save(tensors, "model.safetensors");
  SavedTensors saved(directory_.path(), state);
  std::vector<float> rows(30), columns(36);
  saved.read("w", rows, 0, {0, 4, 3, 12});
  EXPECT_TRUE(std::equal(rows.begin(), rows.end(), values.begin() + 40));
  saved.read("w", columns, 0, {1, 7, 3, 10});
  for (int i = 0; i < 36; ++i) {
    EXPECT_EQ(columns[at(i)], static_cast<float>(i / 3 * 10 + 7 + i % 3));
  }
}

// Larger than the memory that a read takes.
TEST_F(SlicesTest, SharesOfAParameterAreReadTogether) {
  constexpr std::int64_t kRows = 700, kColumns = 1000;
  static_assert(kRows * kColumns > 2 * SavedTensors::kPieceElements);
  std::vector<float>& values = values_.emplace_back(kRows * kColumns);
  std::iota(values.begin(), values.end(), 0.0F);
  std::vector<SaveTensor> tensors;
  add_parts({"w", {values.data(), {DType::kF32, {kRows, kColumns}}}},
            {{"w", {{"a", 300}, {"b", 400}}}}, DType::kF32, tensors);
  const SaveState state = save(tensors, "model.safetensors");
  SavedTensors saved(directory_.path(), state);
  const std::vector<Slice> slices = {
      {1, 0, 16, kColumns}, {1, 16, 0, kColumns}, {1, 16, 984, kColumns}, {0, 3, 2, kRows}};
  std::vector<std::vector<float>> read;
  std::vector<SavedTensors::Share> shares;
  for (const Slice& slice : slices) {
    const std::int64_t first = slice.axis == 0 ? 5 : std::min<std::int64_t>(slice.length, 7);
    const std::int64_t all = slice.length * (slice.axis == 0 ? kColumns : kRows);
    read.emplace_back(static_cast<std::size_t>(all - first));
    shares.push_back({.into = {}, .first = first, .slice = slice});
  }
  for (std::size_t i = 0; i < shares.size(); ++i) shares[i].into = read[i];
  saved.read("w", shares);
  for (const SavedTensors::Share& share : shares) {
    for (std::int64_t i = 0; i < std::ssize(share.into); ++i) {
      const std::int64_t n = share.first + i,
                         width = share.slice.axis == 0 ? kColumns : share.slice.length;
      const std::int64_t row = n / width + (share.slice.axis == 0 ? share.slice.begin : 0);
      const std::int64_t column = n % width + (share.slice.axis == 1 ? share.slice.begin : 0);
      ASSERT_EQ(share.into[static_cast<std::size_t>(i)],
                static_cast<float>(row * kColumns + column));
    }
  }
}

TEST_F(SlicesTest, OnlyTheTensorsThatAReadNeedsAreItsTensors) {
  const std::vector<Slice> slices = cut(1, {2, 6});
  const SaveState state = save(parts(slices, 20));
  const SavedTensors saved(directory_.path(), state);
  const auto names = [&](const Slice& slice, std::int64_t first, std::int64_t count) {
    std::vector<std::string> all;
    for (const SavedTensor& tensor : saved.tensors_of("m.w", first, count, slice)) {
      all.push_back(tensor.name);
    }
    return all;
  };
  EXPECT_THAT(names(slices[0], 19, 2), ElementsAre("m.w[:,0:2][0:20]", "m.w[:,0:2][20:40]"));
  EXPECT_THAT(names(slices[1], 60, 1), ElementsAre("m.w[:,2:6][60:80]"));
  EXPECT_THAT(names(cut(0, {4})[0], 35, 3), ElementsAre("m.w[:,0:2][0:20]"));
  EXPECT_THAT(names(cut(0, {1, 2})[1], 9, 2), ElementsAre("m.w[:,0:2][0:20]", "m.w[:,2:6][20:40]"));
  EXPECT_EQ(names(cut(2, {1})[0], 0, 24).size(), state.tensors.size());
  // Of a model with other shapes.
  EXPECT_THAT(names({1, 0, 2, 7}, 0, 40), ElementsAre());
  EXPECT_THAT(names({3, 0, 2, 5}, 0, 40), ElementsAre());
}

TEST_F(SlicesTest, SlicesThatDoNotHoldEachElementOnceAreNamed) {
  const std::string whole = "of 'm.w' f32 [4, 6, 5] are ";
  const auto slice = [](int axis, std::int64_t begin, std::int64_t end) {
    return Slice{axis, begin, end - begin, kDims[axis]};
  };
  expect_refused({part(slice(1, 0, 2)), part(slice(1, 4, 6))},
                 {"rows 2 to 3 along dimension 1 " + whole + "missing"});
  expect_refused({part(slice(2, 1, 5))}, {"rows 0 to 0 along dimension 2 " + whole + "missing"});
  expect_refused({part(slice(2, 0, 2)), part(slice(2, 2, 3))},
                 {"rows 3 to 4 along dimension 2 " + whole + "missing"});
  expect_refused({part(slice(1, 0, 3)), part(slice(1, 2, 6))},
                 {"rows 2 to 2 along dimension 1 " + whole + "there twice"});
  expect_refused({part(slice(0, 0, 3)), part(slice(0, 2, 4))},
                 {"elements 60 to 89 " + whole + "there twice"});
  expect_refused({part(slice(0, 0, 1)), part(slice(0, 2, 4))},
                 {"elements 30 to 59 " + whole + "missing"});
  const std::string rows = "of rows 2 to 5 along dimension 1 ";
  expect_refused({part(slice(1, 0, 2)), part(slice(1, 2, 6), 0, 30), part(slice(1, 2, 6), 31, 80)},
                 {"elements 30 to 30 " + rows + whole + "missing"});
  expect_refused({part(slice(1, 0, 2)), part(slice(1, 2, 6), 0, 30)},
                 {"elements 30 to 79 " + rows + whole + "missing"});
  expect_refused({part(slice(1, 0, 2)), part(slice(1, 2, 6), 0, 30), part(slice(1, 2, 6), 9, 80)},
                 {"elements 9 to 29 " + rows + whole + "there twice"});
}

TEST_F(SlicesTest, SlicesAlongSeveralDimensionsAreRefused) {
  const std::vector<std::string> said = {"'m.w[:,0:3][0:60]'", "'m.w[:,:,0:2][0:48]'",
                                         "divide 'm.w' f32 [4, 6, 5] in different ways",
                                         "legal are slices along one dimension"};
  expect_refused({part(cut(1, {3, 6})[0]), part(cut(2, {2, 5})[0])},
                 {said[0], said[1], said[2], said[3]});
  expect_refused({part({}, 0, 60), part(cut(1, {3, 6})[1])}, {"'m.w[0:60]'", said[2], said[3]});
}

TEST_F(SlicesTest, NamesOfSlicesDiffer) {
  std::set<std::string> names;
  for (const Slice& slice : {Slice{}, Slice{0, 0, 2, 4}, Slice{0, 2, 2, 4}, Slice{1, 0, 2, 6},
                             Slice{1, 0, 3, 6}, Slice{2, 0, 2, 5}}) {
    EXPECT_TRUE(names.insert(names_.of({"m.w", kShape, 0, slice}, 10)).second);
    EXPECT_TRUE(names.insert(names_.of({"m.w", kShape, 10, slice}, 10)).second);
  }
  const std::vector<std::string> wicked = {"w", "w[:,0:2]"};
  const RangeNames other(wicked, {});
  EXPECT_EQ(other.of({"m.w", kShape, 0, {1, 0, 2, 6}}, 10), "m.w[[:,0:2]][[0:10]]");
  EXPECT_EQ(other.of({"m.w[:,0:2]", kShape, 0}, 10), "m.w[:,0:2][[0:10]]");
}

// --- state.json ---

TEST_F(SlicesTest, StateJsonHoldsSlices) {
  SaveState state = save(parts(cut(1, {2, 6}), 30));
  state.save = state.run = checksum_hex({});
  const SaveState read = parse_save_state(to_json_text(state), "state.json");
  ASSERT_EQ(read.tensors.size(), state.tensors.size());
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    EXPECT_EQ(read.tensors[i].range, state.tensors[i].range);
  }
  EXPECT_EQ(read.tensors.back().range->slice, (Slice{1, 0, 2, 6}));
}

TEST_F(SlicesTest, SlicesThatAreNoneAreRefusedInStateJson) {
  SaveState state = save({part({1, 1, 2, 6}, 10, 30)});
  state.save = state.run = checksum_hex({});
  const Slice good = state.tensors[0].range->slice;
  const auto refused = [&](std::initializer_list<std::string> parts) {
    const std::string text = to_json_text(state);
    expect_error(ErrorCode::kWeights, parts, [&] { (void)parse_save_state(text, "state.json"); });
  };
  const std::string name = "tensor 'm.w[:,1:3][10:30]' ";
  const std::vector<std::pair<Slice, std::string>> bad = {
      {{3, 1, 2, 6}, "2 rows from row 1 of 6 on along dimension 3"},
      {{1, 1, 2, 7}, "2 rows from row 1 of 7 on along dimension 1"},
      {{1, 5, 2, 6}, "2 rows from row 5 of 6 on along dimension 1"},
      {{1, 7, 0, 6}, "0 rows from row 7 of 6 on along dimension 1"},
      {{1, 1, std::int64_t{1} << 62, 6}, "rows from row 1 of 6 on along dimension 1"}};
  for (const auto& [slice, said] : bad) {
    state.tensors[0].range->slice = slice;
    refused({name, said, ", which [4, 6, 5] has not"});
  }
  state.tensors[0].range->slice = {1, -1, 2, 6};
  refused({"'begin' is no whole number from 0"});
  state.tensors[0].range->slice = good;
  state.tensors[0].range->first = 21;  // of 40
  refused({name + "f32 [20] from element 21 on is no part of 'm.w' [4, 2, 5]"});
  state.tensors[0].range->first = 20;
  EXPECT_EQ(parse_save_state(to_json_text(state), "state.json").tensors.size(), 1U);
}

// --- snapshots ---

TEST(SnapshotTest, TheHolderHasTheWhole) {
  const std::vector<float> whole = whole_values();
  const std::vector<Slice> sixths = cut(1, {1, 2, 3, 4, 4, 6});
  for (const std::vector<std::vector<Slice>>& ranks : std::vector<std::vector<std::vector<Slice>>>{
           {{{0, 0, 1, 4}}, {{0, 1, 2, 4}}, {{0, 3, 1, 4}}},
           {{{1, 0, 0, 6}}, {{1, 0, 4, 6}}, {{1, 4, 2, 6}}},
           {{{2, 0, 2, 5}}, {{2, 2, 0, 5}}, {{2, 2, 3, 5}}},
           {{{1, 0, 6, 6}}, {{1, 6, 0, 6}}, {{1, 6, 0, 6}}},
           {{sixths[0], sixths[5]}, {sixths[4]}, {sixths[3], sixths[1], sixths[2]}}}) {
    std::vector<std::vector<PlacedPart>> parts;
    for (const std::vector<Slice>& slices : ranks) {
      std::int64_t first = 0;
      parts.emplace_back();
      for (const Slice& slice : slices) {
        const auto count = std::ssize(values_of(slice));
        parts.back().push_back({slice, 0, first, count});
        first += count;
      }
    }
    run_loopback(3, [&](Communicator& comm) {
      Collectives sharers(comm, 0, nullptr);
      ComputeContext compute(Device{}, 1);
      Snapshot snapshot(compute, sharers);
      std::vector<float> mine, same(4, 0.5F);
      for (const Slice& slice : ranks[at(comm.rank())]) {
        const std::vector<float> values = values_of(slice);
        mine.insert(mine.end(), values.begin(), values.end());
      }
      const auto taken = [&](int holder) {
        return TakenTensor{"w",
                           {mine.data(), {DType::kF32, {std::ssize(mine)}}},
                           {DType::kF32, kShape},
                           holder,
                           parts};
      };
      std::vector<TakenTensor> all = {taken(0), taken(2), taken(1), taken(2)};
      const TensorSpec spec{DType::kF32, {4}};
      if (comm.rank() == 1) all.insert(all.begin() + 1, {"same", {same.data(), spec}, spec, 1});
      for (int times = 0; times < 2; ++times) {
        snapshot.take(all);
        const std::vector<std::size_t> copies = {1, 2, 2};
        ASSERT_EQ(snapshot.tensors().size(), copies[at(comm.rank())]);
        for (const NamedTensor& copy : snapshot.tensors()) {
          const std::vector<float>& wanted = copy.name == "w" ? whole : same;
          EXPECT_TRUE(std::ranges::equal(copy.tensor.floats(), wanted)) << copy.name;
          EXPECT_EQ(copy.tensor.shape(), copy.name == "w" ? kShape : Shape{4});
        }
      }
    });
  }
}

// --- who saves what ---

// Two replicas of two tensor ranks, each with halves of "a", uneven parts of "b" that replicas
// divide, and all of "c" and of the buffer.
JobLayout sliced_layout() {
  JobLayout layout;
  layout.place.topology =
      make_topology(4, {.pipeline = 1, .replica = 2, .tensor = 2}, RankOrder::kPipelineFirst);
  layout.plans.train.placement = Placement::linear(1);
  for (int tensor = 0; tensor < 2; ++tensor) {
    const auto entry = [&](const char* name, const Slice& slice, std::int64_t of_row,
                           std::vector<std::int64_t> ends) {
      return ParameterEntry{.name = name,
                            .elements = slice.length * of_row,
                            .slice = slice,
                            .whole_elements = slice.whole * of_row,
                            .ends = std::move(ends)};
    };
    const bool first = tensor == 0;
    ParameterEntry all{.name = "c", .elements = 50, .whole_elements = 50};
    ParameterEntry buffer{.name = "buffer", .elements = 5, .whole_elements = 5};
    StageEntry stage;
    stage.parameters = {
        entry("a", {0, first ? 0 : 5, 5, 10}, 10, {}),
        entry("b", first ? Slice{1, 0, 6, 8} : Slice{1, 6, 2, 8}, 10,
              first ? std::vector<std::int64_t>{40, 60} : std::vector<std::int64_t>{20, 20}),
        all};
    stage.buffers = {buffer};
    ParameterTable table;
    table.stages = {stage};
    layout.tensor_parameters.push_back(table);
  }
  layout.parameters = layout.tensor_parameters[1];
  return layout;
}

TEST(SaveSharesTest, RanksThatShareAStageShareTheWriting) {
  const JobLayout layout = sliced_layout();
  const std::vector<SavedParameter> shares = share_saves(layout);
  std::vector<std::tuple<std::string, std::int64_t, int, int>> said;
  for (const SavedParameter& share : shares) {
    said.emplace_back(share.name, share.elements, share.replica, share.tensor);
  }
  EXPECT_THAT(said, ElementsAre(std::tuple("a", 100, 0, 1), std::tuple("b", 80, 1, 0),
                                std::tuple("c", 50, 1, 1), std::tuple("buffer", 5, 0, 0)));
  const auto states = [&](std::size_t share) {
    std::vector<std::int64_t> elements;
    for (const int replica : {0, 1}) {
      for (const int tensor : {0, 1}) {
        elements.push_back(shares[share].state_elements(replica, tensor));
      }
    }
    return elements;
  };
  EXPECT_THAT(states(0), ElementsAre(50, 50, 0, 0));
  EXPECT_THAT(states(1), ElementsAre(40, 20, 20, 0));
  EXPECT_THAT(states(2), ElementsAre(0, 0, 0, 50));
  // By replica: values of the buffer and states of "a" and "b", or values of "b" and a state of it.
  EXPECT_EQ(most_saved_bytes(shares, {.tensor = 0}, 2, 8), std::size_t{4 * 5 + 8 * (50 + 40 + 5)});
  // Values of "a" with states of "a" and "b", or values and state of "c".
  EXPECT_EQ(most_saved_bytes(shares, {.tensor = 1}, 2, 8), std::size_t{4 * 100 + 8 * (50 + 20)});
  EXPECT_EQ(most_saved_bytes(shares, {.pipeline = 1}, 2, 8), std::size_t{0});
}

TEST(SavePartsTest, TensorRanksHaveFilesOfTheirOwn) {
  const Topology topology =
      make_topology(4, {.pipeline = 1, .replica = 2, .tensor = 2}, RankOrder::kPipelineFirst);
  const SaveParts parts = save_parts({1, 2, 0, 1}, topology);
  EXPECT_THAT(parts.part_of_rank, ElementsAre(0, 1, -1, 2));
  EXPECT_EQ(parts.count, 3);
}

}  // namespace
}  // namespace sluice::testing
