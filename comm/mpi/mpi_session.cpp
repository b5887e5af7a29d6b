#include "comm/mpi/mpi_session.hpp"

#include <fmt/core.h>
#include <mpi.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include <sluice/error.hpp>
#include <sluice/mpi.hpp>

#include "comm/base/cores.hpp"
#include "comm/mpi/mpi_check.hpp"

namespace sluice {

namespace {

const char* name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "single";
    case MPI_THREAD_FUNNELED:
      return "funneled";
    case MPI_THREAD_SERIALIZED:
      return "serialized";
    default:
      return "multiple";
  }
}

// "Open MPI v4.1.4" out of "Open MPI v4.1.4, package: ..., ident: ...".
std::string library_name() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING + 1> text{};
  int length = 0;
  check_mpi(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  const std::string full(text.data());
  return full.substr(0, full.find_first_of(",\n"));
}

// Open MPI's point-to-point layers that the environment requests. There is no portable query for
// the layer in use.
std::string requested_components() {
  std::string text;
  for (const char* name : {"OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl"}) {
    const char* value = std::getenv(name);
    if (value != nullptr) {
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", name + 9, value);
    }
  }
  return text;
}

void prepare_environment() {
  // Where ranks outnumber cores, spinning inside MPI starves the other ranks. Open MPI detects this
  // itself only if it was started without a host list.
  if (launcher_info().local_size > host_cores()) {
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  }
}

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) {
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized != 0) {
    return;
  }
  prepare_environment();
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
  owns_ = true;
  // Errors of requests: MPICH asks these communicators' handlers, whatever communicator is used.
  for (MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF}) {
    check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  if (level < MPI_THREAD_FUNNELED) {
    MPI_Finalize();
    throw Error(ErrorCode::kUsage,
                "this MPI grants only MPI_THREAD_SINGLE; MPI_THREAD_FUNNELED is needed");
  }
}

MpiSession::~MpiSession() {
  int finalized = 0;
  if (owns_ && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) {
    MPI_Finalize();
  }
}

std::unique_ptr<Communicator> MpiSession::world() const {
  return communicator_of(make_world(MPI_COMM_WORLD));
}

MpiInfo mpi_info() {
  MpiInfo info;
  info.library = library_name();
  int major = 0;
  int minor = 0;
  check_mpi(MPI_Get_version(&major, &minor), "MPI_Get_version");
  info.standard = std::to_string(major) + "." + std::to_string(minor);
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  info.thread_level = name_of_level(level);
  std::array<char, MPI_MAX_PROCESSOR_NAME + 1> host{};
  int length = 0;
  check_mpi(MPI_Get_processor_name(host.data(), &length), "MPI_Get_processor_name");
  info.host = host.data();
  info.components = requested_components();
  int* bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found), "MPI_Comm_get_attr");
  info.tag_upper_bound = found != 0 ? *bound : 32767;
  const LauncherInfo launcher = launcher_info();
  info.local_size = launcher.local_size > 0 ? launcher.local_size : 1;
  info.local_rank = launcher.local_rank >= 0 ? launcher.local_rank : 0;
  info.cores = affinity_cores();
  return info;
}

void MpiSession::abort(int code) const {
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

}  // namespace sluice
