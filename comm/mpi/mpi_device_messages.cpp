// Whether this MPI library reports support for a GPU's memory. Three sources: Open MPI's query (in
// 4.1 whether the library was built for CUDA, in 5 whether it also runs with it), the parameter
// that turns support off in 4.1, and the memory kinds of the MPI standard 4.1.
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include <sluice/mpi.hpp>

#include "comm/mpi/device_messages.hpp"
#include "comm/mpi/mpi_check.hpp"

namespace sluice {

namespace {

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

std::string mpi_device_memory_unsupported_reason(Device device) {
  if (!open_mpi_says_so() && !memory_kinds_say_so()) return "MPI is not CUDA-aware";
  if (turned_off()) return "MPI is CUDA-aware, but its parameter opal_cuda_support is off";
  return device_message_fault(make_mpi_communicator(MPI_COMM_SELF), device);
}

}  // namespace sluice
