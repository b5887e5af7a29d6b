#include "comm/base/cores.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

namespace sluice {

namespace {

// The whole text as a number >= 0, else -1.
long long parse_number(std::string_view text) {
  long long value = -1;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end && value >= 0 ? value : -1;
}

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  const long long value = text == nullptr ? -1 : parse_number(text);
  return value > 1'000'000 ? -1 : static_cast<int>(value);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Path of this process's group in the unified hierarchy, "/" where there is none.
std::string control_group() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) {
      return line.substr(3);
    }
  }
  return "/";
}

// Whole cores of a quota "<microseconds> <period>", at least one; 0 where there is no limit.
int quota_cores(const std::string& text) {
  std::istringstream fields(text);
  std::string quota_text;
  std::string period_text;
  fields >> quota_text >> period_text;
  const long long quota = parse_number(quota_text);
  const long long period = parse_number(period_text);
  if (quota <= 0 || period <= 0) {
    return 0;
  }
  return static_cast<int>(std::max(1LL, (quota + period / 2) / period));
}

void limit(int& cores, int bound) {
  if (bound > 0) {
    cores = std::min(cores, bound);
  }
}

int read_host_cores() {
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  int cores = online > 0 ? static_cast<int>(online) : 1;
  limit(cores, count_cpu_list(first_line("/sys/fs/cgroup/cpuset/cpuset.effective_cpus")));
  // A limit may sit on any group above this process's own.
  for (std::string group = control_group();;) {
    const std::string folder = "/sys/fs/cgroup" + group + "/";
    limit(cores, count_cpu_list(first_line(folder + "cpuset.cpus.effective")));
    limit(cores, quota_cores(first_line(folder + "cpu.max")));
    const std::size_t slash = group.rfind('/');
    if (group.size() <= 1 || slash == std::string::npos) {
      break;
    }
    group.resize(std::max<std::size_t>(slash, 1));
  }
  const long long quota = parse_number(first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"));
  if (quota > 0) {
    limit(cores, quota_cores(std::to_string(quota) + " " +
                             first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us")));
  }
  return cores;
}

}  // namespace

int count_cpu_list(const std::string& text) {
  long long count = 0;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    const std::size_t dash = range.find('-');
    const long long first = parse_number(std::string_view(range).substr(0, dash));
    const long long last =
        dash == std::string::npos ? first : parse_number(std::string_view(range).substr(dash + 1));
    if (first < 0 || last < first || last > 1'000'000) {
      return 0;
    }
    count += last - first + 1;
  }
  return static_cast<int>(count);
}

int largest_slurm_count(const std::string& text) {
  long long largest = 0;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const long long count = parse_number(std::string_view(entry).substr(0, entry.find('(')));
    if (count < 1 || count > 1'000'000) {
      return 0;
    }
    largest = std::max(largest, count);
  }
  return static_cast<int>(largest);
}

int host_cores() {
  static const int cores = read_host_cores();  // once: every waiting site asks
  return cores;
}

std::vector<int> affinity_list() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

int affinity_cores() {
  const auto cores = static_cast<int>(affinity_list().size());
  return cores > 0 ? cores : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::string to_cpu_list(const std::vector<int>& cores) {
  std::string text;
  for (std::size_t i = 0; i < cores.size();) {
    std::size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cores[i]);
    if (last > i) text.append("-").append(std::to_string(cores[last]));
    i = last + 1;
  }
  return text;
}

LauncherInfo launcher_info() {
  LauncherInfo info;
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    if (info.local_size <= 0) info.local_size = std::max(0, environment_number(name));
  }
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_LOCAL_RANK", "MPI_LOCALRANKID"}) {
    if (info.local_rank < 0) info.local_rank = environment_number(name);
  }
  // Inside a Slurm allocation, but outside srun, the variables are set for a lone process too.
  if (info.local_size > 0 || std::getenv("SLURM_PROCID") == nullptr) return info;
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}) {
    const char* text = std::getenv(name);
    if (info.local_size <= 0 && text != nullptr) info.local_size = largest_slurm_count(text);
  }
  if (info.local_size > 0 && info.local_rank < 0) {
    info.local_rank = environment_number("SLURM_LOCALID");
  }
  return info;
}

}  // namespace sluice
