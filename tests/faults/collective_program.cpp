// A program with a watchdog in which a rank fails within a collective, for collectives.py:
//   collective_program <how> <where> <moment> <pipeline> <seed> <limit>
//     how      kill, stop; other: makes another collective than it described; throw; embedded:
//              stops, and others catch the loss, destroy their pipelines and go on for a while
//     where    replica, tensor: within an action, over that axis; sums: in a sum of gradients over
//              replicas that advances while operators run
//     moment   before: others are in it; waits: it is in it, and others are not; amid: all are
// The seed draws the rank, and on which of its collectives it fails. It says so before:
//   fault: rank 3 in 1F2 of step 5: the sum of 8 bytes of f64 over the replicas (its collective 2)
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/group/activity.hpp"
#include "schedules/plan/collectives.hpp"
#include "tests/runtime/engine/copying_stage.hpp"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kMicroBatches = 4;
constexpr std::size_t kKiB = 1024;
// Of the gradients that are summed: floats of one of the parts that are looked at, and parts of
// half of them.
constexpr std::size_t kPart = 1024 * kKiB / sizeof(float), kParts = 16;
constexpr std::chrono::seconds kHeard{1};  // long enough for others to hear where a rank is

// Where in training the rank fails; equal on all ranks.
struct Fault {
  std::string how, where, moment;
  int rank = 0;
  std::uint64_t step = 0;
  bool forward = true;
  int micro_batch = 0, index = 0;  // `index`: of the action's collectives
  double share = 0;                // of what the collective takes, with "amid"
  int variant = 0;                 // of "other"
};

