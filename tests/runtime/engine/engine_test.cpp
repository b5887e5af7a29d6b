#include "runtime/engine/engine.hpp"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "comm/group/control.hpp"
#include "runtime/engine/state_store.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/pipeline/plan_cache.hpp"
#include "runtime/planning/transport_plan.hpp"
#include "tests/allocation_counter.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/stages/prepared.hpp"

namespace sluice::testing {
namespace {

using ::testing::HasSubstr;

Plan plan_of(const std::string& name, int ranks, int micro_batches,
             std::string_view transport = "loopback") {
  return plan_for(generate(name, {ranks, micro_batches, 1}), {.reduce_grad = false, .tied = {}},
                  needs_of(transport));
}

// The edges of ArithmeticStages: f32 [samples, 1] throughout.
EdgeTable unit_edges(int stages) {
  std::vector<std::vector<EdgeTensor>> edges(static_cast<std::size_t>(stages) + 1,
                                             {{{DType::kF32, Shape{1, 1}}, true}});
  return EdgeTable({{.samples = 1}}, {edges});
}

// One rank's engine over `plan`, with everything it needs.
class Rig {
 public:
  Rig(const Plan& plan, Communicator& comm, Interrupt& interrupt,
      RouteKind route = RouteKind::kHost)
      : Rig(plan, comm, interrupt, route, std::make_unique<ArithmeticStage>(comm.rank()),
            unit_edges(comm.size())) {}
  Rig(const Plan& plan, Communicator& comm, Interrupt& interrupt, RouteKind route,
      std::unique_ptr<ArithmeticStage> stage, EdgeTable edges)
      : stage_(std::move(stage)),
        edges_(std::move(edges)),
        compute_(Device{}, 1),
        routes_(static_cast<std::size_t>(comm.size()), EdgeRoute{route, ""}),
        source_(counting_source(plan.micro_batches)) {
    StageSetup setup{.compute = &compute_, .slots = plan.micro_batches};
    prepare(*stage_, setup);
    for (int m = 0; m < plan.micro_batches; ++m) ranges_.push_back({m, 1});
    const bool last = comm.rank() + 1 == comm.size();
    loader_ =
        std::make_unique<BatchLoader>(*source_, Phase::kTrain, ranges_, comm.rank() == 0, last);
    config_.rank = comm.rank();
    config_.edges = &edges_;
    config_.stages = {{comm.rank(), stage_.get(), stage_.get(), last ? stage_.get() : nullptr}};
    config_.compute = &compute_;
    config_.communicator = &comm;
    config_.interrupt = &interrupt;
    config_.routes = routes_;
    engine_ = engine_of(plan);
  }
  // From now on `tensor` sums over the ranks that share the stage.
  void sum_with(Collective& tensor) {
    config_.tensor = &tensor;
    engine_ = engine_of(*config_.plan);
  }
  // From now on what the plan moves goes to this store.
  void move_to(StateStore& store) {
    config_.store = &store;
    engine_ = engine_of(*config_.plan);
  }
  // An engine that works with the same things.
  std::unique_ptr<Engine> engine_of(const Plan& plan) {
    config_.plan = &plan;
    return std::make_unique<Engine>(config_);
  }
  const StepOutcome& run(std::uint64_t step, StepActions* actions = nullptr) {
    const BatchLoader::Batch& batch = loader_->load(step);
    request_ = {.phase = Phase::kTrain, .step = step, .micro_batches = ranges_, .batch = &batch};
    const std::size_t before = allocations_of_this_thread();
    const StepOutcome& outcome = engine_->run(request_, actions);
    allocations_ = allocations_of_this_thread() - before;
    return outcome;
  }
  // By the last run, on this rank's thread.
  std::size_t allocations() const { return allocations_; }
  float gradient() { return stage_->parameters()->all()[0]->grad.at(0); }

