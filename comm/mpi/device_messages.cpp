#include "comm/mpi/device_messages.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/waiter.hpp"

namespace sluice {

namespace {

// More than libraries send with the header of a message, less than their page-locked buffers.
constexpr std::size_t kProbeBytes = std::size_t{64} << 10;

// What messages are sent from.
struct ProbeMemory {
  explicit ProbeMemory(Device where) : host(kProbeBytes), device(where, 3 * kProbeBytes) {}
  std::vector<std::byte> host;
  Buffer device;
};

std::vector<std::byte> pattern() {
  std::vector<std::byte> bytes(kProbeBytes);
  std::uint32_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return bytes;
}

void pass(Communicator& comm, const std::byte* from, std::byte* to) {
  Request received = comm.post_recv(comm.rank(), 0, {to, kProbeBytes});
  Request sent = comm.start_send(comm.rank(), 0, {from, kProbeBytes});
  Waiter waiter(comm.local_size());
  while (!comm.test(sent) || !comm.test(received)) waiter.pause();
}

// The first part of `text` up to `separator`, which it leaves.
std::string_view take(std::string_view& text, char separator) {
  const std::size_t end = std::min(text.find(separator), text.size());
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return part;
}

}  // namespace

bool names_cuda_device(std::string_view memory_kinds) {
  while (!memory_kinds.empty()) {
    std::string_view kind = take(memory_kinds, ',');
    if (take(kind, ':') != "cuda") continue;
    if (kind.empty()) return true;
    while (!kind.empty()) {
      if (take(kind, ':') == "device") return true;
    }
  }
  return false;
}

std::string device_message_fault(std::unique_ptr<Communicator> comm, Device device) {
  use_device(device);  // current for MPI's CUDA calls
  const std::vector<std::byte> sent = pattern();
  std::vector<std::byte> back(kProbeBytes);
  const auto memory = std::make_shared<ProbeMemory>(device);
  std::vector<std::byte>& host = memory->host;
  std::byte* const first = memory->device.data();
  std::byte* const second = first + kProbeBytes;
  std::byte* const third = second + kProbeBytes;
  const std::unique_ptr<Communicator> own = std::move(comm);  // destroyed before the memory
  try {
    copy_now(device, first, sent.data(), kProbeBytes);
    copy_now(device, second, back.data(), kProbeBytes);
    copy_now(device, third, back.data(), kProbeBytes);
    pass(*own, first, host.data());
    pass(*own, host.data(), second);
    pass(*own, second, third);
    copy_now(device, back.data(), third, kProbeBytes);
  } catch (const Error& error) {
    own->keep(memory);
    return "MPI reports support for a GPU's memory, but a test message failed: " +
           std::string(error.what());
  }
  if (host == sent && back == sent) return {};
  return "MPI reports support for a GPU's memory, but a test message arrived with other bytes";
}

}  // namespace sluice
