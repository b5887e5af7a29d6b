#include "comm/mpi/device_messages.hpp"

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/mpi.hpp>

#include "comm/group/edge_probe.hpp"
#include "comm/group/waiter.hpp"
#include "comm/mpi/mpi_check.hpp"

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

bool open_mpi_says_so() {
#if defined(OMPI_HAVE_MPI_EXT_CUDA) && OMPI_HAVE_MPI_EXT_CUDA
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

bool memory_kinds_say_so() {
  MPI_Info info = MPI_INFO_NULL;
  check_mpi(MPI_Comm_get_info(MPI_COMM_WORLD, &info), "MPI_Comm_get_info");
  std::array<char, MPI_MAX_INFO_VAL + 1> value{};
  int found = 0;
  constexpr const char* kKey = "mpi_memory_alloc_kinds";
#if MPI_VERSION >= 4
  int size = static_cast<int>(value.size());
  const int result = MPI_Info_get_string(info, kKey, &size, value.data(), &found);
#else
  const int result = MPI_Info_get(info, kKey, MPI_MAX_INFO_VAL, value.data(), &found);
#endif
  MPI_Info_free(&info);
  check_mpi(result, "reading MPI_COMM_WORLD's memory kinds");
  return found != 0 && names_cuda_device(value.data());
}

// Open MPI 4.1 answers the query by how it was built. This parameter, from the environment, the
// command line or a file, says whether it checks the kind of a message's memory. Some builds have
// it off by default.
bool turned_off() {
  int provided = 0, index = 0;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS) return false;
  bool off = false;
  MPI_T_cvar_handle handle = nullptr;
  int count = 0;
  if (MPI_T_cvar_get_index("opal_cuda_support", &index) == MPI_SUCCESS &&
      MPI_T_cvar_handle_alloc(index, nullptr, &handle, &count) == MPI_SUCCESS) {
    std::array<unsigned char, 64> value{};  // a flag of unknown integer type
    off = count == 1 && MPI_T_cvar_read(handle, value.data()) == MPI_SUCCESS &&
          std::count(value.begin(), value.end(), 0) == static_cast<std::ptrdiff_t>(value.size());
    MPI_T_cvar_handle_free(&handle);
  }
  MPI_T_finalize();
  return off;
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
  const std::vector<std::byte> sent = probe_bytes({.bytes = kProbeBytes});
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

std::string mpi_device_memory_unsupported_reason(Device device) {
  if (!open_mpi_says_so() && !memory_kinds_say_so()) return "MPI is not CUDA-aware";
  if (turned_off()) return "MPI is CUDA-aware, but its parameter opal_cuda_support is off";
  return device_message_fault(communicator_of(make_world(MPI_COMM_SELF)), device);
}

}  // namespace sluice