 private:
  std::unique_ptr<ArithmeticStage> stage_;
  EdgeTable edges_;
  ComputeContext compute_;
  std::vector<EdgeRoute> routes_;
  std::unique_ptr<DataSource> source_;
  std::vector<SampleRange> ranges_;
  std::unique_ptr<BatchLoader> loader_;
  EngineConfig config_;
  std::unique_ptr<Engine> engine_;
  StepRequest request_;
  std::size_t allocations_ = 0;
};

TEST(EngineTest, ComputesEveryMicroBatchOnceForward) {
  const Plan plan = plan_of("1f1b", 2, 4);
  run_loopback(2, [&](Communicator& comm) {
    ControlChannel control(comm);
    Rig rig(plan, comm, control);
    const StepOutcome& outcome = rig.run(1);
    // Stage 0 multiplies by 1, stage 1 by 2; samples are 1, 2, 3, 4.
    if (comm.rank() == 1) {
      double sum = 0;
      for (const LossResult& loss : outcome.losses) sum += loss.sum;
      EXPECT_EQ(sum, 2 * (1 + 2 + 3 + 4));
      EXPECT_EQ(rig.gradient(), 1 + 2 + 3 + 4);
    } else {
      EXPECT_EQ(rig.gradient(), 2 * (1 + 2 + 3 + 4));
    }
    EXPECT_EQ(outcome.peak_in_flight, 2 - comm.rank());
  });
}

TEST(EngineTest, TakesPayloadsWhereTheyLieOverDirectLinks) {
  const Plan plan = plan_of("1f1b", 3, 5);
  run_loopback(3, [&](Communicator& comm) {  // which moves host memory: the CPU is the device
    ControlChannel control(comm);
    Rig rig(plan, comm, control, RouteKind::kDirect);
    for (int times = 1; times <= 2; ++times) {
      rig.run(1);
      EXPECT_EQ(rig.gradient(), times * (1 * 2 * 3) / (comm.rank() + 1) * (1 + 2 + 3 + 4 + 5));
    }
  });
}

// Sums 1 over the ranks that share it, `forward` times in each forward and once in each backward.
class SummingStage : public ArithmeticStage {
 public:
  explicit SummingStage(int forward) : ArithmeticStage(0), forward_(forward) {}
  static StageCollectives described(std::uint64_t bytes = sizeof(double)) {
    const PlannedCollective sum{.bytes = bytes, .type = DType::kF64};
    return {.forward = {sum, sum}, .backward_input = {sum}};
  }
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = ArithmeticStage::describe(inputs, compute);
    description.collectives = described();
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    for (int i = 0; i < forward_; ++i) sum(ctx);
    ArithmeticStage::forward(ctx, x, y);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor>,
                      std::span<const Tensor>) override {
    sum(ctx);
  }
  std::vector<double> sums;

 private:
  void sum(const StageContext& ctx) {
    double one = 1;
    ctx.tensor->sum({&one, 1});
    sums.push_back(one);
  }
  int forward_;
};

// Two ranks that have the same numbers.
class SumOfTwo : public Collective {
 public:
  void make(const CollectiveCall& call) override {
    places.push_back({call.stage, call.micro_batch, call.index});
    ASSERT_EQ(call.kind, CollectiveKind::kSum);
    auto* const values = reinterpret_cast<double*>(call.out.data());
    for (std::size_t i = 0; i < call.out.size() / sizeof(double); ++i) values[i] *= 2;
  }
  std::vector<std::array<int, 3>> places;  // stage, micro-batch, index
};

Plan plan_with(const StageCollectives& collectives) {
  return plan_for(generate("1f1b", {1, 2, 1}), {.reduce_grad = false, .tied = {}},
                  needs_of("loopback"), {collectives});
}

TEST(EngineTest, CollectivesAreThosePlanned) {
  const Plan plan = plan_with(SummingStage::described());
  run_loopback(1, [&](Communicator& comm) {
    ControlChannel control(comm);
    for (int forward = 1; forward <= 3; ++forward) {
      auto made = std::make_unique<SummingStage>(forward);
      const SummingStage& stage = *made;
      Rig rig(plan, comm, control, RouteKind::kHost, std::move(made), unit_edges(1));
      if (forward != 2) {
        expect_error(
            ErrorCode::kUsage,
            {"forward of micro-batch 0: the stage ",
             forward == 1 ? "does not make a sum of 8 bytes of f64 over the tensor ranks, "
                            "which its description has (collective 2 of 2), on rank 0"
                          : "makes a sum of 8 bytes of f64 over the tensor ranks where its "
                            "description has no more (2 in this action), on rank 0"},
            [&] { rig.run(1); });
        continue;
      }
      rig.run(1);
      SumOfTwo two;
      rig.sum_with(two);
      rig.run(2);
      EXPECT_THAT(stage.sums, ::testing::ElementsAre(1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2));
      const std::vector<std::array<int, 3>> places = {{0, 0, 0}, {0, 0, 1}, {0, 0, 0},
                                                      {0, 1, 0}, {0, 1, 1}, {0, 1, 0}};
      EXPECT_EQ(two.places, places);
    }
  });
}

// A stage that calls another collective than its description has, on one rank: what it passes and
// gets has the same size there.
class OtherCollectiveStage : public SummingStage {
 public:
  using Call = std::function<void(StageContext&)>;
  explicit OtherCollectiveStage(Call call) : SummingStage(2), call_(std::move(call)) {}
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    call_(ctx);
    ArithmeticStage::forward(ctx, x, y);  // NOLINT(bugprone-parent-virtual-call): no sums
  }

