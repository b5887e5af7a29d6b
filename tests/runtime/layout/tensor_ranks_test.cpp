// Ranks that share stages: what their stages must say alike, which slices make up a whole, and the
// layout of a job that has such ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/planning/same_stages.hpp"
#include "runtime/report/layout_report.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice::testing {
namespace {

// Has the parameters of `add`, and one output of `width` columns.
struct Parts {
  std::function<void(ParameterSet&, const StagePlace&)> add = {};
  std::function<std::int64_t(const StagePlace&)> width = {};
  StageDescription described = {};
  std::function<StageCollectives(const StagePlace&)> collectives = {};
  std::function<std::vector<bool>(const StagePlace&)> input_gradients = {};
};

class PartStage : public Stage, public LossStage {
 public:
  PartStage(const Parts& parts, const StagePlace& place) : parts_(parts), place_(place) {
    if (parts.add) parts.add(set_, place);
  }
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    StageDescription description = parts_.described;
    description.outputs = {inputs[0]};
    if (parts_.width)
      description.outputs[0].shape = Shape{inputs[0].shape[0], parts_.width(place_)};
    if (parts_.collectives) description.collectives = parts_.collectives(place_);
    if (parts_.input_gradients) description.input_gradients = parts_.input_gradients(place_);
    description.workspace_bytes = at(1024 * (place_.tensor + 1));
    return description;
  }
  ParameterSet* parameters() override { return &set_; }
  [[nodiscard]] const StagePlace& place() const { return place_; }
  void forward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {}
  void backward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {}
  void loss(StageContext&, std::span<const Tensor>, std::span<const Tensor>, double*) override {}
  double target_weight(std::span<const Tensor>) const override { return 1; }

 private:
  Parts parts_;
  StagePlace place_;
  ParameterSet set_;
};

StageFactory factory_of(const Parts& parts) {
  return [parts](const StagePlace& place) -> std::unique_ptr<Stage> {
    return std::make_unique<PartStage>(parts, place);
  };
}

PipelineOptions options_of(int pipeline, int replicas, int tensor) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .replicas = replicas, .tensor = tensor};
  options.training.optimizer = OptimizerConfig::adamw();
  return options;
}

std::unique_ptr<DataSource> source_of(std::int64_t batch_size) {
  return make_array_source(std::vector<float>(8, 1), 1, std::vector<float>(8, 1), 1, batch_size);
}

// By as many ranks as the shape has, or by one for all of them. The layout of the last rank.
JobLayout layout_of(const PipelineOptions& options, const StageFactory& make, bool planned) {
  const PipelineOptions::Shape& shape = options.shape;
  const int ranks = shape.pipeline * shape.replicas * shape.tensor;
  const auto source = source_of(shape.replicas);
  JobLayout layout;
  run_loopback(planned ? 1 : ranks, [&](Communicator& comm) {
    JobLayout mine = PipelineAccess::plan_layout(comm, options, make, *source);
    if (comm.rank() + 1 == comm.size()) layout = std::move(mine);
  });
  return layout;
}

// All ranks of two pipelines of two ranks that share each stage are told.
void expect_refused(const Parts& parts, ErrorCode code, std::initializer_list<std::string> words) {
  const auto source = source_of(1);
  run_loopback(4, [&](Communicator& comm) {
    expect_error(code, words, [&] {
      (void)PipelineAccess::plan_layout(comm, options_of(2, 1, 2), factory_of(parts), *source);
    });
  });
}

// Stage 1 alone has parameters: [6, 4] cut at these rows, by tensor coordinate.
Parts cut_into(std::pair<std::int64_t, std::int64_t> first,
               std::pair<std::int64_t, std::int64_t> second) {
  return {.add = [=](ParameterSet& set, const StagePlace& place) {
    if (place.stage == 0) return;
    const auto& [begin, end] = place.tensor == 0 ? first : second;
    set.add("w", Shape{6, 4}, Init::constant(0), true, false,
            {.axis = 0, .begin = begin, .length = end - begin, .whole = 6});
  }};
}

