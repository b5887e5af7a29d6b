#include "comm/device/device_graph.hpp"

#include <sluice/error.hpp>

#include "comm/device/device_cuda.hpp"

namespace sluice {

namespace {

// Ends the capture in every case, and owns the graph of one that succeeded.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    // Records this thread's work alone: other threads may allocate memory and wait meanwhile.
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                "cudaStreamBeginCapture");
  }
  ~Capture() {
    if (!ended_) static_cast<void>(cudaStreamEndCapture(stream_, &graph_));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    if (!ended_) static_cast<void>(cudaGetLastError());  // of the broken capture
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
  graph.native_.reset(executable);
  // Else the first launch takes memory, within a step in which kernels wait for other ranks.
  cuda::check(cudaGraphUpload(executable, cuda::native(stream)), "cudaGraphUpload");
  return graph;
}

void Graph::launch(StreamView stream) const {
  cuda::check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(native_.get()), cuda::native(stream)),
              "cudaGraphLaunch");
}

void Graph::Destroy::operator()(void* native) const noexcept {
  static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(native)));
}

}  // namespace sluice