 private:
  Call call_;
};

TEST(EngineTest, RefusesAnotherCollectiveThanPlannedBeforeAnyMessage) {
  const Plan plan = plan_with(SummingStage::described());
  run_loopback(1, [&](Communicator& comm) {
    ControlChannel control(comm);
    const auto refused = [&](const Plan& of, const OtherCollectiveStage::Call& call,
                             const std::string& part) {
      Rig rig(of, comm, control, RouteKind::kHost, std::make_unique<OtherCollectiveStage>(call),
              unit_edges(1));
      SumOfTwo two;
      rig.sum_with(two);
      expect_error(ErrorCode::kUsage, {"stage 0, forward of micro-batch 0: the stage ", part},
                   [&] { rig.run(1); });
      EXPECT_TRUE(two.places.empty());
    };
    std::vector<double> doubles(2), more(2);
    std::vector<float> floats(2);
    const Tensor in{doubles.data(), {DType::kF64, {1}}}, out{more.data(), {DType::kF64, {1}}};
    const char* planned =
        "where its description has a sum of 8 bytes of f64 over the tensor ranks "
        "(collective 1 of 2)";
    refused(
        plan, [&](StageContext& ctx) { ctx.tensor->sum(doubles); },
        fmt::format("makes a sum of 16 bytes of f64 over the tensor ranks {}", planned));
    refused(
        plan, [&](StageContext& ctx) { ctx.tensor->sum(floats); },
        fmt::format("makes a sum of 8 bytes of f32 over the tensor ranks {}", planned));
    refused(
        plan, [&](StageContext& ctx) { ctx.collective->sum(std::span(doubles).first(1)); },
        fmt::format("makes a sum of 8 bytes of f64 over the replicas {}", planned));
    refused(
        plan, [&](StageContext& ctx) { ctx.tensor->all_gather(in, out); },
        fmt::format("makes an all-gather of 8 bytes of f64 over the tensor ranks {}", planned));
    refused(
        plan, [&](StageContext& ctx) { ctx.tensor->reduce_scatter(in, out); },
        fmt::format("makes a reduce-scatter of 8 bytes of f64 over the tensor ranks {}", planned));
    refused(
        plan, [&](StageContext& ctx) { ctx.tensor->all_to_all(in, out); },
        fmt::format("makes an all-to-all of 8 bytes of f64 over the tensor ranks {}", planned));
    // A plan may have more bytes, which are those of the largest micro-batch.
    const auto nothing = [](StageContext&) {};
    refused(plan_with(SummingStage::described(16)), nothing, "does not make a sum of 8 bytes");
    refused(plan_with(SummingStage::described(4)), nothing,
            "describes other collectives than its plan has: collective 1 is a sum of 8 bytes of "
            "f64 over the tensor ranks, not a sum of 4 bytes of f64 over the tensor ranks");
  });
}

