// What a pipeline over several GPUs asks of CUDA and NCCL, and how it waits. On the emulation,
// whose ranks are threads; it counts what no GPU tells.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/memory.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

PipelineOptions options_for(int ranks, TransportChoice transport) {
  PipelineOptions options;
  options.shape.pipeline = ranks;
  options.shape.micro_batches = 2;
  options.devices.choices = parse_devices("cuda");
  options.devices.transport = transport;
  return options;
}

// Runs `body` on every rank with a pipeline whose stages `wrap` may change.
using Wrap = std::function<std::unique_ptr<Stage>(std::unique_ptr<Stage>, int index)>;
void with_pipelines(
    Communicator& comm, const PipelineOptions& options, const std::function<void(Pipeline&)>& body,
    const Wrap& wrap = [](auto stage, int) { return stage; }) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  const StageFactory factory = [&](int stage, int stages) {
    return wrap(Transformer(model)(stage, stages), stage);
  };
  Pipeline pipeline(comm, factory, *source, options);
  body(pipeline);
}

// Streams of rank 1's GPU while its pipeline lives: [priority], high ones first.
std::vector<int> streams_of_rank_1(TransportChoice transport) {
  std::vector<int> found;
  run_loopback(2, [&](Communicator& comm) {
    with_pipelines(comm, options_for(2, transport), [&](Pipeline& pipeline) {
      (void)pipeline.train_step();
      if (comm.rank() == 1) found = emulated::stream_priorities(1);
    });
  });
  return found;
}

TEST(SeveralGpusTest, MessagesHavePriorityAndCopyStreamsAreMadeWhereMessagesNeedThem) {
  const int high = -5, normal = 0;
  // NCCL has one for each of the two edges, and copies nothing.
  EXPECT_EQ(streams_of_rank_1(TransportChoice::kNccl), (std::vector{high, high, normal}));
  EXPECT_EQ(streams_of_rank_1(TransportChoice::kMpi), (std::vector{high, high, normal}));
}

TEST(SeveralGpusTest, NcclIsToldOfTheMemoryOfMessagesUntilTheEnd) {
  const std::size_t before = emulated::registered_bytes();
  run_loopback(2, [&](Communicator& comm) {
    with_pipelines(comm, options_for(2, TransportChoice::kNccl), [&](Pipeline& pipeline) {
      EXPECT_GT(emulated::registered_bytes(), before);
      (void)pipeline.train_step();
      pipeline.close();
    });
  });
  EXPECT_EQ(emulated::registered_bytes(), before);
}

// Passes calls on; `in_backward` comes first.
class WatchedStage : public WrappedStage {
 public:
  WatchedStage(std::unique_ptr<Stage> model, std::function<void(StageContext&)> in_backward)
      : WrappedStage(std::move(model)), in_backward_(std::move(in_backward)) {}
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    in_backward_(ctx);
    WrappedStage::backward(ctx, grad_outputs, grad_inputs);
  }

 private:
  std::function<void(StageContext&)> in_backward_;
};

// Rank 0's stage asks for more scratch than it described, behind a receive on its stream; rank 1
// fails before it sends. The host must not wait in CUDA, nor free memory, which would wait too.
TEST(SeveralGpusTest, ScratchThatGrowsBehindAReceiveEndsWithTheErrorOfTheSender) {
  std::mutex mutex;
  std::vector<std::string> said;
  run_loopback(2, [&](Communicator& comm) {
    const Wrap wrap = [](std::unique_ptr<Stage> stage, int index) {
      return std::make_unique<WatchedStage>(std::move(stage), [index](StageContext& ctx) {
        if (index == 1) throw Error(ErrorCode::kData, "rank 1 has enough");
        (void)ctx.compute.workspace(std::size_t{1} << 22);
      });
    };
    try {
      with_pipelines(
          comm, options_for(2, TransportChoice::kNccl),
          [](Pipeline& pipeline) { (void)pipeline.train_step(); }, wrap);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      said.emplace_back(error.what());
    }
  });
  ASSERT_EQ(said.size(), 2U);
  for (const std::string& one : said) EXPECT_THAT(one, HasSubstr("rank 1 has enough"));
}

TEST(SeveralGpusTest, OutgrownScratchIsFreedWhenNoKernelWaits) {
  run_loopback(1, [&](Communicator& comm) {
    constexpr std::size_t kMebi = std::size_t{1} << 20;
    std::size_t wanted = 8 * kMebi;
    const Wrap wrap = [&](std::unique_ptr<Stage> stage, int) {
      return std::make_unique<WatchedStage>(
          std::move(stage), [&](StageContext& ctx) { (void)ctx.compute.workspace(wanted); });
    };
    with_pipelines(
        comm, options_for(1, TransportChoice::kAuto),
        [&](Pipeline& pipeline) {
          (void)pipeline.train_step();
          const std::size_t before = properties_of({DeviceKind::kCuda, 0}).free_memory;
          wanted = 16 * kMebi;
          (void)pipeline.train_step();
          const std::size_t after = properties_of({DeviceKind::kCuda, 0}).free_memory;
          EXPECT_EQ(before - after, 8 * kMebi);  // 16 in place of 8
        },
        wrap);
  });
}

