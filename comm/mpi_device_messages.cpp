// What this MPI library says of a GPU's memory. Three sources: Open MPI's query at run time (in 4.1
// whether the library was built for CUDA, in 5 whether it also runs with it), the parameter that
// turns that off in 4.1, and the memory kinds that MPI 4.1 lets every library name.
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "comm/device_messages.hpp"
#include "comm/mpi_check.hpp"
#include "comm/mpi_interop.hpp"

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

// Open MPI 4.1 asks the query before it looks at these.
const char* turned_off() {
  for (const char* name : {"OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    const std::string_view text(value);
    if (text == "0" || text == "false" || text == "no") return name;
  }
  return nullptr;
}

}  // namespace

std::string why_mpi_takes_no_device_memory(Device device) {
  if (!open_mpi_says_so() && !memory_kinds_say_so()) return "MPI is not CUDA-aware";
  if (const char* const name = turned_off()) return std::string(name) + " says so";
  const auto self = make_mpi_communicator(MPI_COMM_SELF);
  return device_message_fault(*self, device);
}

}  // namespace sluice