// What was called, with the rank's gradient at that time.
class CallLog : public StepActions, public FinalGradients {
 public:
  explicit CallLog(Rig& rig) : rig_(rig) {}
  FinalGradients* final_gradients(int stage) override {
    add("last of " + std::to_string(stage) + " comes");
    return this;
  }
  void from(std::size_t begin) override { add("final from " + std::to_string(begin)); }
  void fold_forward(int stage, int leaf) override { add(fmt::format("F of {} {}", stage, leaf)); }
  void fold_backward(int stage, int leaf) override { add(fmt::format("B of {} {}", stage, leaf)); }
  void reduce_grad(int stage) override { add("reduce " + std::to_string(stage)); }
  void reduce_tied(int) override {}
  void measure() override {}
  void optimizer() override { add("optimizer"); }
  std::vector<std::string> calls;

 private:
  void add(const std::string& what) {
    calls.push_back(what + ": " + std::to_string(static_cast<int>(rig_.gradient())));
  }
  Rig& rig_;
};

TEST(EngineTest, TheLastBackwardOfAStageAloneIsAskedWhatIsFinal) {
  for (const char* name : {"1f1b", "gpipe-lifo", "zb-h1", "zb-h2"}) {
    for (const bool beside : {true, false}) {
      const Plan plan =
          plan_for(generate(name, {2, 4, 1}),
                   {.tied = {}, .overlapped_grad_sums = {beside, beside}}, needs_of("loopback"));
      run_loopback(2, [&](Communicator& comm) {
        ControlChannel control(comm);
        Rig rig(plan, comm, control);
        CallLog log(rig);
        rig.run(1, &log);
        // Rank 0 multiplies by 1, rank 1 by 2; samples are 1 to 4. Micro-batch 0 comes last in
        // gpipe-lifo, else 3.
        const int sum = 1 + 2 + 3 + 4;
        const int last = std::string(name) == "gpipe-lifo" ? 1 : 4;
        const int factor = comm.rank() == 0 ? 2 : 1;
        const int rank = comm.rank(), whole = sum * factor;
        EXPECT_THAT(log.calls, ::testing::ElementsAre(
                                   fmt::format("last of {} comes: {}", rank, (sum - last) * factor),
                                   fmt::format("final from 0: {}", whole),
                                   fmt::format("reduce {}: {}", rank, whole),
                                   fmt::format("optimizer: {}", whole)))
            << name;
      });
    }
  }
}

// Notes the numbers of the micro-batches that it forwards.
class NumberedStage : public ArithmeticStage {
 public:
  NumberedStage() : ArithmeticStage(0) {}
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    numbers.push_back(fmt::format("{} of {}", ctx.micro_batch, ctx.micro_batches));
    ArithmeticStage::forward(ctx, x, y);
  }
  std::vector<std::string> numbers;
};

TEST(EngineTest, GroupsOfMicroBatchesHaveNumbersOfTheirOwnAndFolds) {
  const Plan plan =
      plan_for(generate("1f1b", {1, 4, 1}), {.tied = {}}, needs_of("loopback"), {}, 2);
  run_loopback(1, [&](Communicator& comm) {
    ControlChannel control(comm);
    auto made = std::make_unique<NumberedStage>();
    const NumberedStage& stage = *made;
    Rig rig(plan, comm, control, RouteKind::kHost, std::move(made), unit_edges(1));
    CallLog log(rig);
    rig.run(1, &log);
    EXPECT_THAT(stage.numbers, ::testing::ElementsAre("0 of 2", "1 of 2", "0 of 2", "1 of 2"));
    // The log folds nothing: samples are 1 to 4.
    EXPECT_THAT(log.calls, ::testing::ElementsAre("F of 0 0: 1", "B of 0 0: 3", "F of 0 1: 6",
                                                  "last of 0 comes: 6", "final from 0: 10",
                                                  "B of 0 1: 10", "reduce 0: 10", "optimizer: 10"));
  });
}

TEST(EngineTest, RunsAPlanMadeForInOrderQueuesToTheSameGradients) {
  for (const char* name : {"1f1b", "gpipe", "zb-h1"}) {
    const Plan plan = plan_of(name, 3, 5, "nccl");
    run_loopback(3, [&](Communicator& comm) {
      ControlChannel control(comm);
      Rig rig(plan, comm, control);
      rig.run(1);
      // Stage s multiplies by s + 1; samples are 1 to 5.
      EXPECT_EQ(rig.gradient(), (1 * 2 * 3) / (comm.rank() + 1) * (1 + 2 + 3 + 4 + 5));
    });
  }
}