TEST(TensorRanksTest, SlicesThatAreNotTheWholeAreRefused) {
  const std::string legal = "each of the 6 rows on one tensor rank, in their order";
  expect_refused(cut_into({0, 2}, {4, 6}), ErrorCode::kUsage,
                 {"parameter 'w' of stage 1, [6, 4]", "rows 2 to 3 of dimension 0 are missing",
                  "tensor rank 0 has 0 to 1, tensor rank 1 has 4 to 5", legal});
  expect_refused(cut_into({0, 4}, {3, 6}), ErrorCode::kUsage,
                 {"stage 1", "rows 3 to 3 of dimension 0 are there twice", legal});
  expect_refused(cut_into({0, 3}, {3, 5}), ErrorCode::kUsage,
                 {"rows 5 to 5 of dimension 0", legal});
  expect_refused(cut_into({3, 6}, {0, 3}), ErrorCode::kUsage,
                 {"rows 0 to 2 of dimension 0", legal});
  expect_refused(cut_into({0, 6}, {0, 6}), ErrorCode::kUsage,
                 {"rows 0 to 5 of dimension 0 are there twice", legal});
  // All on one rank: it does not matter where the other's none begins.
  for (const std::int64_t none : {0, 6}) {
    EXPECT_EQ(layout_of(options_of(2, 1, 2), factory_of(cut_into({0, 6}, {none, none})), false)
                  .parameters.stages[1]
                  .parameters[0]
                  .elements,
              0);
  }
  EXPECT_THROW((void)StagePlace{.tensors = 2}.slice(-1, 6), Error);
}

TEST(TensorRanksTest, PartsOfShardsAreTheWholeInAnyOrder) {
  using Rows = std::vector<std::pair<std::int64_t, std::int64_t>>;
  const auto parts = [](const Rows& first, const Rows& second) {
    return Parts{.add = [=](ParameterSet& set, const StagePlace& place) {
      std::vector<SlicePart> mine;
      for (const auto& [begin, end] : place.tensor == 0 ? first : second) {
        mine.push_back({{.axis = 0, .begin = begin, .length = end - begin, .whole = 6},
                        2 * place.tensor + static_cast<int>(mine.size())});
      }
      const std::string name = "w" + std::to_string(place.stage);
      if (mine.size() > 1) {
        set.add_parts(name, Shape{6, 4}, Init::constant(0), true, false, mine);
      } else {
        set.add(name, Shape{6, 4}, Init::constant(0), true, false, mine.front().slice);
      }
    }};
  };
  const auto legal = [&](const Rows& first, const Rows& second) {
    for (const bool planned : {false, true}) {
      const JobLayout layout =
          layout_of(options_of(2, 1, 2), factory_of(parts(first, second)), planned);
      const ParameterEntry& entry = layout.parameters_at(0).stages[1].parameters[0];
      EXPECT_EQ(entry.parts.size(), first.size() > 1 ? first.size() : 0);
      EXPECT_EQ(entry.placed().back().end(), entry.elements);
    }
  };
  legal({{0, 1}, {3, 5}}, {{1, 3}, {5, 6}});
  legal({{4, 6}, {0, 3}}, {{3, 4}, {6, 6}});
  legal({{4, 6}, {0, 3}}, {{3, 4}});
  legal({{0, 0}}, {{3, 6}, {0, 3}});
  const auto refused = [&](const Rows& first, const Rows& second, const std::string& said) {
    expect_refused(parts(first, second), ErrorCode::kUsage,
                   {"parameter 'w0' of stage 0, [6, 4]", said + " in the parts of shards",
                    "legal: each of the 6 rows in one part of one tensor rank"});
  };
  refused({{0, 1}, {3, 5}}, {{2, 3}, {5, 6}}, "rows 1 to 1 of dimension 0 are missing");
  refused({{0, 1}, {3, 5}}, {{1, 3}}, "rows 5 to 5 of dimension 0 are missing");
  refused({{0, 2}, {3, 5}}, {{1, 3}, {5, 6}}, "rows 1 to 1 of dimension 0 are there twice");
}

