// The device library of a build without CUDA: no GPU can be used. Nothing gets past
// require_usable(), so most functions here only have to link.
#include <string>

#include <sluice/error.hpp>

#include "comm/device/cuda_calls.hpp"
#include "comm/device/device_graph.hpp"

namespace sluice {

namespace {

constexpr const char* kAbsent = "this build has no CUDA";

[[noreturn]] void absent() { throw Error(ErrorCode::kInternal, kAbsent); }

}  // namespace

bool built_with_cuda() { return false; }

namespace cuda {

int count_devices(std::string* why_none) {
  if (why_none != nullptr) *why_none = kAbsent;
  return 0;
}
void require_usable(int index) {
  throw Error(ErrorCode::kUsage, "device cuda:" + std::to_string(index) +
                                     " cannot be used: " + kAbsent + "; legal: cpu");
}
DeviceProperties read_properties(int) { absent(); }
void require_code(int) {}
void select(int) {}
void* make_stream(int, StreamPriority) { absent(); }
void destroy_stream(void*) noexcept {}
void synchronize(void*) {}
void wait(void*, void*) {}
void* make_event(int, bool) { absent(); }
double seconds_between(void*, void*) { return 0; }
void destroy_event(void*) noexcept {}
void record(void*, void*) {}
bool done(void*) { return true; }
std::byte* allocate(int, std::size_t) { absent(); }
void release(std::byte*) noexcept {}
std::byte* allocate_host(int, std::size_t) { absent(); }
void release_host(std::byte*) noexcept {}
void copy(void*, const void*, std::size_t, void*) {}
void fill_zero(void*, std::size_t, void*) {}
void copy_blocking(int, void*, const void*, std::size_t) {}
std::byte* map_memory(int, std::span<const Mapping>) { absent(); }
void unmap_memory(int, std::byte*, std::size_t) noexcept {}

}  // namespace cuda

Graph Graph::record(StreamView, const std::function<void()>&) { absent(); }
void Graph::launch(StreamView) const {}
void Graph::Destroy::operator()(void*) const noexcept {}

}  // namespace sluice