TEST(TransportPlanTest, MakesAPlanThatRunsOverEachTransport) {
  for (const char* transport : {"mpi", "loopback", "nccl"}) {
    for (const std::string& name : schedule_names()) {
      const Verification verification = verify(plan_of(name, 3, 5, transport));
      const TransportNeeds needs = needs_of(transport);
      for (const TransportModel model : needs.models) {
        EXPECT_TRUE(verification.progresses(model)) << name << " over " << transport;
      }
    }
  }
}

TEST(TransportPlanTest, RefusesAPlanThatStandsStillOverTheTransportAndNamesTheCycle) {
  expect_error(
      ErrorCode::kPlan,
      {"schedule '1f1b' cannot run over transport 'nccl': under the nccl model the plan deadlocks",
       "the queue of rank 0 is at op 0 (post 0RECV_B0 channel 1 grad-output[0])"},
      [] { require_runnable(plan_of("1f1b", 2, 4, "mpi"), needs_of("nccl")); });
  Plan broken = plan_of("1f1b", 2, 4, "mpi");
  broken.ranks[0].ops.pop_back();
  expect_error(ErrorCode::kPlan, {"schedule '1f1b' cannot run over transport 'mpi': ", "rank 0"},
               [&] { require_runnable(broken, needs_of("mpi")); });
  expect_error(ErrorCode::kUsage, {"transport 'smoke'", "mpi, loopback, nccl"},
               [] { (void)needs_of("smoke"); });
}

TEST(EngineTest, AllocatesNothingInSteadyState) {
  const Plan plan = plan_of("1f1b", 2, 8);
  run_loopback(2, [&](Communicator& comm) {
    ControlChannel control(comm);
    Rig rig(plan, comm, control);
    rig.run(1);
    rig.run(2);
    EXPECT_EQ(rig.allocations(), 0U);
    rig.run(3);
    EXPECT_EQ(rig.allocations(), 0U);
  });
}

TEST(EngineTest, StopsAtAPlanWithAnyPostRemoved) {
  const Plan whole = plan_of("1f1b", 2, 3);
  int broken = 0;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < whole.ranks[rank].ops.size(); ++i) {
      if (whole.ranks[rank].ops[i].kind != OpKind::kPostRecv) continue;
      Plan plan = whole;
      plan.ranks[rank].ops.erase(plan.ranks[rank].ops.begin() + static_cast<std::ptrdiff_t>(i));
      EXPECT_FALSE(verify(plan).ok()) << "post " << i << " of rank " << rank;
      try {
        run_loopback(2, [&](Communicator& comm) {
          ControlChannel control(comm);
          Rig rig(plan, comm, control);
          guarded(control, comm.rank(), [&] { rig.run(1); });
        });
        ADD_FAILURE() << "ran without post " << i << " of rank " << rank;
      } catch (const Error& error) {
        // The rank that misses the post refuses its wait, or gets another message.
        EXPECT_TRUE(error.code() == ErrorCode::kPlan || error.code() == ErrorCode::kMismatch)
            << error.what();
      }
      ++broken;
    }
  }
  EXPECT_EQ(broken, 6);
}

// A store of one's own: what leaves is lost.
class EmptyStore final : public StateStore {
 public:
  EmptyStore() : StateStore({}) {}
  Number start(const Move&) override { return ++started_; }
  bool done(Number) override { return true; }

 private:
  Number started_ = 0;
};

TEST(EngineTest, StopsAtAPlanWithAnyMoveRemoved) {
  const Plan whole = make_plan(lower(generate("1f1b", {4, 6, 1}),
                                     {.reduce_grad = false, .tied = {}, .resident = {2, 2, 2, 2}}),
                               {});
  int broken = 0;
  for (std::size_t i = 0; i < whole.ranks[0].ops.size(); ++i) {
    const OpKind kind = whole.ranks[0].ops[i].kind;
    if (kind != OpKind::kStartMove && kind != OpKind::kWaitMove) continue;
    Plan plan = whole;
    plan.ranks[0].ops.erase(plan.ranks[0].ops.begin() + static_cast<std::ptrdiff_t>(i));
    if (verify(plan).ok()) {
      ADD_FAILURE() << "verify() takes a plan without " << to_string(whole.ranks[0].ops[i]);
    }
    expect_error(ErrorCode::kPlan, {"schedule '1f1b' breaks at", "pipeline rank 0"}, [&] {
      run_loopback(4, [&](Communicator& comm) {
        ControlChannel control(comm);
        EmptyStore store;
        Rig rig(plan, comm, control);
        rig.move_to(store);
        guarded(control, comm.rank(), [&] { rig.run(1); });
      });
    });
    ++broken;
  }
  EXPECT_GT(broken, 10);
}