TEST(TensorRanksTest, SharesAreTheSameOnAllRanks) {
  const auto with = [](int first, int second, bool sliced) {
    return Parts{.add = [=](ParameterSet& set, const StagePlace& place) {
      set.add("w" + std::to_string(place.stage), Shape{6}, Init::constant(0), true, false,
              sliced ? place.slice(0, 6) : Slice{})
          .shares = place.tensor == 0 ? first : second;
    }};
  };
  EXPECT_TRUE(layout_of(options_of(2, 1, 2), factory_of(with(2, 2, false)), false)
                  .parameters.stages[1]
                  .has_shares());
  expect_refused(with(1, 0, false), ErrorCode::kMismatch,
                 {"initially constant 0, gradient in 1 shares, unit 0", "constant 0, unit 0"});
  expect_refused(
      with(3, 3, false), ErrorCode::kUsage,
      {"'w0' of stage 0 has 3 shares of its gradient on each of 2 ranks", "legal: a power of two"});
  expect_refused(with(2, 2, true), ErrorCode::kUsage,
                 {"2 shares of the gradient of 'w0', of which a rank has a part"});
}

// Hands its inputs on; its loss has no gradient.
class IdleStage : public PartStage {
 public:
  using PartStage::PartStage;
  void forward(StageContext&, std::span<const Tensor> in, std::span<const Tensor> out) override {
    std::copy(in[0].floats().begin(), in[0].floats().end(), out[0].floats().begin());
  }
  void loss(StageContext&, std::span<const Tensor> outputs, std::span<const Tensor>,
            double* sum) override {
    *sum = 1;
    for (float& each : outputs[0].floats()) each = 0;
  }
};

TEST(TensorRanksTest, ARankMayHaveNoElementOfAnyParameter) {
  const Parts parts = {.add = [](ParameterSet& set, const StagePlace& place) {
    set.add("w", {3}, Init::constant(1), true, false, place.slice(0, 3));
  }};
  const auto source = source_of(2);
  for (const OptimizerConfig& optimizer : {OptimizerConfig::adamw(), OptimizerConfig::sgd()}) {
    for (const ShardLevel shard : {ShardLevel::kNone, ShardLevel::kOptimizer}) {
      run_loopback(8, [&](Communicator& comm) {
        PipelineOptions options = options_of(1, 2, 4);
        options.training.optimizer = optimizer;
        options.shape.shard = shard;
        const StageFactory make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
          return std::make_unique<IdleStage>(parts, place);
        };
        Pipeline pipeline(comm, make, *source, options);
        EXPECT_EQ(pipeline.train_step().grad_norm, 0);
        EXPECT_EQ(pipeline.state().at("w").bytes.size(), 3 * sizeof(float));
      });
    }
  }
}

TEST(TensorRanksTest, AnOptimizerOfWholeParametersIsRefusedForSlices) {
  PipelineOptions options = options_of(1, 1, 2);
  const auto source = source_of(1);
  options.training.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
    return std::unique_ptr<Optimizer>();
  };
  run_loopback(2, [&](Communicator& comm) {
    expect_error(ErrorCode::kUsage, {"a part of 'w' of stage 0", "ParameterSlice"}, [&] {
      const Parts parts = {.add = [](ParameterSet& set, const StagePlace& place) {
        set.add("w", {3}, Init::constant(1), true, false, place.slice(0, 3));
      }};
      (void)PipelineAccess::plan_layout(comm, options, factory_of(parts), *source);
    });
  });
}