void announce(const std::string& text) {
  const std::string line = fmt::format("fault: {}\n", text);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

void fail(const Fault& fault, const std::string& text) {
  announce(text);
  ::raise(fault.how == "kill" ? SIGKILL : SIGSTOP);
}

CollectiveAxis axis_of(const Fault& fault) {
  return fault.where == "tensor" ? CollectiveAxis::kTensor : CollectiveAxis::kReplica;
}

StageCollectives collectives_over(CollectiveAxis axis) {
  using Kind = CollectiveKind;
  return {.forward = {{axis, Kind::kAllGather, 256 * kKiB, DType::kF32},
                      {axis, Kind::kSum, 8, DType::kF64},
                      {axis, Kind::kReduceScatter, 1024 * kKiB, DType::kF32}},
          .backward_input = {{axis, Kind::kAllToAll, 64 * kKiB, DType::kF32},
                             {axis, Kind::kSum, 2048 * kKiB, DType::kF32}}};
}

ActivityBoard& own_board() {
  ActivityBoard* board = nullptr;
  ActivityBoard::for_each(
      [](ActivityBoard& each, void* into) noexcept { *static_cast<ActivityBoard**>(into) = &each; },
      &board);
  return *board;
}

std::string place_of(const Activity& now, const PlannedCollective& collective, int index) {
  return fmt::format("rank {} in {}{}{} of step {}: the {} (its collective {})", own_board().rank(),
                     now.stage, now.action == ActionKind::kForward ? 'F' : 'B', now.micro_batch,
                     now.step, to_string(collective), index + 1);
}

// Fails from a thread of its own while the board says that its rank is in the collective.
class FromWithin {
 public:
  explicit FromWithin(const Fault& fault) : fault_(fault) {}
  // Seconds that the collective took the last time.
  void took(double seconds) { seconds_ = seconds; }
  void start() {
    if (!thread_.joinable())
      thread_ = std::jthread([this](const std::stop_token& end) { watch(end); });
  }

 private:
  [[nodiscard]] bool is_target(const Activity& now) const {
    return now.doing == Doing::kOperation && now.kind == OpKind::kCompute && now.collective &&
           now.step >= fault_.step && now.micro_batch == fault_.micro_batch &&
           (now.action == ActionKind::kForward) == fault_.forward &&
           now.collectives_begun == fault_.index + 1 && (fault_.moment != "waits" || now.waits);
  }
  void watch(const std::stop_token& end) const {
    ActivityBoard& board = own_board();
    while (!end.stop_requested()) {
      const Activity first = board.read();
      if (!is_target(first)) continue;
      const Seconds delay =
          fault_.moment == "waits" ? Seconds(kHeard) / 2 : Seconds(fault_.share * seconds_);
      for (const auto begun = Clock::now(); Clock::now() - begun < delay;) continue;
      const Activity now = board.read();
      if (!is_target(now) || now.run != first.run) continue;
      fail(fault_, place_of(now, *now.collective, fault_.index));
    }
  }

  const Fault& fault_;
  std::atomic<double> seconds_ = 0;
  std::jthread thread_;
};

class SharedStage final : public testing::CopyingStage {
 public:
  SharedStage(const Fault& fault, int stage, bool fails, int ranks)
      : fault_(fault), fails_(fails), ranks_(static_cast<std::size_t>(ranks)), within_(fault) {
    set_.add(fmt::format("w{}", stage), Shape{1}, Init::constant(0));
  }
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = CopyingStage::describe(inputs, compute);
    description.collectives = collectives_over(axis_of(fault_));
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    make_all(ctx, true);
    CopyingStage::forward(ctx, x, y);
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    make_all(ctx, false);
    CopyingStage::backward(ctx, dy, dx);
    if (ctx.final_gradients != nullptr) ctx.final_gradients->from(0);
  }

 private:
  void make_all(StageContext& ctx, bool forward) {
    const StageCollectives all = collectives_over(axis_of(fault_));
    const std::vector<PlannedCollective>& list = forward ? all.forward : all.backward_input;
    for (int i = 0; i < std::ssize(list); ++i) {
      PlannedCollective each = list[static_cast<std::size_t>(i)];
      const bool here =
          forward == fault_.forward && ctx.micro_batch == fault_.micro_batch && i == fault_.index;
      if (here && ctx.step >= fault_.step) before(ctx, each);
      const auto begun = Clock::now();
      make(ctx, each);
      if (here) within_.took(Seconds(Clock::now() - begun).count());
    }
  }

  // Changes the collective where the fault is another one.
  void before(const StageContext& ctx, PlannedCollective& collective) {
    if (!fails_) {
      if (fault_.moment == "waits") std::this_thread::sleep_for(kHeard);
      return;
    }
    if (fault_.moment == "waits" || fault_.moment == "amid") return within_.start();
    std::this_thread::sleep_for(kHeard);
    const std::string place = place_of(own_board().read(), collective, fault_.index);
    if (fault_.how == "throw") {
      announce(place);
      throw std::runtime_error(fmt::format("not today, in step {}", ctx.step.value));
    }
    if (fault_.how != "other") return fail(fault_, place);
    const bool sum = collective.kind == CollectiveKind::kSum;
    if (fault_.variant == 0) {
      collective.kind = sum ? CollectiveKind::kAllGather : CollectiveKind::kSum;
    } else if (fault_.variant == 1) {
      collective.bytes *= 2;
    } else {
      collective.axis = collective.axis == CollectiveAxis::kTensor ? CollectiveAxis::kReplica
                                                                   : CollectiveAxis::kTensor;
    }
    announce(place);
  }

  void make(StageContext& ctx, const PlannedCollective& each) {
    const bool tensor = each.axis == CollectiveAxis::kTensor;
    Collective& group = tensor ? *ctx.tensor : *ctx.collective;
    const std::size_t count = each.bytes / size_of(each.type);
    in_.resize(each.bytes);
    out_.resize(each.bytes * ranks_);
    const auto of = [&](std::vector<std::byte>& values, std::size_t elements) {
      return Tensor{values.data(), {each.type, Shape{static_cast<std::int64_t>(elements)}}};
    };
    switch (each.kind) {
      case CollectiveKind::kSum:
        if (each.type == DType::kF64) {
          return group.sum(std::span(reinterpret_cast<double*>(in_.data()), count));
        }
        return group.sum(std::span(reinterpret_cast<float*>(in_.data()), count));
      case CollectiveKind::kAllGather:
        return group.all_gather(of(in_, count), of(out_, count * ranks_));
      case CollectiveKind::kReduceScatter:
        return group.reduce_scatter(of(in_, count), of(out_, count / ranks_));
      case CollectiveKind::kAllToAll:
        return group.all_to_all(of(in_, count), of(out_, count));
    }
  }

  const Fault& fault_;
  bool fails_;
  std::size_t ranks_;
  FromWithin within_;
  std::vector<std::byte> in_, out_;
};

void run_operator(ComputeContext& compute) {
  std::array<float, 1> x = {1}, weight = {1}, y = {};
  const auto tensor = [](std::array<float, 1>& values) {
    return Tensor{values.data(), {DType::kF32, Shape{1, 1}}};
  };
  linear_forward(compute, tensor(x), tensor(weight), {}, tensor(y));
}