TEST(EngineTest, RunsNothingOfAStageBetweenWhatItRecomputesAndItsBackward) {
  const Plan whole = plan_for(generate("1f1b", {2, 4, 1}),
                              {.reduce_grad = false, .tied = {}, .recomputes = {true, true}},
                              needs_of("loopback"));
  const auto run = [](const Plan& plan) {
    run_loopback(2, [&](Communicator& comm) {
      ControlChannel control(comm);
      Rig rig(plan, comm, control);
      guarded(control, comm.rank(), [&] { rig.run(1); });
    });
  };
  EXPECT_NO_THROW(run(whole));
  Plan plan = whole;
  std::vector<PlanOp>& ops = plan.ranks[0].ops;
  const auto again = std::ranges::find(ops, ActionKind::kRecompute, &PlanOp::action);
  const auto forward = std::find_if(std::reverse_iterator(again), ops.rend(),
                                    [](const PlanOp& op) { return op.kind == OpKind::kCompute; })
                           .base() -
                       1;
  std::rotate(forward, again, again + 1);  // before the F of the next micro-batch
  EXPECT_FALSE(verify(plan).ok());
  expect_error(ErrorCode::kPlan, {"0F1", "what it has recomputed of micro-batch 0"},
               [&] { run(plan); });
}

TEST(EngineTest, NamesTheWaitWhoseReceiveWasNeverPosted) {
  Plan plan = plan_of("1f1b", 2, 1);
  std::erase_if(plan.ranks[1].ops, [](const PlanOp& op) { return op.kind == OpKind::kPostRecv; });
  try {
    run_loopback(2, [&](Communicator& comm) {
      ControlChannel control(comm);
      Rig rig(plan, comm, control);
      guarded(control, comm.rank(), [&] { rig.run(1); });
    });
    ADD_FAILURE() << "ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPlan);
    EXPECT_THAT(error.what(), HasSubstr("never posted"));
    EXPECT_THAT(error.what(), HasSubstr("RECV_F"));
    EXPECT_EQ(error.rank(), 1);
  }
}

// Each plan names something on rank 1 that does not exist, or is not in the state that its op
// needs.
TEST(EngineTest, RefusesAnOpWhoseSlotOrMicroBatchIsNotThere) {
  struct Break {
    OpKind kind;
    std::function<void(PlanOp&)> apply;
    const char* says;
  };
  const auto slot = [](BufferKind kind, std::int32_t to) {
    return [kind, to](PlanOp& op) { op.slots[static_cast<std::size_t>(kind)] = to; };
  };
  const std::vector<Break> breaks = {
      {OpKind::kCompute, [](PlanOp& op) { op.micro_batch = 3; }, "names no micro-batch"},
      {OpKind::kStartSend, [](PlanOp& op) { op.micro_batch = -1; }, "names no micro-batch"},
      {OpKind::kStartSend, [](PlanOp& op) { op.channel = 99; }, "names no channel or no slot"},
      {OpKind::kPostRecv, slot(BufferKind::kInput, 99), "names no channel or no slot"},
      {OpKind::kCompute, slot(BufferKind::kState, 99), "names no slot"},
      {OpKind::kRelease, slot(BufferKind::kInput, 99), "names no slot"},
      {OpKind::kCompute, slot(BufferKind::kInput, 1), "a slot it needs filled is"},
  };
  for (const Break& broken : breaks) {
    SCOPED_TRACE(broken.says);
    Plan plan = plan_of("1f1b", 2, 3);
    auto& ops = plan.ranks[1].ops;
    const auto found = std::find_if(ops.begin(), ops.end(),
                                    [&](const PlanOp& op) { return op.kind == broken.kind; });
    ASSERT_NE(found, ops.end());
    broken.apply(*found);
    expect_error(ErrorCode::kPlan, {"schedule '1f1b' breaks at", "pipeline rank 1", broken.says},
                 [&] {
                   run_loopback(2, [&](Communicator& comm) {
                     ControlChannel control(comm);
                     Rig rig(plan, comm, control);
                     guarded(control, comm.rank(), [&] { rig.run(1); });
                   });
                 });
  }
}