TEST(TensorRanksTest, ASliceWithoutTheOthersIsRefused) {
  const Parts parts = {.add = [](ParameterSet& set, const StagePlace&) {
    set.add_buffer("b", Shape{6}, Init::constant(0), ReplicaRule::kMean,
                   {.axis = 0, .begin = 0, .length = 3, .whole = 6});
  }};
  const auto source = source_of(1);
  run_loopback(1, [&](Communicator& comm) {
    expect_error(ErrorCode::kUsage, {"buffer 'b' of stage 0", "rows 3 to 5", "are missing"}, [&] {
      (void)PipelineAccess::plan_layout(comm, options_of(1, 1, 1), factory_of(parts), *source);
    });
  });
}

TEST(TensorRanksTest, StagesThatWantOtherGradientsOfTheirInputsAreRefused) {
  expect_refused({.input_gradients =
                      [](const StagePlace& place) {
                        return std::vector<bool>{place.stage == 0 || place.tensor == 0};
                      }},
                 ErrorCode::kMismatch,
                 {"tensor rank 0 has 'gradients that stage 1 wants of its inputs: true', tensor "
                  "rank 1 has '"});
}

TEST(TensorRanksTest, StagesThatDifferInMoreThanSlicesAreRefused) {
  using Add = std::function<void(ParameterSet&, const StagePlace&)>;
  const auto refuse = [](const Add& add, const std::string& one, const std::string& two) {
    expect_refused({.add = add}, ErrorCode::kMismatch,
                   {"tensor ranks disagree about the model: tensor rank 0 has '" + one,
                    "tensor rank 1 has '" + two});
  };
  const auto first = [](const StagePlace& place) { return place.tensor == 0; };
  const auto name = [](const StagePlace& place) { return std::to_string(place.stage); };
  refuse(
      [&](auto& set, auto& place) {
        set.add(first(place) ? "a" + name(place) : "b" + name(place), Shape{2}, Init::constant(0));
      },
      "parameter 0 of stage 0: a0, [2]", "parameter 0 of stage 0: b0, [2]");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{first(place) ? 2 : 3}, Init::constant(0));
      },
      "parameter 0 of stage 0: a0, [2]", "parameter 0 of stage 0: a0, [3]");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{2}, Init::constant(first(place) ? 0 : 1));
      },
      "parameter 0 of stage 0: a0, [2], initially constant 0", "parameter 0 of stage 0: a0, [2]");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{2, 2}, Init::constant(0), true, false,
                place.slice(first(place) ? 0 : 1, 2));
      },
      "parameter 0 of stage 0: a0, [2, 2], initially constant 0, cut along dimension 0",
      "parameter 0 of stage 0: a0, [2, 2], initially constant 0, cut along dimension 1");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{2}, Init::constant(0), true, false,
                first(place) ? place.slice(0, 2) : Slice{});
      },
      "parameter 0 of stage 0: a0, [2], initially constant 0, cut along dimension 0, unit 0",
      "parameter 0 of stage 0: a0, [2], initially constant 0, unit 0");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{2}, Init::constant(0), true, first(place));
      },
      "parameter 0 of stage 0: a0, [2], initially constant 0, tied",
      "parameter 0 of stage 0: a0, [2], initially constant 0, unit");
  refuse(
      [&](auto& set, auto& place) {
        set.add("a" + name(place), Shape{2}, Init::constant(0));
        if (first(place)) set.begin_unit();
        set.add("b" + name(place), Shape{2}, Init::constant(0));
      },
      "parameter 1 of stage 0: b0, [2], initially constant 0, unit 1",
      "parameter 1 of stage 0: b0, [2], initially constant 0, unit 0");
  refuse(
      [&](auto& set, auto& place) {
        if (first(place)) set.add_buffer("a" + name(place), Shape{2}, Init::constant(0));
      },
      "buffer 0 of stage 0: a0, [2]", "stage 0 of 0 buffers");
}

