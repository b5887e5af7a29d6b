// A program for cli_test, of two ranks: embedding_program <how> <file>. Stage 0 fails while a
// message of 8 MiB is on its way to rank 1, which is held back until rank 0 has dropped its
// pipeline and made <file>. <how> is
//   embed       both catch the error, drop the pipeline and train another
//   unreceived  the same; rank 1 fails as well and never receives the message
//   main        the error leaves run_main()
// Or: embedding_program thread <level>. A thread that did not initialise MPI trains, where MPI
// grants <level>: funneled or multiple. Or: embedding_program threads multiple. Two threads train
// at the same time, each with pipelines of its own.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/stage.hpp>

#include "comm/group/waiter.hpp"
#include "comm/mpi/mpi_session.hpp"

namespace {

using namespace sluice;
using Tensors = std::span<const Tensor>;

constexpr int kWidth = 2 << 20;  // floats

void clear(Tensors tensors) {
  for (const Tensor& each : tensors) std::fill(each.floats().begin(), each.floats().end(), 0.0F);
}

struct NoData : DataSource {
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, Shape{samples, 1}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  void inputs(Phase, std::uint64_t, SampleRange, Tensors into) const override { clear(into); }
  void targets(Phase, std::uint64_t, SampleRange, Tensors into) const override { clear(into); }
};

class First : public Stage {
 public:
  explicit First(bool fails) : fails_(fails) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {.outputs = {{DType::kF32, Shape{inputs[0].shape[0], kWidth}}}};
  }
  void forward(StageContext& ctx, Tensors, Tensors outputs) override {
    if (fails_ && ctx.micro_batch == 1) throw std::runtime_error("stage 0 has a problem");
    clear(outputs);
  }
  void backward(StageContext&, Tensors, Tensors) override {}

 private:
  bool fails_;
};

class Last : public Stage, public LossStage {
 public:
  // Waits for `file` where it has a name, and then throws, if it is to.
  Last(std::string file, bool fails) : file_(std::move(file)), fails_(fails) {}
  StageDescription describe(std::span<const TensorSpec>, ComputeContext&) const override {
    return {.outputs = {{DType::kF32, Shape{1, 1}}}};
  }
  void forward(StageContext&, Tensors, Tensors outputs) override { clear(outputs); }
  void backward(StageContext&, Tensors, Tensors grad_inputs) override { clear(grad_inputs); }
  void loss(StageContext&, Tensors, Tensors, double* sum) override { *sum = 0; }
  double target_weight(Tensors) const override { return 1; }
  void begin_step(ComputeContext&) override {
    Waiter waiter(1);
    while (!file_.empty() && !std::filesystem::exists(file_)) waiter.pause();
    if (fails_) throw std::runtime_error("stage 1 has a problem too");
  }

 private:
  std::string file_;
  bool fails_;
};

void train(World& world, const std::string& file, bool first_fails, bool last_fails) {
  const NoData data;
  const auto make_stage = [&](int stage, int) -> std::unique_ptr<Stage> {
    if (stage == 0) return std::make_unique<First>(first_fails);
    return std::make_unique<Last>(file, last_fails);
  };
  Pipeline pipeline(world, make_stage, data, {.shape = {.pipeline = 2, .micro_batches = 2}});
  (void)pipeline.train_step();
}

// Every rank trains on a thread that did not initialise MPI.
int train_on_a_thread(int argc, char** argv, int level) {
  int granted = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, level, &granted);
  if (granted != level) return 1;
  {
    const auto world = MpiSession(nullptr, nullptr).world();
    std::thread([&] {
      try {
        train(*world, "", false, false);
        std::printf("rank %d has trained\n", world->rank());
      } catch (const Error& error) {
        std::printf("rank %d caught: %s: %s\n", world->rank(), name_of(error.code()), error.what());
      }
    }).join();
  }
  return MPI_Finalize();
}

int train_on_two_threads(int argc, char** argv) {
  int granted = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &granted);
  if (granted != MPI_THREAD_MULTIPLE) return 1;
  {
    const auto world = MpiSession(nullptr, nullptr).world();
    const auto first = world->duplicate(), second = world->duplicate();
    const auto work = [](World& own) {
      for (int i = 0; i < 4; ++i) train(own, "", false, false);
      std::printf("rank %d has trained\n", own.rank());
    };
    std::thread one([&] { work(*first); });
    std::thread two([&] { work(*second); });
    one.join();
    two.join();
  }
  return MPI_Finalize();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  const std::string how = argv[1], file = argv[2];
  if (how == "thread") {
    return train_on_a_thread(argc, argv,
                             file == "funneled" ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE);
  }
  if (how == "threads") return train_on_two_threads(argc, argv);
  const auto fail = [&](World& world) {
    try {
      train(world, file, /*first_fails=*/true, /*last_fails=*/how == "unreceived");
    } catch (const Error&) {
      if (world.rank() == 0) std::ofstream(file).put('\n');
      throw;
    }
  };
  if (how == "main") {
    return run_main(argc, argv, [&](World& world) { fail(world); });
  }
  const MpiSession session(&argc, &argv);
  const auto world = session.world();
  try {
    fail(*world);
  } catch (const Error& error) {
    std::printf("rank %d caught: %s\n", world->rank(), error.what());
  }
  train(*world, "", false, false);
  std::printf("rank %d goes on\n", world->rank());
}
