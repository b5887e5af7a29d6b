// Streams, events, memory and graphs of the emulated CUDA runtime.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <future>
#include <utility>
#include <vector>

#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/on_device.hpp"

namespace sluice::emulated {
namespace {

class StreamHandle {
 public:
  explicit StreamHandle(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, flags), cudaSuccess);
  }
  StreamHandle(const StreamHandle&) = delete;
  StreamHandle& operator=(const StreamHandle&) = delete;
  ~StreamHandle() { cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void synchronize() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

class EventHandle {
 public:
  EventHandle() { EXPECT_EQ(cudaEventCreate(&event_), cudaSuccess); }
  EventHandle(const EventHandle&) = delete;
  EventHandle& operator=(const EventHandle&) = delete;
  ~EventHandle() { cudaEventDestroy(event_); }
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Holds a stream until it is opened.
class Gate {
 public:
  void close(cudaStream_t stream) {
    const auto wait = [](void* gate) { static_cast<Gate*>(gate)->future_.wait(); };
    EXPECT_EQ(cudaLaunchHostFunc(stream, wait, this), cudaSuccess);
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

struct PinnedInt {
  PinnedInt() {
    void* memory = nullptr;
    EXPECT_EQ(cudaMallocHost(&memory, sizeof(int)), cudaSuccess);
    value = static_cast<int*>(memory);
  }
  PinnedInt(const PinnedInt&) = delete;
  PinnedInt& operator=(const PinnedInt&) = delete;
  ~PinnedInt() { cudaFreeHost(value); }
  int* value = nullptr;
};

// A writer behind a closed gate, a reader on another stream.
TEST(EmulatedStreamTest, WithoutAnEventAReaderOvertakesTheWriter) {
  const StreamHandle writer, reader;
  const OnDevice<int> value(1);
  const PinnedInt seen;
  Gate gate;
  gate.close(writer.get());
  EXPECT_EQ(cudaMemsetAsync(value.get(), 0, sizeof(int), writer.get()), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(writer.get()), cudaErrorNotReady);
  EXPECT_EQ(cudaMemcpyAsync(seen.value, value.get(), sizeof(int), cudaMemcpyDefault, reader.get()),
            cudaSuccess);
  reader.synchronize();
  EXPECT_EQ(*seen.value, -1) << "fresh device memory";
  gate.open();
  writer.synchronize();
}

TEST(EmulatedStreamTest, AnEventOrdersAcrossStreams) {
  const StreamHandle writer, reader;
  const EventHandle written;
  const OnDevice<int> value(1);
  const PinnedInt seen;
  *seen.value = 7;
  Gate gate;
  gate.close(writer.get());
  EXPECT_EQ(cudaMemsetAsync(value.get(), 0, sizeof(int), writer.get()), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(written.get()), cudaSuccess) << "never recorded";
  EXPECT_EQ(cudaEventRecord(written.get(), writer.get()), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(written.get()), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamWaitEvent(reader.get(), written.get(), 0), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(seen.value, value.get(), sizeof(int), cudaMemcpyDefault, reader.get()),
            cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(reader.get()), cudaErrorNotReady);
  gate.open();
  reader.synchronize();
  EXPECT_EQ(*seen.value, 0);
  EXPECT_EQ(cudaEventQuery(written.get()), cudaSuccess);
}

TEST(EmulatedStreamTest, TheDefaultStreamWaitsForBlockingStreamsAlone) {
  const StreamHandle blocking(cudaStreamDefault), free;
  const OnDevice<int> value(1);
  Gate gate, other_gate;
  gate.close(blocking.get());
  other_gate.close(free.get());
  EXPECT_EQ(cudaMemsetAsync(value.get(), 0, sizeof(int), blocking.get()), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(value.get(), 1, sizeof(int), nullptr), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  gate.open();
  EXPECT_EQ(value.values(), std::vector<int>{0x01010101});
  other_gate.open();
  free.synchronize();
}

TEST(EmulatedStreamTest, ADestroyedStreamFinishesItsWorkAndIsNoHandleAnyMore) {
  const OnDevice<int> value(1);
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const EventHandle done;
  EXPECT_EQ(cudaMemsetAsync(value.get(), 0, sizeof(int), stream), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(done.get(), stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(done.get()), cudaSuccess);
  EXPECT_EQ(value.values(), std::vector<int>{0});
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(EmulatedMemoryTest, StartsAsBytesOfOnesHoweverMuchWasWrittenBefore) {
  constexpr std::size_t kBytes = (std::size_t{5} << 20) + 3;
  for (int round = 0; round < 2; ++round) {
    const OnDevice<unsigned char> memory(kBytes);
    EXPECT_EQ(memory.values(), std::vector<unsigned char>(kBytes, 0xFF)) << round;
    EXPECT_EQ(cudaMemset(memory.get(), 0, kBytes), cudaSuccess);
    EXPECT_EQ(memory.values(), std::vector<unsigned char>(kBytes, 0)) << round;
  }
}

TEST(EmulatedMemoryTest, CopiesAreCheckedAgainstWhatIsAllocated) {
  const OnDevice<int> value(std::vector<int>{1, 2, 3});
  int host[4] = {};
  EXPECT_EQ(cudaMemcpy(host, value.get(), sizeof host, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, value.get(), 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, value.get() + 1, 8, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(host[0], 2);
  EXPECT_EQ(host[1], 3);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(EmulatedMemoryTest, RowsAreCopiedWithTheirPitches) {
  const OnDevice<std::uint8_t> matrix(std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 8, 9});
  std::uint8_t rows[4] = {};
  EXPECT_EQ(cudaMemcpy2DAsync(rows, 2, matrix.get() + 1, 3, 2, 2, cudaMemcpyDeviceToHost, nullptr),
            cudaSuccess);
  EXPECT_EQ(std::vector<std::uint8_t>(rows, rows + 4), (std::vector<std::uint8_t>{2, 3, 5, 6}));
}

TEST(EmulatedMemoryTest, ADeviceRunsOutOfMemoryAndGetsItBack) {
  std::size_t free = 0, total = 0, after = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, device_memory());
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, total + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  {
    const OnDevice<char> some(1000);
    EXPECT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    EXPECT_EQ(after, free - 1024);
  }
  EXPECT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(after, free);
}

TEST(EmulatedMemoryTest, AttributesTellDeviceFromPageLockedFromPageable) {
  const OnDevice<int> device(1);
  const PinnedInt pinned;
  const int pageable = 0;
  cudaPointerAttributes attributes;
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, device.get()), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, pinned.value), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, &pageable), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST(EmulatedMemoryDeathTest, HostCodeCannotTouchDeviceMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (!is_device_memory_guarded()) GTEST_SKIP() << "the processor has no memory protection keys";
  const OnDevice<int> value(1);
  EXPECT_DEATH(*value.get() = 1,
               "host code touched emulated device memory at 0x[0-9a-f]+ of "
               "device 0");
  EXPECT_DEATH(std::exit(*value.get()), "host code touched emulated device memory");
}

TEST(EmulatedMemoryDeathTest, FreedMemoryCannotBeTouched) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        void* memory = nullptr;
        cudaMalloc(&memory, 100);
        cudaFree(memory);
        *static_cast<volatile int*>(memory) = 1;
      },
      "touched freed emulated device memory or the end of an allocation");
}

TEST(EmulatedDeviceTest, DevicesAreCountedAndRefused) {
  int count = 0, device = -1;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 8);
  EXPECT_EQ(cudaSetDevice(count), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(3), cudaSuccess);
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 3);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
}

// In processes of their own, since the environment is read once.
TEST(EmulatedDeviceDeathTest, TheEnvironmentSaysHowManyDevicesOfWhatSize) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("SLUICE_EMULATED_DEVICES", "0", 1);
        int count = -1;
        void* memory = nullptr;
        const bool is_none = cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0 &&
                             cudaSetDevice(0) == cudaErrorNoDevice &&
                             cudaMalloc(&memory, 1) == cudaErrorNoDevice;
        std::exit(is_none ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        setenv("SLUICE_EMULATED_DEVICES", "2", 1);
        setenv("SLUICE_EMULATED_DEVICE_MEMORY", "4096", 1);
        int count = -1;
        void* first = nullptr;
        void* second = nullptr;
        const bool is_small = cudaGetDeviceCount(&count) == cudaSuccess && count == 2 &&
                              cudaMalloc(&first, 4000) == cudaSuccess &&
                              cudaMalloc(&second, 1) == cudaErrorMemoryAllocation;
        std::exit(is_small ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(EmulatedGraphTest, ReplaysWhatTwoStreamsRecorded) {
  const StreamHandle origin, other;
  const EventHandle fork, join;
  const OnDevice<int> value(1), copy(1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(origin.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(value.get(), 2, sizeof(int), origin.get()), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(fork.get(), origin.get()), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other.get(), fork.get(), 0), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(copy.get(), value.get(), sizeof(int), cudaMemcpyDefault, other.get()),
            cudaSuccess);
  EXPECT_EQ(cudaEventRecord(join.get(), other.get()), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(origin.get(), join.get(), 0), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(origin.get(), &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(copy.values(), std::vector<int>{-1}) << "recorded, not run";
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(cudaMemset(value.get(), 0, sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaMemset(copy.get(), 0, sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(executable, other.get()), cudaSuccess);
    other.synchronize();
    EXPECT_EQ(copy.values(), std::vector<int>{0x02020202});
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST(EmulatedGraphTest, ACallThatACaptureForbidsEndsIt) {
  const StreamHandle stream;
  cudaGraph_t graph = nullptr;
  void* memory = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(graph, nullptr);
  static_cast<void>(cudaGetLastError());
}

}  // namespace
}  // namespace sluice::emulated