TEST(TensorRanksTest, OutputsAndCollectivesAreTheSameOnAll) {
  expect_refused(
      {.width =
           [](const StagePlace& place) { return place.stage == 1 && place.tensor == 1 ? 3 : 1; }},
      ErrorCode::kMismatch,
      {"tensor rank 0 has 'outputs of the last stage for a micro-batch of 1 samples", "[1, 1]",
       "[1, 3]"});
  Parts parts;
  std::vector<PlannedCollective>& forward = parts.described.collectives.forward;
  forward = {{.bytes = 6}};
  expect_refused(parts, ErrorCode::kUsage,
                 {"stage 0 describes a collective of its forward that cannot be: a sum of 6 bytes "
                  "of f32 over the tensor ranks, 2 in number; legal: a multiple of 4 bytes"});
  for (const CollectiveKind kind : {CollectiveKind::kReduceScatter, CollectiveKind::kAllToAll}) {
    forward = {{.kind = kind, .bytes = 12}};
    expect_refused(parts, ErrorCode::kUsage, {"2 in number; legal: a multiple of 8 bytes"});
    forward[0].axis = CollectiveAxis::kReplica;  // one rank alone
    forward.push_back({.bytes = 5});
    expect_refused(parts, ErrorCode::kUsage, {"a sum of 5 bytes"});
  }
  forward = {{.bytes = 4, .type = DType::kI32}};
  expect_refused(parts, ErrorCode::kUsage, {"legal are sums of f32 and of f64"});
  forward.clear();
  parts.described.collectives.loss = {{.bytes = 4}};
  expect_refused(parts, ErrorCode::kUsage,
                 {"stage 0 describes collectives.loss; legal: of the last stage alone"});
  const auto with = [](CollectiveAxis axis, bool other_kind) {
    return Parts{.collectives = [=](const StagePlace& place) {
      const bool second = place.stage == 1 && place.tensor == 1;
      const PlannedCollective sum{.axis = axis, .bytes = second ? 16U : 24U};
      PlannedCollective last = sum;
      if (second && other_kind) last.kind = CollectiveKind::kAllGather;
      StageCollectives made{.backward_input = {last}};
      if (place.stage == 1) made.loss = {sum};
      return made;
    }};
  };
  expect_refused(with(CollectiveAxis::kTensor, false), ErrorCode::kMismatch,
                 {"tensor rank 0 has 'sum of 24 bytes of f32 over the tensor ranks in the loss of "
                  "stage 1'",
                  "has 'sum of 16 bytes of f32"});
  expect_refused(
      with(CollectiveAxis::kReplica, true), ErrorCode::kMismatch,
      {"tensor rank 0 has 'sum of f32 over the replicas in the input gradient of stage 1'",
       "has 'all-gather of f32 over the replicas"});
  // Each group of replicas has its own parts.
  (void)layout_of(options_of(2, 1, 2), factory_of(with(CollectiveAxis::kReplica, false)), false);
  // Between stages each pipeline has its own.
  EXPECT_EQ(layout_of(options_of(2, 1, 2),
                      factory_of({.width =
                                      [](const StagePlace& place) {
                                        return place.stage == 0 ? place.tensor + 5 : 1;
                                      }}),
                      false)
                .wires.edges.inputs({.samples = 1}, 1)[0]
                .spec.shape,
            (Shape{1, 6}));
}

TEST(TensorRanksTest, ReplicasHaveTheSameSlices) {
  const auto source = source_of(2);
  const Parts own = {.add = [](ParameterSet& set, const StagePlace& place) {
    set.add("w", Shape{6}, Init::constant(0), true, false, place.slice(0, 6));
  }};
  const Parts other = {.add = [](ParameterSet& set, const StagePlace& place) {
    const int first = place.tensor == 0 ? 2 : 4;
    set.add("w", Shape{6}, Init::constant(0), true, false,
            {.axis = 0, .begin = place.tensor == 0 ? 0 : 2, .length = first, .whole = 6});
  }};
  run_loopback(4, [&](Communicator& comm) {
    expect_error(ErrorCode::kMismatch,
                 {"replicas disagree about the model", "3 elements cut to 3 of 6 rows"}, [&] {
                   (void)PipelineAccess::plan_layout(comm, options_of(1, 2, 2),
                                                     factory_of(comm.rank() < 2 ? own : other),
                                                     *source);
                 });
  });
}

