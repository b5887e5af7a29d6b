#include "runtime/program/doctor/facts.hpp"

#include <dlfcn.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/base/cores.hpp"
#include "runtime/files/json_text.hpp"
#include "stages/cpu/cpu_report.hpp"

namespace sluice {

// With defaults: tests give what they need.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(MpiInfo, library, standard, thread_level, host,
                                                components, tag_upper_bound, local_rank, local_size,
                                                cores)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(NetworkInterface, name, address, network,
                                                speed_megabit)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Connection, local, peer)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(NetworkFacts, fast, interfaces, connections,
                                                settings)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(LimitFacts, cores, locked_memory_bytes,
                                                shared_memory_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(LauncherFacts, processes, pmix, pmix_of)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(DataFacts, path, problem, bytes, hash)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(DirectoryFacts, path, problem, bytes_per_second,
                                                seen_after)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RankFacts, rank, mpi, clock_ahead, clock_error,
                                                device, device_identity, gpu, no_gpu,
                                                no_device_messages, host_cores, threads, kernel_set,
                                                matmul_library, native_bf16, limits, launcher,
                                                network, data, save, environment)

namespace {

// Variables of libraries that change results or speed.
constexpr const char* kVariables[] = {
    "OMP_NUM_THREADS",          "OMP_PROC_BIND",
    "OPENBLAS_CORETYPE",        "OPENBLAS_NUM_THREADS",
    "DNNL_MAX_CPU_ISA",         "ONEDNN_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "SLUICE_KERNELS",
};

std::int64_t free_shared_memory() {
  struct statvfs state = {};
  if (statvfs("/dev/shm", &state) != 0) return -1;
  return static_cast<std::int64_t>(state.f_bavail) * static_cast<std::int64_t>(state.f_frsize);
}

std::int64_t locked_memory() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<std::int64_t>(limit.rlim_cur);
}

// "4.2.2" of "OpenPMIx 4.2.2, repo revision: ...".
std::string version_in(std::string_view text) {
  const std::size_t begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_first_not_of("0123456789.", begin) - begin));
}

// Of the library that MPI has opened; nothing opens it here.
std::string pmix_of_library() {
  void* library = ::dlopen("libpmix.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "";
  const auto version = reinterpret_cast<const char* (*)()>(::dlsym(library, "PMIx_Get_version"));
  std::string found = version != nullptr ? version_in(version()) : "";
  ::dlclose(library);
  return found;
}

// As this process was started; MPI sets some of them later where it finds no launcher.
std::map<std::string, std::string> first_environment() {
  std::ifstream in("/proc/self/environ", std::ios::binary);
  std::map<std::string, std::string> variables;
  for (std::string entry; std::getline(in, entry, '\0');) {
    const std::size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return variables;
}

LauncherFacts launcher_facts() {
  const std::map<std::string, std::string> variables = first_environment();
  LauncherFacts facts;
  // Of a step of Slurm, not of a batch script.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const auto found = variables.find(name);
    if (found == variables.end()) continue;
    facts.processes = std::atoi(found->second.c_str());
    break;
  }
  const auto pmix = variables.find("PMIX_VERSION");
  if (pmix != variables.end()) facts.pmix = version_in(pmix->second);
  facts.pmix_of = pmix_of_library();
  return facts;
}

}  // namespace

std::string describe_gpu(Device device) {
  if (device.kind == DeviceKind::kCpu) return "";
  const DeviceProperties gpu = properties_of(device);
  return fmt::format("{}, {:.1f} GiB, compute capability {}.{}, driver for CUDA {}.{}", gpu.name,
                     static_cast<double>(gpu.memory) / (1 << 30), gpu.major, gpu.minor,
                     gpu.driver / 1000, gpu.driver % 1000 / 10);
}

bool is_open_mpi(const RankFacts& facts) {
  return facts.mpi.library.find("Open MPI") != std::string::npos;
}

RankFacts local_facts() {
  RankFacts facts;
  if (built_with_cuda()) facts.no_gpu = no_gpu_reason();
  facts.host_cores = host_cores();
  facts.kernel_set = kernel_set();
  facts.matmul_library = matmul_library();
  facts.native_bf16 = native_bf16();
  facts.limits = {affinity_list(), locked_memory(), free_shared_memory()};
  facts.launcher = launcher_facts();
  facts.network = network_facts();
  const auto note = [&facts](const char* name) {
    if (const char* value = std::getenv(name); value != nullptr) {
      facts.environment.emplace_back(name, value);
    }
  };
  for (const char* name : kVariables) note(name);
  for (const char* name : kOversubscribe) note(name);
  return facts;
}

std::string to_json_text(const RankFacts& facts) {
  return dump_json(nlohmann::json(facts), -1, InvalidUtf8::replace);
}

RankFacts rank_facts_from_json(const std::string& text) {
  return parse_json(text).get<RankFacts>();
}

}  // namespace sluice
