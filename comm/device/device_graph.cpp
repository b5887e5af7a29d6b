#include "comm/device/device_graph.hpp"

#include <sluice/error.hpp>
#if SLUICE_WITH_CUDA
#include "comm/device/device_cuda.hpp"
#endif

namespace sluice {

#if SLUICE_WITH_CUDA

namespace {

// Ends the capture however the work ended; the graph is kept where it ended well.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    // Other threads may go on taking memory and waiting: this one's work alone is recorded.
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                "cudaStreamBeginCapture");
  }
  ~Capture() {
    cudaGraph_t unwanted = nullptr;
    if (!ended_) static_cast<void>(cudaStreamEndCapture(stream_, &unwanted));
    if (unwanted != nullptr) static_cast<void>(cudaGraphDestroy(unwanted));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    if (!ended_) static_cast<void>(cudaGetLastError());  // of the capture that was broken off
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  [[nodiscard]] cudaGraph_t end() {
    ended_ = true;
    cuda::check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    return graph_;
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  bool ended_ = false;
};

}  // namespace

Graph Graph::record(StreamView stream, const std::function<void()>& work) {
  if (stream.native() == nullptr) throw Error(ErrorCode::kInternal, "a CPU records no graph");
  Capture capture(cuda::native(stream));
  work();
  cudaGraphExec_t executable = nullptr;
  cuda::check(cudaGraphInstantiate(&executable, capture.end(), 0), "cudaGraphInstantiate");
  Graph graph;
  graph.native_ = executable;
  return graph;
}

void Graph::launch(StreamView stream) const {
  cuda::check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(native_), cuda::native(stream)),
              "cudaGraphLaunch");
}

Graph::~Graph() {
  if (native_ != nullptr) {
    static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(native_)));
  }
}

#else

Graph Graph::record(StreamView, const std::function<void()>&) {
  throw Error(ErrorCode::kInternal, "this build has no CUDA");
}
void Graph::launch(StreamView) const {}
Graph::~Graph() = default;

#endif

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(native_, other.native_);
  return *this;
}

}  // namespace sluice