// Fails in its last backward, once some parts of the half that is final are summed, and others are
// not.
class SummedStage final : public testing::CopyingStage {
 public:
  SummedStage(const Fault& fault, int stage, bool fails) : fault_(fault), fails_(fails) {
    const Shape half{static_cast<std::int64_t>(kParts * kPart)};
    set_.add(fmt::format("first{}", stage), half, Init::constant(0));
    second_ = &set_.add(fmt::format("second{}", stage), half, Init::constant(0));
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    CopyingStage::backward(ctx, dy, dx);
    if (ctx.final_gradients == nullptr) return;
    std::ranges::fill(second_->grad.floats(), 1.0F);
    ctx.final_gradients->from(kParts * kPart);
    const bool fails = fails_ && ctx.step >= fault_.step;
    const auto enough = static_cast<std::size_t>(fault_.share * (kParts - 1));
    for (int i = 0; i < 20'000 && summed() < kParts; ++i) {
      run_operator(ctx.compute);
      const std::size_t now = summed();
      if (!fails || now <= enough || now == kParts) continue;
      fail(fault_, fmt::format("rank {} in sums of gradients of step {}: {} of {} parts are here",
                               own_board().rank(), ctx.step.value, now, kParts));
    }
  }

 private:
  // Parts whose sum is here.
  [[nodiscard]] std::size_t summed() const {
    const std::span<const float> grads = second_->grad.floats();
    std::size_t count = 0;
    for (std::size_t part = 0; part < kParts; ++part) {
      if (grads[part * kPart] > 1 && grads[(part + 1) * kPart - 1] > 1) ++count;
    }
    return count;
  }

  const Fault& fault_;
  bool fails_;
  Parameter* second_;
};

Fault drawn(char** arguments, int ranks) {
  Fault fault{.how = arguments[1], .where = arguments[2], .moment = arguments[3]};
  std::mt19937 draw(static_cast<unsigned>(std::atoi(arguments[5])));
  const auto below = [&](int most) {
    return static_cast<int>(draw() % static_cast<unsigned>(most));
  };
  fault.rank = below(ranks);
  fault.step = 3 + static_cast<std::uint64_t>(below(4));
  fault.forward = below(2) == 0;
  fault.micro_batch = below(kMicroBatches);
  const StageCollectives all = collectives_over(axis_of(fault));
  fault.index =
      below(static_cast<int>(fault.forward ? all.forward.size() : all.backward_input.size()));
  fault.share = below(1000) / 1000.0;
  fault.variant = below(3);
  return fault;
}

void train(Communicator& world, const Fault& fault, int pipeline_ranks, double limit) {
  const int shared = world.size() / pipeline_ranks;
  const bool embedded = fault.how == "embedded";
  PipelineOptions options;
  options.shape.pipeline = pipeline_ranks;
  (fault.where == "tensor" ? options.shape.tensor : options.shape.replicas) = shared;
  options.shape.micro_batches = kMicroBatches;
  options.training.optimizer = OptimizerConfig::sgd();
  options.training.learning_rate = {.peak = 0};
  options.watch = {.on = true, .timeout = limit, .ends_process = !embedded};
  const int samples = kMicroBatches * options.shape.replicas;
  const std::vector<float> ones(static_cast<std::size_t>(samples), 1);
  const auto source = make_array_source(ones, 1, ones, 1, samples);
  const bool fails = world.rank() == fault.rank;
  auto pipeline = std::make_unique<Pipeline>(
      world,
      [&](const StagePlace& place) -> std::unique_ptr<Stage> {
        if (fault.where == "sums") return std::make_unique<SummedStage>(fault, place.stage, fails);
        return std::make_unique<SharedStage>(fault, place.stage, fails, shared);
      },
      *source, options);
  try {
    while (true) (void)pipeline->train_step();
  } catch (const Error& error) {
    if (!embedded) throw;
    announce(fmt::format("rank {} caught {} of rank {}", world.rank(), exit_code(error.code()),
                         error.rank()));
  }
  pipeline.reset();
  announce(fmt::format("rank {} has destroyed its pipeline", world.rank()));
  // What the rank sends that goes on arrives meanwhile. MPI cannot end in order.
  std::this_thread::sleep_for(2 * kHeard);
  ::_exit(exit_code(ErrorCode::kPeer));
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  return sluice::run_main(argc, argv, [&](sluice::World& ranks) {
    sluice::Communicator& world = sluice::communicator_of(ranks);
    const sluice::PlaceSignals place;
    const sluice::Fault fault = sluice::drawn(argv, world.size());
    sluice::train(world, fault, std::atoi(argv[4]), std::atof(argv[6]));
  });
}