TEST(TensorRanksTest, AFactoryThatTakesNoPlaceIsRefusedOnAllRanks) {
  const auto source = source_of(1);
  std::atomic<int> made = 0;
  const StageFactory by_numbers = [&](int, int) -> std::unique_ptr<Stage> {
    ++made;
    return std::make_unique<PartStage>(Parts{}, StagePlace{});
  };
  run_loopback(2, [&](Communicator& comm) {
    const auto refused = [&](const PipelineOptions& options, const char* text) {
      expect_error(ErrorCode::kUsage, {text, "legal: 1, or a factory of a StagePlace"},
                   [&] { (void)PipelineAccess::plan_layout(comm, options, by_numbers, *source); });
    };
    PipelineOptions options = options_of(1, 1, 2);
    refused(options, "options.shape.tensor is 2");
    options = options_of(2, 1, 1);
    options.shape.tensor_shards = 4;
    refused(options, "options.shape.tensor_shards is 4");
  });
  EXPECT_EQ(made, 0);
}

TEST(TensorRanksTest, AFactoryIsToldTheShards) {
  const auto source = source_of(1);
  for (const auto& [shards, expected] : {std::pair(0, 2), {2, 2}, {8, 8}}) {
    PipelineOptions options = options_of(1, 1, 2);
    options.shape.tensor_shards = shards;
    run_loopback(2, [&](Communicator& comm) {
      StagePlace told;
      const StageFactory make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
        told = place;
        return std::make_unique<PartStage>(Parts{}, place);
      };
      const JobLayout layout = PipelineAccess::plan_layout(comm, options, make, *source);
      EXPECT_EQ(layout.place.shards, expected);
      EXPECT_EQ(told.shards_here(), (Shards{expected, comm.rank() * expected / 2, expected / 2}));
    });
  }
}

TEST(TensorRanksTest, ShardsThatTheRanksCannotDivideAreRefused) {
  const auto source = source_of(1);
  PipelineOptions options = options_of(1, 1, 2);
  options.shape.tensor_shards = 6;
  std::atomic<int> made = 0;
  const StageFactory make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
    ++made;
    return std::make_unique<PartStage>(Parts{}, place);
  };
  run_loopback(2, [&](Communicator& comm) {
    expect_error(ErrorCode::kUsage, {"6 tensor shards with 2 tensor ranks; legal", "here 4 or 8"},
                 [&] { (void)PipelineAccess::plan_layout(comm, options, make, *source); });
  });
  EXPECT_EQ(made, 0);
}

// A tied "t" and a "w" of 5 rows on each stage: tensor rank 0 has three of them.
Parts sliced() {
  return {.add = [](ParameterSet& set, const StagePlace& place) {
    set.add("t", Shape{3}, Init::constant(0), true, true);
    set.add("w" + std::to_string(place.stage), Shape{2, 5 * (std::int64_t{1} << 18)},
            Init::constant(0), true, false, place.slice(1, 5 * (std::int64_t{1} << 18)));
    set.add_buffer("b" + std::to_string(place.stage), Shape{7}, Init::constant(0));
  }};
}

