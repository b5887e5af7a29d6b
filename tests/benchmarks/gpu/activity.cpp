#include "tests/benchmarks/gpu/activity.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#if SLUICE_WITH_CUPTI
#include <cupti.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <array>
#include <cstring>
#include <mutex>
#endif

namespace sluice::benchmarks {

Coverage coverage_of(std::vector<BusyInterval> intervals) {
  if (intervals.empty()) return {};
  std::sort(intervals.begin(), intervals.end(),
            [](const BusyInterval& a, const BusyInterval& b) { return a.start < b.start; });
  std::uint64_t covered = 0, reached = intervals.front().start;
  for (const BusyInterval& each : intervals) {
    if (each.end <= reached) continue;
    covered += each.end - std::max(each.start, reached);
    reached = each.end;
  }
  const auto span = static_cast<double>(reached - intervals.front().start);
  return {span * 1e-9, static_cast<double>(covered) * 1e-9};
}

namespace {

// "void sluice::(anonymous namespace)::norm_forward<float>(...)" is norm_forward.
std::string short_name(const std::string& symbol) {
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, nullptr), &std::free);
  if (readable == nullptr) return symbol;
  std::string name = readable.get();
  for (const char* const dropped : {"void ", "(anonymous namespace)::", "sluice::"}) {
    for (std::size_t at = name.find(dropped); at != std::string::npos; at = name.find(dropped)) {
      name.erase(at, std::string_view(dropped).size());
    }
  }
  return name.substr(0, name.find_first_of("<("));
}

}  // namespace

std::vector<KernelTime> kernel_times(const std::vector<BusyInterval>& intervals) {
  std::map<std::string, KernelTime> by_symbol, by_name;
  for (const BusyInterval& each : intervals) {
    KernelTime& time = by_symbol[each.name];
    ++time.runs;
    time.seconds += static_cast<double>(each.end - each.start) * 1e-9;
  }
  for (const auto& [symbol, time] : by_symbol) {
    const std::string name = short_name(symbol);
    KernelTime& sum = by_name[name];
    sum.name = name;
    sum.runs += time.runs;
    sum.seconds += time.seconds;
  }
  std::vector<KernelTime> times;
  for (const auto& [name, time] : by_name) times.push_back(time);
  std::stable_sort(times.begin(), times.end(),
                   [](const KernelTime& a, const KernelTime& b) { return a.seconds > b.seconds; });
  return times;
}

#if SLUICE_WITH_CUPTI

namespace {

constexpr std::size_t kBufferBytes = std::size_t{8} << 20;
constexpr std::array kKinds = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                               CUPTI_ACTIVITY_KIND_MEMSET};

// CUPTI's functions, from the library of the toolkit's major version or the toolkit's own place.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  decltype(&cuptiActivityGetNumDroppedRecords) count_dropped = nullptr;
  decltype(&cuptiGetResultString) describe = nullptr;

  Cupti() {
    const std::string name = fmt::format("libcupti.so.{}", CUDART_VERSION / 1000);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NODELETE);
    if (library == nullptr) library = dlopen(SLUICE_CUPTI_LIBRARY, RTLD_NOW | RTLD_NODELETE);
    if (library == nullptr) throw Error(ErrorCode::kDevice, "no CUPTI (" + name + ")");
    const auto find = [library](auto& function, const char* symbol_name) {
      void* const symbol = dlsym(library, symbol_name);
      if (symbol == nullptr) {
        throw Error(ErrorCode::kDevice, fmt::format("CUPTI has no {}", symbol_name));
      }
      static_assert(sizeof(symbol) == sizeof(function));
      std::memcpy(&function, &symbol, sizeof(symbol));
    };
    find(register_callbacks, "cuptiActivityRegisterCallbacks");
    find(enable, "cuptiActivityEnable");
    find(disable, "cuptiActivityDisable");
    find(flush, "cuptiActivityFlushAll");
    find(next, "cuptiActivityGetNextRecord");
    find(count_dropped, "cuptiActivityGetNumDroppedRecords");
    find(describe, "cuptiGetResultString");
  }

  void check(CUptiResult result, const char* call) const {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    static_cast<void>(describe(result, &text));
    throw Error(ErrorCode::kDevice,
                fmt::format("{} failed: {}", call, text == nullptr ? "no text" : text));
  }
};

const Cupti& cupti() {
  static const Cupti functions;
  return functions;
}

// What has arrived. The callbacks have no argument of ours, hence one for the process.
struct Records {
  std::mutex mutex;
  std::vector<BusyInterval> intervals;
  std::size_t lost = 0;
};
Records& records() {
  static Records* const all = new Records;  // for ever: CUPTI may still give some at the end
  return *all;
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(64, kBufferBytes));
  *bytes = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;  // as many as fit
}

template <typename Record>
BusyInterval times_of(const CUpti_Activity* record, const char* name) {
  const auto* const full = reinterpret_cast<const Record*>(record);
  return {full->start, full->end, name};
}

void CUPTIAPI read_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer,
                          std::size_t /*bytes*/, std::size_t valid_bytes) {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  CUpti_Activity* record = nullptr;
  while (cupti().next(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    BusyInterval times;
    const char* name = nullptr;
    switch (record->kind) {
      case CUPTI_ACTIVITY_KIND_KERNEL:
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        // Later versions of a record only add to its end; 12.0 to 13.x have these four.
        name = reinterpret_cast<const CUpti_ActivityKernel9*>(record)->name;
        times = times_of<CUpti_ActivityKernel9>(record, name == nullptr ? "no name" : name);
        break;
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        times = times_of<CUpti_ActivityMemcpy5>(record, "copy");
        break;
      case CUPTI_ACTIVITY_KIND_MEMSET:
        times = times_of<CUpti_ActivityMemset4>(record, "fill");
        break;
      default:
        continue;
    }
    if (times.start == 0 || times.end < times.start) {
      ++all.lost;
    } else {
      all.intervals.push_back(std::move(times));
    }
  }
  std::size_t dropped = 0;
  if (cupti().count_dropped(context, stream, &dropped) == CUPTI_SUCCESS) all.lost += dropped;
  std::free(buffer);
}

}  // namespace

ActivityRecorder::ActivityRecorder() {
  cupti().check(cupti().register_callbacks(&give_buffer, &read_buffer),
                "cuptiActivityRegisterCallbacks");
  for (const CUpti_ActivityKind kind : kKinds) {
    cupti().check(cupti().enable(kind), "cuptiActivityEnable");
  }
}

ActivityRecorder::~ActivityRecorder() {
  for (const CUpti_ActivityKind kind : kKinds) static_cast<void>(cupti().disable(kind));
}

std::vector<BusyInterval> ActivityRecorder::take() {
  cupti().check(cupti().flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  if (all.lost > 0) {
    throw Error(ErrorCode::kDevice, fmt::format("CUPTI lost {} records", all.lost));
  }
  std::vector<BusyInterval> taken;
  taken.swap(all.intervals);
  return taken;
}

#else

ActivityRecorder::ActivityRecorder() {
  throw Error(ErrorCode::kDevice, "no CUPTI where this was built");
}
ActivityRecorder::~ActivityRecorder() = default;
std::vector<BusyInterval> ActivityRecorder::take() { return {}; }

#endif

}  // namespace sluice::benchmarks
