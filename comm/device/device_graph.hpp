// Recorded work of a GPU: recorded once, then launched any number of times by one call of the host
// instead of one call per kernel. Uses CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs",
// stream capture).
#pragma once

#include <functional>
#include <memory>

#include <sluice/device.hpp>

namespace sluice {

// Move-only; a default-made graph is empty. The memory that the recorded work reads and writes, and
// the library handles it uses, must outlive its last launch.
class Graph {
 public:
  // Records what `work` puts on the stream of a GPU; none of it runs yet. `work` is called once. It
  // may neither wait for the device nor allocate its memory: Error(kDevice) with CUDA's text. Its
  // kernels should have run before, since loading a kernel may wait for the device. An exception of
  // `work` is passed on, and nothing stays recorded.
  [[nodiscard]] static Graph record(StreamView stream, const std::function<void()>& work);
  [[nodiscard]] bool empty() const { return native_ == nullptr; }
  // Puts the work on a stream of the same GPU. Does not block the host. Requires !empty().
  void launch(StreamView stream) const;

 private:
  struct Destroy {
    void operator()(void* native) const noexcept;
  };
  std::unique_ptr<void, Destroy> native_;
};

}  // namespace sluice
