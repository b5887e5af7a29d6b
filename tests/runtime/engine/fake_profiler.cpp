// A library that NVTX loads as it loads a profiler (NVTX_INJECTION64_PATH). Appends the name of
// each range that a thread opens, and a line "end" for each that it closes, to the file of the
// variable SLUICE_TEST_RANGES.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>

namespace {

std::FILE* file = nullptr;

int push(const char* name) {
  std::fprintf(file, "%s\n", name);
  std::fflush(file);
  return 0;
}
int pop() { return push("end"); }

}  // namespace

// The name is NVTX's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const char* const path = std::getenv("SLUICE_TEST_RANGES");
  file = path == nullptr ? nullptr : std::fopen(path, "a");
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (file == nullptr || callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE_RangePop) {
    return 0;
  }
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