// Between the two stages a tensor without a gradient comes before that with one. The second stage's
// backward starts once the first stage's rank waits.
class IdsStage : public ArithmeticStage {
 public:
  IdsStage(int stage, std::atomic<bool>& waits)
      : ArithmeticStage(stage), first_(stage == 0), waits_(waits) {}
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    if (!first_) return ArithmeticStage::forward(ctx, x.subspan(1), y);
    for (std::int64_t i = 0; i < y[0].elements(); ++i) y[0].at(i) = 0;
    ArithmeticStage::forward(ctx, x, y.subspan(1));
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    if (first_) return;
    while (!waits_) std::this_thread::yield();
    backward_input(ctx, dy, dx.subspan(1));
  }

 private:
  bool first_;
  std::atomic<bool>& waits_;
};

TEST(EngineTest, AWaitSaysTheBytesOfTheTensorItWaitsFor) {
  const Plan plan = plan_of("1f1b", 2, 1);
  const EdgeTensor number{{DType::kF32, Shape{1, 1}}, true};
  const std::vector<std::vector<EdgeTensor>> edges = {
      {number}, {{{DType::kF32, Shape{1, 3}}, false}, number}, {number}};
  struct Waits : Interrupt {
    void poll() override {}
    void begin_wait(const WaitSubject& subject) noexcept override {
      if (subject.what != WaitSubject::What::kReceive) return;
      bytes = subject.bytes;
      waits = true;
    }
    std::size_t bytes = 0;
    std::atomic<bool> waits = false;
  };
  Waits waits, others;
  run_loopback(2, [&](Communicator& comm) {
    Rig rig(plan, comm, comm.rank() == 0 ? waits : others, RouteKind::kHost,
            std::make_unique<IdsStage>(comm.rank(), waits.waits),
            EdgeTable({{.samples = 1}}, {edges}));
    rig.run(1);
  });
  EXPECT_EQ(waits.bytes, sizeof(float));
}

TEST(ProgramsTest, KeepWhatWasUsedLast) {
  run_loopback(2, [&](Communicator& comm) {
    ControlChannel control(comm);
    Plan largest = plan_of("1f1b", 2, 100);
    Rig rig(largest, comm, control);
    std::vector<int> planned;
    PlanCache programs(
        comm.rank(),
        [&](int n) {
          planned.push_back(n);
          return plan_of("1f1b", 2, n);
        },
        [&](const Plan& plan) { return rig.engine_of(plan); });
    programs.add(largest);
    EXPECT_FALSE(largest.ranks[static_cast<std::size_t>(comm.rank())].ops.empty());
    EXPECT_TRUE(largest.ranks[static_cast<std::size_t>(1 - comm.rank())].ops.empty());
    const auto planned_for = [&](const std::vector<int>& numbers) {
      planned.clear();
      for (const int n : numbers) {
        programs.plan(n);
        (void)programs.engine(n);
      }
      return planned;
    };
    const std::vector<int> most = {1, 2, 3, 4, 5, 6, 7, 8};
    ASSERT_EQ(most.size(), PlanCache::kMost);
    EXPECT_EQ(planned_for(most), most);
    const std::size_t before = allocations_of_this_thread();
    for (int times = 0; times < 3; ++times) {
      for (const int n : {100, 1, 3, 2, 4, 5, 6, 7, 8}) {
        programs.plan(n);
        (void)programs.engine(n);
      }
    }
    EXPECT_EQ(allocations_of_this_thread(), before);
    EXPECT_EQ(planned_for({9, 2, 1, 9, 100}), (std::vector<int>{9, 1}));
  });
}

}  // namespace
}  // namespace sluice::testing