TEST(TensorRanksTest, EveryRankKnowsAllParts) {
  PipelineOptions options = options_of(2, 2, 3);
  options.shape.shard = ShardLevel::kOptimizer;
  for (const bool planned : {false, true}) {
    const JobLayout layout = layout_of(options, factory_of(sliced()), planned);
    ASSERT_EQ(layout.tensor_parameters.size(), 3U);
    std::int64_t rows = 0;
    for (int tensor = 0; tensor < 3; ++tensor) {
      const ParameterTable& table = layout.parameters_at(tensor);
      ASSERT_EQ(table.tied.size(), 1U);
      EXPECT_EQ(table.tied[0].uses.size(), 2U);
      EXPECT_EQ(table.tied[0].routes.size(), 2U);
      const ParameterEntry& entry = table.stages[1].parameters[1];
      EXPECT_EQ(entry.slice.begin, rows);
      rows += entry.slice.length;
      EXPECT_EQ(entry.elements, 2 * entry.slice.length);
      EXPECT_EQ(entry.whole_elements, 10 << 18);
      ASSERT_EQ(entry.ends.size(), 2U);
      EXPECT_EQ(entry.ends.back(), entry.elements);
    }
    EXPECT_EQ(rows, 5 << 18);
    const int mine = planned ? 0 : 2;
    EXPECT_EQ(layout.place.here.tensor, mine);
    EXPECT_EQ(layout.parameters.stages[0].parameters[1].slice,
              layout.parameters_at(mine).stages[0].parameters[1].slice);
  }
}

TEST(TensorRanksTest, MemoryIsPlannedPerPlaceByOneProcessToo) {
  PipelineOptions options = options_of(2, 2, 3);
  options.expert.save_copy = true;
  const JobLayout started = layout_of(options, factory_of(sliced()), false);
  const JobLayout planned = layout_of(options, factory_of(sliced()), true);
  ASSERT_EQ(started.memory.ranks.size(), 6U);
  ASSERT_EQ(planned.memory.ranks.size(), 6U);
  constexpr std::int64_t kWhole = 10 << 18;
  std::int64_t rows = 0;
  for (Place place; place.pipeline < 2; ++place.pipeline) {
    for (place.tensor = 0; place.tensor < 3; ++place.tensor) {
      const RankMemory& memory = started.memory.of(place);
      EXPECT_EQ(to_string(memory), to_string(planned.memory.of(place)));
      EXPECT_EQ(memory.workspace, at(1024 * (place.tensor + 1)));
      const std::int64_t elements =
          started.parameters_at(place.tensor).stages[at(place.pipeline)].parameters[1].elements;
      EXPECT_EQ(memory.gradients, parameter_bytes(elements) + parameter_bytes(3));
      rows += elements;
      EXPECT_EQ(memory.save_copy, memory.disk);
      EXPECT_GT(memory.collectives, 0U);
      EXPECT_GT(memory.disk, 0U);
    }
  }
  EXPECT_EQ(rows, 2 * kWhole);
  // Values, two states of AdamW's, and the buffers, which have none.
  EXPECT_EQ(started.memory.save_bytes, 12U * (2 * kWhole + 3) + 4U * (2 * 7));
  EXPECT_EQ(planned.memory.save_bytes, started.memory.save_bytes);
}