// Ranks whose MPI takes a GPU's memory: messages go through a copy. What rank `spoiled` receives
// from a GPU's memory, of this many bytes or more, has another last byte.
class AwareCommunicator final : public Communicator {
 public:
  struct Fault {
    int spoiled = -1;
    std::size_t from_bytes = 0;
  };
  AwareCommunicator(std::unique_ptr<Communicator> comm, Fault fault)
      : comm_(std::move(comm)), fault_(fault) {}
  int rank() const override { return comm_->rank(); }
  int size() const override { return comm_->size(); }
  int max_tag() const override { return comm_->max_tag(); }
  int local_size() const override { return comm_->local_size(); }
  const char* name() const override { return comm_->name(); }
  std::string device_memory_unsupported_reason(Device /*device*/) const override { return ""; }
  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    if (!on_device(bytes.data())) return comm_->start_send(peer, tag, bytes);
    auto copy = std::make_shared<std::vector<std::byte>>(bytes.size());
    copy_now(gpu(), copy->data(), bytes.data(), bytes.size());
    if (peer == fault_.spoiled && bytes.size() >= fault_.from_bytes) copy->back() ^= std::byte{1};
    comm_->keep(copy);
    copies_.push_back(copy);
    return comm_->start_send(peer, tag, *copy);
  }
  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    if (!on_device(bytes.data())) return comm_->post_recv(peer, tag, bytes);
    auto copy = std::make_shared<std::vector<std::byte>>(bytes.size());
    copies_.push_back(copy);
    const Request request = comm_->post_recv(peer, tag, *copy);
    receives_[request.index] = {copy, bytes};
    return request;
  }
  bool test(Request& request, Arrival* arrival) override {
    const std::int32_t index = request.index;
    Arrival found;
    if (!comm_->test(request, &found)) return false;
    if (arrival != nullptr) *arrival = found;
    if (const auto receive = receives_.find(index); receive != receives_.end()) {
      copy_now(gpu(), receive->second.second.data(), receive->second.first->data(), found.bytes);
      receives_.erase(receive);
    }
    return true;
  }
  void cancel(Request& request) override {
    receives_.erase(request.index);
    comm_->cancel(request);
  }
  void keep(KeepAlive memory) override { comm_->keep(std::move(memory)); }
  std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<AwareCommunicator>(comm_->split(colour, key), fault_);
  }
  std::unique_ptr<Communicator> duplicate() override {
    return std::make_unique<AwareCommunicator>(comm_->duplicate(), fault_);
  }

 private:
  [[nodiscard]] Device gpu() const { return {DeviceKind::kCuda, comm_->rank()}; }
  static bool on_device(const void* data) {
    return emulated::memory_of(data, 1).kind == emulated::MemoryKind::kDevice;
  }
  std::unique_ptr<Communicator> comm_;
  Fault fault_;
  std::vector<std::shared_ptr<std::vector<std::byte>>> copies_;
  std::map<std::int32_t, std::pair<std::shared_ptr<std::vector<std::byte>>, std::span<std::byte>>>
      receives_;
};

TEST(SeveralGpusTest, MessagesThatMpiTakesFromTheGpuHaveTheBitsOfThoseThroughTheHost) {
  TrainingCase what;
  what.name = "direct";
  what.model = small_model();
  what.steps = 2;
  const Layout layout{.pipeline = 2, .devices = "cuda", .transport = TransportChoice::kMpi};
  TrainingOutcome staged, direct;
  run_loopback(2, [&](Communicator& comm) {
    const TrainingOutcome outcome = train(comm, what, layout);
    AwareCommunicator aware(comm.duplicate(), {});
    const TrainingOutcome other = train(aware, what, layout);
    if (comm.rank() == 0) staged = outcome, direct = other;
  });
  EXPECT_EQ(staged, direct);
}

// The message is as large as those of training: small ones arrive whole here.
TEST(SeveralGpusTest, AnEdgeThatSpoilsLargeMessagesIsNamedBeforeTraining) {
  const TransformerConfig model = small_model();
  const auto largest = static_cast<std::size_t>(model.context * model.width) * sizeof(float);
  std::mutex mutex;
  std::vector<std::string> said;
  run_loopback(2, [&](Communicator& comm) {
    AwareCommunicator aware(comm.duplicate(), {.spoiled = 1, .from_bytes = largest});
    PipelineOptions options = options_for(2, TransportChoice::kMpi);
    try {
      with_pipelines(aware, options, [](Pipeline&) { ADD_FAILURE() << "it was made"; });
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      const std::lock_guard lock(mutex);
      said.emplace_back(error.what());
    }
  });
  ASSERT_EQ(said.size(), 2U);
  for (const std::string& one : said) {
    EXPECT_THAT(one, AllOf(HasSubstr("MPI delivers other bytes than were sent from rank 0 on "),
                           HasSubstr(" to rank 1 on "), HasSubstr("OMPI_MCA_opal_cuda_support=0")));
  }
}

}  // namespace
}  // namespace sluice::testing
