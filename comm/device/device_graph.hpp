// Work of a GPU that is recorded once and put on a stream as a whole any number of times: one call
// of the host's in place of one per kernel. CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs",
// stream capture) behind it.
#pragma once

#include <functional>
#include <utility>

#include <sluice/device.hpp>

namespace sluice {

// Move-only; a default-made one is empty. What the recorded work reads and writes, and the library
// handles it uses, must outlive its last launch.
class Graph {
 public:
  Graph() = default;
  // What `work` puts on the stream, a GPU's, none of which runs yet. `work` is called once and may
  // neither wait for the device nor take memory of it: Error(kDevice) with CUDA's text. What `work`
  // throws is thrown on, and nothing stays recorded. Kernels in it should have run before, since
  // loading one may be such a wait.
  [[nodiscard]] static Graph record(StreamView stream, const std::function<void()>& work);
  Graph(Graph&& other) noexcept : native_(std::exchange(other.native_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  [[nodiscard]] bool empty() const { return native_ == nullptr; }
  // Puts the work on the stream, of the same GPU. Does not block the host. Requires !empty().
  void launch(StreamView stream) const;

 private:
  void* native_ = nullptr;
};

}  // namespace sluice