// Of a training step that leaves "w" of stage 1 other on tensor rank 1 than on 0.
TEST(TensorRanksTest, TheComparisonOfReplicasFindsWholeParametersThatDiffer) {
  class Own : public PartStage {
   public:
    using PartStage::PartStage;
    void forward(StageContext&, std::span<const Tensor> x, std::span<const Tensor> y) override {
      y[0].at(0) = x[0].at(0);
    }
    void backward(StageContext&, std::span<const Tensor> dy, std::span<const Tensor> dx) override {
      if (!dx.empty()) dx[0].at(0) = dy[0].at(0);
      for (Parameter* each : parameters()->all()) {
        const bool other = each->name == "w1" && place().tensor == 1;
        for (std::int64_t i = 0; i < each->shape.elements(); ++i) each->grad.at(i) += other ? 2 : 1;
      }
    }
    void loss(StageContext&, std::span<const Tensor> y, std::span<const Tensor>,
              double* sum) override {
      *sum = 1;
      y[0].at(0) = 2;
    }
  };
  const auto source = source_of(1);
  PipelineOptions options = options_of(2, 1, 2);
  for (const bool whole : {false, true}) {
    const Parts parts = {.add = [&](ParameterSet& set, const StagePlace& place) {
      set.add("w" + std::to_string(place.stage), Shape{6}, Init::constant(0), true, false,
              whole ? Slice{} : place.slice(0, 6));
    }};
    const StageFactory make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
      return std::make_unique<Own>(parts, place);
    };
    options.training.optimizer = OptimizerConfig::sgd();
    options.training.learning_rate = {.peak = 1};
    options.checks.replicas_every = 1;
    run_loopback(4, [&](Communicator& comm) {
      Pipeline pipeline(comm, make, *source, options);
      if (!whole) return (void)pipeline.train_step();
      expect_error(ErrorCode::kMismatch,
                   {"after step 1 parameter 'w1' of stage 1 differs between tensor rank 0 and "
                    "tensor rank 1"},
                   [&] { (void)pipeline.train_step(); });
    });
  }
}

TEST(TensorRanksTest, TheReportHasARowPerPlaceAndNoWordOfTensorRanksWithoutThem) {
  using ::testing::HasSubstr;
  using ::testing::Not;
  PipelineOptions options = options_of(2, 2, 3);
  options.expert.save_copy = true;
  const Partition partition{{0, 1, 2}};
  const std::string shared =
      describe_layout(layout_of(options, factory_of(sliced()), true), partition);
  EXPECT_THAT(shared, HasSubstr("12 ranks: pipeline of 2 x 2 replicas x 3 tensor ranks, schedule"));
  EXPECT_THAT(shared, HasSubstr("\n  0, tensor 0   0 "));
  EXPECT_THAT(shared, HasSubstr("\n  1, tensor 2   1 "));
  EXPECT_THAT(shared,
              HasSubstr("; a save of f32 values and optimizer state takes 60.0 MiB on disk\n"));
  options.shape.tensor = 1;
  const std::string whole =
      describe_layout(layout_of(options, factory_of(sliced()), true), partition);
  EXPECT_THAT(whole, HasSubstr("4 ranks: pipeline of 2 x 2 replicas, schedule"));
  EXPECT_THAT(whole, HasSubstr("\n  0             0 "));
  EXPECT_THAT(whole, Not(HasSubstr("tensor")));
  options.shape.tensor_shards = 6;
  EXPECT_THAT(describe_layout(layout_of(options, factory_of(sliced()), true), partition),
              HasSubstr("pipeline of 2 x 2 replicas x 1 tensor rank of 6 shards, schedule"));
}

TEST(TensorRanksTest, TheReportWarnsOfTensorRanksOnSeveralHosts) {
  using ::testing::HasSubstr;
  using ::testing::Not;
  const Partition partition{{0, 1, 2}};
  JobLayout layout = layout_of(options_of(2, 2, 3), factory_of(sliced()), true);
  layout.parameters.stages[1].collectives = {
      .forward = {{.bytes = 1 << 20}, {.axis = CollectiveAxis::kReplica, .bytes = 1 << 20}},
      .backward_input = {{.bytes = 1 << 19}}};
  EXPECT_THAT(describe_layout(layout, partition), Not(HasSubstr("hosts")));
  layout.place.hosts[5] = 1;
  EXPECT_THAT(describe_layout(layout, partition),
              HasSubstr("\n  warning: the tensor ranks of pipeline rank 1, replica 0 (ranks 3,4,5 "
                        "of the job) are on 2 hosts: each micro-batch makes 2 calls of 1.50 MiB in "
                        "all over the link between them, and the layers wait for each. Fewer"));
  layout.place.hosts[10] = 2;
  EXPECT_THAT(describe_layout(layout, partition), HasSubstr("; 1 other group is spread as well. "));
}

}  // namespace
}  // namespace sluice::testing
